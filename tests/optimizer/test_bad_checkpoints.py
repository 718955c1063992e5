"""Checkpoints that are FP8 already, and broken ones, on both roads into memory.

The model is loaded whole (`load`) or its weights come from the files (`stream`): what
is accepted is the same model, what is refused is refused by name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from optimizer.checkpoint import check_values, inspect
from optimizer.errors import ModelError, NonFiniteError, OptimizerError
from optimizer.execute import Reference
from optimizer.formats import E4M3
from optimizer.model import LoadedModel, load
from optimizer.quantize import amax, from_codes, quantize, scale_from_amax, to_codes
from optimizer.stack import Granularity
from optimizer.stream import stream
from tests.optimizer import tiny
from tests.optimizer.changed import DOWN, Weights, change_config, change_weights
from tests.service import tiny_model

Road = Callable[[Path], LoadedModel]
ROADS = pytest.mark.parametrize("road", [load, stream], ids=["load", "stream"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "tiny")


# --- FP8 already (case C11) ---------------------------------------------------------


def narrow(weights: Weights) -> None:
    """Make every matrix of a layer codes, with a scale for each output."""
    for name, weight in list(weights.items()):
        if weight.ndim == 2 and any(part in name for part in ("layer", "h.", "blocks")):
            rows = outputs(name, weight)
            scale = scale_from_amax(amax(rows, Granularity.CHANNEL), E4M3)
            codes = to_codes(quantize(rows, scale, E4M3), E4M3)
            weights[name] = outputs(name, codes.view(torch.float8_e4m3fn))
            weights[f"{name}_scale"] = scale


def widened(weights: Weights) -> None:
    """Make the same model out of ordinary float32 weights."""
    narrow(weights)
    for name in [n for n in weights if f"{n}_scale" in weights]:
        codes = outputs(name, weights[name]).view(torch.uint8)
        values = from_codes(codes, E4M3) * weights.pop(f"{name}_scale")
        weights[name] = outputs(name, values)


def outputs(name: str, matrix: Tensor) -> Tensor:
    """Return the matrix by output, or back: GPT-2 stores it by input."""
    return matrix.t().contiguous() if ".c_" in name else matrix


FLOAT_QUANTIZED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        }
    },
    "ignore": ["lm_head"],
}


@ROADS
@pytest.mark.parametrize("architecture", tiny.MAKERS)
def test_an_fp8_checkpoint_is_the_model_that_its_scales_make(
    tmp_path: Path, architecture: str, road: Road
) -> None:
    network: Any = tiny.network(architecture)
    runs = []
    for name, change in (("fp8", narrow), ("fp32", widened)):
        network.save_pretrained(tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
        change_weights(tmp_path / name, change)
    change_config(tmp_path / "fp8", quantization_config=FLOAT_QUANTIZED)
    assert inspect(tmp_path / "fp8").scales
    for name in ("fp8", "fp32"):
        model = road(tmp_path / name)
        with torch.no_grad():
            runs.append(model.forward(tiny.ids(12), Reference()))
    assert torch.equal(*runs)


def test_an_fp8_checkpoint_is_as_large_as_its_bytes(folder: Path) -> None:
    before = inspect(folder)
    change_weights(folder, narrow)
    after = inspect(folder)
    assert after.parameters == before.parameters
    assert after.stored_bytes < 0.5 * before.stored_bytes
    model = load(folder)
    assert model.shape.stored_bytes == after.stored_bytes
    assert model.shape.parameters == before.parameters


def test_a_config_that_asks_for_fp8_over_wide_weights_changes_nothing(
    folder: Path,
) -> None:
    with torch.no_grad():
        wanted = load(folder).forward(tiny.ids(12), Reference())
        change_config(folder, quantization_config={"quant_method": "fp8"})
        assert torch.equal(load(folder).forward(tiny.ids(12), Reference()), wanted)


# --- refused, whichever road ----------------------------------------------------------


def without_scale(weights: Weights) -> None:
    narrow(weights)
    del weights[f"{DOWN}_scale"]


def with_a_nan_code(weights: Weights) -> None:
    narrow(weights)
    weights[DOWN].view(torch.uint8)[0, 0] = 0x7F


def with_a_nan(weights: Weights) -> None:
    weights[DOWN][3, 5] = torch.nan


def with_an_inf(weights: Weights) -> None:
    weights[DOWN][3, 5] = -torch.inf


def gptq(weights: Weights) -> None:
    weights[DOWN.replace("weight", "qweight")] = torch.zeros(8, 64, dtype=torch.int32)
    del weights[DOWN]


def head_of_its_own(weights: Weights) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1


def without_a_layer(weights: Weights) -> None:
    for name in [n for n in weights if n.startswith("model.layers.1.")]:
        del weights[name]


BROKEN: dict[str, tuple[Callable[[Weights], object], type[OptimizerError], str]] = {
    "codes without a scale": (without_scale, ModelError, "down_proj.* has no scale"),
    "a code that is NaN": (with_a_nan_code, NonFiniteError, "down_proj"),
    "NaN": (with_a_nan, NonFiniteError, r"1\.mlp\.down_proj"),
    "inf": (with_an_inf, NonFiniteError, r"1\.mlp\.down_proj"),
    "GPTQ": (gptq, ModelError, "down_proj.qweight' is a tensor of GPTQ or AWQ"),
    "tied weights apart": (head_of_its_own, ModelError, "ties lm_head.*two different"),
    "a key less": (lambda w: w.pop(DOWN), ModelError, "1 missing keys in tiny"),
    "a layer less": (
        without_a_layer,
        ModelError,
        "num_hidden_layers is 2, .* 1 layers",
    ),
    "a key more": (
        lambda w: w.update({"model.layers.1.mlp.x.weight": torch.zeros(3, 5)}),
        ModelError,
        r"1 unexpected keys in tiny: model\.layers\.1\.mlp\.x\.weight",
    ),
}


@ROADS
@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_broken_is_refused_by_name(folder: Path, kind: str, road: Road) -> None:
    change, error, said = BROKEN[kind]
    change_weights(folder, change)
    with pytest.raises(error, match=said), torch.no_grad():
        # A streamed weight is read when its layer runs.
        road(folder).forward(tiny.ids(8), Reference())


@pytest.mark.parametrize(
    "kind", ["a code that is NaN", "NaN", "inf", "tied weights apart"]
)
def test_what_only_the_values_show_is_refused_when_a_model_is_registered(
    folder: Path, kind: str
) -> None:
    change, error, said = BROKEN[kind]
    change_weights(folder, change)
    checkpoint = inspect(folder)
    with pytest.raises(error, match=said):
        check_values(checkpoint)


# Case C14a: one shard of three is missing, or cut short.
@ROADS
@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda shard: shard.unlink(), r"2\.safetensors missing .*: 7 of \d+ tensors"),
        (
            lambda shard: shard.write_bytes(shard.read_bytes()[:-1]),
            r"2\.safetensors is refused: truncated",
        ),
    ],
    ids=["missing", "truncated"],
)
def test_a_broken_shard_is_named_before_anything_runs(
    folder: Path, spoil: Callable[[Path], object], said: str, road: Road
) -> None:
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(weights)
    shards = {"1": names[:7], "2": names[7:14], "3": names[14:]}
    for shard, held in shards.items():
        save_file({n: weights[n] for n in held}, folder / f"{shard}.safetensors")
    where = {n: f"{s}.safetensors" for s, held in shards.items() for n in held}
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    with torch.no_grad():
        road(folder).forward(tiny.ids(8), Reference())
    spoil(folder / "2.safetensors")
    with pytest.raises(ModelError, match=said):
        road(folder)
