"""Each parameter is found in the files, whatever transformers does while it loads."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from optimizer.checkpoint import inspect
from optimizer.construct import class_of, construct, models_error, plain_config
from optimizer.errors import ModelError
from optimizer.shards import Shards
from optimizer.stored import read, sources
from optimizer.stream import without_weights
from tests.optimizer import tiny

Weights = dict[str, Tensor]


def saved(architecture: str, folder: Path) -> Path:
    tiny.network(architecture).save_pretrained(folder)  # type: ignore[operator]
    (folder / "tokenizer.json").write_text("{}")
    return folder


def change_weights(folder: Path, change: Callable[[Weights], object]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    change(weights)
    save_file(weights, file, metadata={"format": "pt"})


def bare(folder: Path) -> tuple[nn.Module, Shards]:
    checkpoint = inspect(folder)
    with models_error(checkpoint):
        cls = class_of(checkpoint)
        config = cls.config_class.from_dict(plain_config(checkpoint))
        return without_weights(cls, config), Shards(checkpoint)


def found(folder: Path) -> Weights:
    network, shards = bare(folder)
    return {n: read(shards, s) for n, s in sources(network, shards).items()}


@pytest.mark.parametrize("architecture", tiny.MAKERS)
def test_what_is_read_is_what_transformers_loads(
    tmp_path: Path, architecture: str
) -> None:
    folder = saved(architecture, tmp_path / "model")
    loaded = construct(inspect(folder), "eager")
    wanted = dict(loaded.named_parameters(remove_duplicate=False))
    one_by_one = found(folder)
    assert one_by_one.keys() == wanted.keys()
    assert all(torch.equal(one_by_one[name], w) for name, w in wanted.items())


# Case A14: frequencies of rotary embeddings stay float32, and are not read from files.
@pytest.mark.parametrize("architecture", tiny.MAKERS)
def test_buffers_are_real_and_float32_without_weights_too(
    tmp_path: Path, architecture: str
) -> None:
    folder = saved(architecture, tmp_path / "model")
    change_weights(folder, lambda w: w.update({n: v.bfloat16() for n, v in w.items()}))
    wanted = dict(construct(inspect(folder), "eager").named_buffers())
    bare_buffers = dict(bare(folder)[0].named_buffers())
    assert bare_buffers.keys() == wanted.keys()
    for name, buffer in bare_buffers.items():
        assert torch.equal(buffer, wanted[name])
        assert buffer.dtype in (torch.float32, torch.int64)  # int64: positions


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda w: w.pop("h.1.attn.c_attn.bias"), "1 missing keys in model: .*c_attn"),
        (
            lambda w: w.update({"h.0.mlp.c_fc.bias": torch.zeros(3)}),
            r"1 mismatched keys in model: transformer\.h\.0\.mlp\.c_fc\.bias",
        ),
        (
            lambda w: w.update({"h.1.extra.weight": torch.ones(3)}),
            r"1 unexpected keys in model: h\.1\.extra\.weight",
        ),
    ],
    ids=["missing", "of another shape", "left over"],
)
def test_files_that_are_not_the_networks_are_named(
    tmp_path: Path, change: Callable[[Weights], object], said: str
) -> None:
    folder = saved("GPT2LMHeadModel", tmp_path / "model")
    prefix = "transformer."

    def as_on_the_hub(weights: Weights) -> None:
        plain = {n.removeprefix(prefix): w for n, w in weights.items()}
        plain["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)  # a mask: no weight
        weights.clear()
        weights.update(plain)

    change_weights(folder, as_on_the_hub)
    found(folder)
    change_weights(folder, change)
    with pytest.raises(ModelError, match=said):
        found(folder)


def test_an_expert_without_a_matrix_is_named(tmp_path: Path) -> None:
    folder = saved("Qwen3MoeForCausalLM", tmp_path / "model")
    change_weights(
        folder, lambda w: w.pop("model.layers.1.mlp.experts.2.up_proj.weight")
    )
    with pytest.raises(ModelError, match=r"mismatched keys .*layers\.1\.mlp\.experts"):
        found(folder)


def test_names_of_old_berts_are_understood(tmp_path: Path) -> None:
    folder = saved("BertForMaskedLM", tmp_path / "model")
    before = found(folder)

    def age(weights: Weights) -> None:
        for name in list(weights):
            old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
            old = old.replace("LayerNorm.bias", "LayerNorm.beta")
            weights[old] = weights.pop(name)
        weights["cls.seq_relationship.weight"] = torch.ones(2, 32)
        weights["bert.pooler.dense.weight"] = torch.ones(32, 32)
        weights["bert.embeddings.position_ids"] = torch.arange(64)[None]

    change_weights(folder, age)
    after = found(folder)
    assert all(torch.equal(before[name], w) for name, w in after.items())
    whole = dict(construct(inspect(folder), "eager").named_parameters())
    assert all(torch.equal(after[name], w) for name, w in whole.items())


# --- tied weights (case C1) ----------------------------------------------------------


def tied_llama(folder: Path, **own_head: float) -> Path:
    """A Llama whose config ties its embeddings, and whose files hold a head too."""
    saved("LlamaForCausalLM", folder)
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))

    def head(weights: Weights) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        for name, value in own_head.items():
            assert name == "first"
            weights["lm_head.weight"][0, 0] = value

    change_weights(folder, head)
    return folder


def test_tied_weights_that_are_stored_twice_are_one_tensor(tmp_path: Path) -> None:
    folder = tied_llama(tmp_path / "model")
    network = construct(inspect(folder), "eager")
    head = network.get_parameter("lm_head.weight")
    assert head is network.get_parameter("model.embed_tokens.weight")
    assert set(found(folder)) == {
        n for n, _ in network.named_parameters(remove_duplicate=False)
    }


def test_tied_weights_forced_apart_are_named(tmp_path: Path) -> None:
    folder = tied_llama(tmp_path / "model", first=7.0)
    said = (
        r"ties lm_head\.weight to model\.embed_tokens\.weight.*two different tensors: "
        "set tie_word_embeddings to false"
    )
    with pytest.raises(ModelError, match=said):
        construct(inspect(folder), "eager")
    with pytest.raises(ModelError, match=said):
        found(folder)


def test_a_head_of_its_own_is_loaded_as_such(tmp_path: Path) -> None:
    folder = saved("LlamaForCausalLM", tmp_path / "model")
    network = construct(inspect(folder), "eager")
    head = network.get_parameter("lm_head.weight")
    assert not torch.equal(head, network.get_parameter("model.embed_tokens.weight"))
