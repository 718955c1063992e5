from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from optimizer.calibrate import amaxes, calibrate
from optimizer.errors import ModelError
from optimizer.exact import exact
from optimizer.execute import Reference, Stacked, WeightCodes
from optimizer.model import LoadedModel, load
from optimizer.sensitivity import measure
from optimizer.stack import CHOICES, Choice, Component, Site, Stack
from optimizer.stream import outline, stream
from tests.optimizer import tiny
from tests.service import tiny_model

SEQUENCES = [tiny.ids(24, seed=s) for s in range(2)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


def candidates(model: LoadedModel) -> dict[Site, list[Choice]]:
    return {s: list(CHOICES[s.component]) for s in model.sites}


def in_memory(model: LoadedModel) -> set[str]:
    return {n for n, p in model.network.named_parameters() if not p.is_meta}


def test_an_outline_has_the_sites_and_no_weights(folder: Path) -> None:
    bare, loaded = outline(folder), load(folder)
    assert bare.shape == loaded.shape
    assert bare.coverage_percent == loaded.coverage_percent
    assert in_memory(bare) == set()


def test_what_is_streamed_is_the_model_bit_for_bit(folder: Path) -> None:
    streamed, loaded = stream(folder), load(folder)
    with torch.no_grad():
        for ids in SEQUENCES:
            want = loaded.forward(ids, Reference())
            assert torch.equal(streamed.forward(ids, Reference()), want)
    found = []
    for model in (streamed, loaded):
        wanted, weights = candidates(model), WeightCodes(model)
        largest = amaxes(calibrate(model, SEQUENCES))
        fast = measure(model, SEQUENCES, wanted, largest, weights)
        slow = exact(model, SEQUENCES[:1], wanted, largest, weights)
        coarse = Stack({s: wanted[s][-1] for s in model.sites})
        with torch.no_grad():
            run = model.forward(SEQUENCES[0], Stacked(coarse, largest, weights))
        found.append((fast, slow, run.tolist()))
    assert found[0] == found[1]


def test_only_one_stage_is_in_memory(folder: Path) -> None:
    model = stream(folder)
    small = in_memory(model)
    assert small == {"model.norm.weight"}
    seen: list[set[str]] = []

    def look(layer: int) -> None:
        seen.append(in_memory(model) - small)

    model.on_layer = look
    weights, largest = WeightCodes(model), amaxes(calibrate(model, SEQUENCES))
    measure(model, SEQUENCES, candidates(model), largest, weights)
    assert seen
    for names in seen:
        assert len({n.split(".")[2] for n in names}) == 1  # of one layer
    assert in_memory(model) == small
    assert not weights._made  # codes go with the weights they were made from


def test_tied_weights_are_read_for_both_ends(folder: Path) -> None:
    model = stream(folder)
    assert model.shape.tied_embeddings
    head = model.parts[Site(-1, Component.LM_HEAD)][0]
    with model.residency.holding(model.stages - 1):
        assert not head.weight.is_meta
        table = next(m for m in model.network.modules() if isinstance(m, nn.Embedding))
        assert table.weight.is_meta
    assert head.weight is table.weight  # tied again


def test_files_of_another_layout_are_refused_by_name(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.extra.weight"] = torch.zeros(3)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 unexpected keys in tiny: model\.extra"):
        stream(folder)
    del weights["model.extra.weight"], weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        stream(folder)
