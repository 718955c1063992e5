"""Sizes read off a config are those of the network that transformers builds of it."""

from dataclasses import replace
from typing import Any

import pytest
import transformers

from optimizer.checkpoint import ARCHITECTURES
from optimizer.configs import MAX_LAYERS, shape_of
from optimizer.errors import ModelError
from optimizer.families import FAMILIES
from tests.optimizer import tiny

EVERY = sorted({**tiny.MAKERS, **tiny.FORMS})


def config_of(name: str) -> dict[str, Any]:
    """As `save_pretrained` writes it."""
    made = {**tiny.MAKERS, **tiny.FORMS}[name]()
    return {**made.to_dict(), "architectures": [name.partition("/")[0]]}


@pytest.mark.parametrize("name", EVERY)
def test_a_config_says_what_the_network_has(name: str) -> None:
    built = tiny.loaded(name).shape
    read = shape_of(config_of(name), built.stored_bytes)
    assert read == built


@pytest.mark.parametrize("name", EVERY)
def test_fields_that_transformers_does_not_write_have_its_defaults(name: str) -> None:
    made = {**tiny.MAKERS, **tiny.FORMS}[name]()
    written = {**made.to_diff_dict(), "architectures": [name.partition("/")[0]]}
    assert shape_of(written) == shape_of(config_of(name))


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_defaults_are_those_of_transformers_classes(kind: str) -> None:
    made = transformers.CONFIG_MAPPING[kind]()
    plain = {
        "use_sliding_window": False,
        "sliding_window": 4096,
    }  # as given, not as used
    for name, value in FAMILIES[kind].defaults.items():
        if name in plain and kind.startswith("qwen"):
            assert value == plain[name]
        elif hasattr(made, name):
            assert getattr(made, name) == value or (name, value) in (
                ("mlp_only_layers", None),  # which becomes []
                ("num_ln_in_parallel_attn", None),
            )


def test_every_architecture_that_may_be_loaded_is_known() -> None:
    assert set(ARCHITECTURES.values()) <= set(FAMILIES)


def test_old_falcons_name_their_norms() -> None:
    config = config_of("FalconForCausalLM/groups")
    one = shape_of({**config, "num_ln_in_parallel_attn": 1})
    two = shape_of(config)
    # Two layers, each without one norm of 32 weights and 32 biases.
    assert two.parameters - one.parameters == 2 * 64


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": MAX_LAYERS + 1}, "num_hidden_layers"),
        ({"vocab_size": 1e9}, "vocab_size"),
        ({"num_attention_heads": -1}, "num_attention_heads"),
        ({"num_key_value_heads": 5}, "num_key_value_heads"),
        ({"intermediate_size": 2**60}, "intermediate_size"),
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "None"),
    ],
)
def test_what_is_no_size_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        shape_of({**config_of("LlamaForCausalLM"), **change})


def test_a_config_without_a_context_is_read() -> None:
    config = config_of("LlamaForCausalLM")
    del config["max_position_embeddings"]
    del config["architectures"]
    found = shape_of(config)
    assert (found.max_context, found.architecture) == (0, "llama")
    assert replace(found, max_context=64, architecture="LlamaForCausalLM") == shape_of(
        config_of("LlamaForCausalLM")
    )
