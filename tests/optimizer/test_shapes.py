"""The sizes that the cost model reads of every architecture."""

import json
from pathlib import Path

import pytest

from optimizer.checkpoint import longest_sequence
from optimizer.shapes import max_context
from optimizer.stack import LINEAR, WHOLE_MODEL, Component, SiteShape
from tests.optimizer import tiny

EVERY = sorted({**tiny.MAKERS, **tiny.FORMS})
WINDOWS = {  # of the two layers
    "MistralForCausalLM": [8, 8],
    "Gemma2ForCausalLM": [8, None],
    "Gemma3ForCausalLM": [8, None],
    "Qwen2ForCausalLM/windows": [None, 8],
    "Phi3ForCausalLM/windows": [8, 8],
    "MixtralForCausalLM/windows": [8, 8],
}


def shapes_of(name: str) -> dict[tuple[int, Component], SiteShape]:
    sites = tiny.loaded(name).shape.sites
    return {(s.site.layer, s.site.component): s for s in sites}


@pytest.mark.parametrize("name", EVERY)
def test_windows_are_those_of_each_layer(name: str) -> None:
    shapes = shapes_of(name)
    found = [shapes[layer, Component.ATTN_SCORES].window for layer in (0, 1)]
    assert found == WINDOWS.get(name, [None, None])


@pytest.mark.parametrize("name", EVERY)
def test_weights_of_linear_sites_are_those_of_their_parts(name: str) -> None:
    model = tiny.loaded(name)
    for shape in model.shape.sites:
        if shape.site.component in LINEAR | {Component.ROUTER}:
            parts = model.parts[shape.site]
            assert shape.weight_elements == sum(p.weight.numel() for p in parts)
            assert shape.parts == tuple(p.weight.shape[0] for p in parts)
            read = shape.active_share * shape.weight_elements
            assert shape.n * shape.k == pytest.approx(read)


@pytest.mark.parametrize(
    ("name", "norms"),
    [
        ("LlamaForCausalLM", 2),
        ("Qwen3ForCausalLM", 2),  # those of each head aside
        ("Gemma2ForCausalLM", 4),
        ("FalconForCausalLM", 1),  # attention and MLP read the same
        ("FalconForCausalLM/groups", 2),
        ("BertForMaskedLM", 2),
        ("DistilBertForMaskedLM", 2),
    ],
)
def test_norms_of_hidden_states_are_counted(name: str, norms: int) -> None:
    assert shapes_of(name)[0, Component.NORMS].elements == norms * tiny.WIDTH


def test_an_encoder_has_no_cache_and_one_table_of_three() -> None:
    model = tiny.loaded("BertForMaskedLM")
    shapes = shapes_of("BertForMaskedLM")
    assert (0, Component.KV_CACHE) not in shapes
    rows = tiny.VOCAB + tiny.CONTEXT + 2  # tokens, positions, token types
    table = shapes[WHOLE_MODEL, Component.EMBEDDINGS]
    assert table.weight_elements == rows * tiny.WIDTH
    assert model.shape.tied_embeddings


@pytest.mark.parametrize("name", EVERY)
def test_the_context_is_what_the_config_says(name: str, tmp_path: Path) -> None:
    # RoBERTa's first position comes after that of its padding token, which is 0 here.
    wanted = tiny.CONTEXT - 1 if name.startswith("Roberta") else tiny.CONTEXT
    config = {**tiny.MAKERS, **tiny.FORMS}[name]()
    assert max_context(config) == wanted
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    assert longest_sequence(tmp_path) == wanted
