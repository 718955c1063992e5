"""Folders that are quantized already: FP8 with its scales is taken, the rest named."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from optimizer.checkpoint import Checkpoint, inspect
from optimizer.errors import ModelError
from optimizer.folder import WEIGHTS
from optimizer.quantized import CodeScale
from tests.optimizer.by_hand import write_config, write_folder, write_mixed

Tensors = dict[str, tuple[str, np.ndarray]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def codes(*shape: int) -> tuple[str, np.ndarray]:
    return "F8_E4M3", np.ones(shape)


def scale(*shape: int, dtype: str = "F32") -> tuple[str, np.ndarray]:
    return dtype, np.full(shape, 0.5)


def inspected(folder: Path, tensors: Tensors, **quantization: Any) -> Checkpoint:
    write_config(folder, quantization_config=quantization or None)
    write_mixed(folder / WEIGHTS, tensors)
    return inspect(folder)


# Case C11: every layout of scales that FP8 checkpoints have.
@pytest.mark.parametrize(
    ("name", "shape", "covered"),
    [
        ("w_scale", (), (300, 200)),
        ("w_scale", (1,), (300, 200)),
        ("w_scale", (300,), (1, 200)),
        ("w_scale", (300, 1), (1, 200)),
        ("w_scale", (3, 2), (128, 128)),
        ("w_scale_inv", (3, 2), (128, 128)),
    ],
)
def test_scale_of_fp8_codes_is_found(
    folder: Path, name: str, shape: tuple[int, ...], covered: tuple[int, int]
) -> None:
    tensors = {"w": codes(300, 200), name: scale(*shape), "norm": scale(200)}
    checkpoint = inspected(folder, tensors)
    assert checkpoint.scales == {"w": CodeScale(name, *covered)}
    assert checkpoint.beside == {name}
    assert checkpoint.parameters == 300 * 200 + 200  # a scale is no parameter
    assert checkpoint.stored_bytes == 300 * 200 + 4 * (200 + int(np.prod(shape)))
    (warning,) = checkpoint.warnings  # scales and codes are no mixture of dtypes
    assert "1 tensors are FP8 already" in warning


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "weight_block_size": [64, 32]},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "group_0": {
                    "weights": {
                        "num_bits": 8,
                        "type": "float",
                        "block_structure": [64, 32],
                    }
                }
            },
        },
    ],
    ids=["fp8", "compressed-tensors"],
)
def test_blocks_are_as_large_as_the_config_says(
    folder: Path, quantization: dict[str, Any]
) -> None:
    tensors = {"w": codes(130, 40), "w_scale_inv": scale(3, 2)}
    found = inspected(folder, tensors, **quantization)
    assert found.scales["w"] == CodeScale("w_scale_inv", 64, 32)


def test_scales_of_activations_are_no_weights(folder: Path) -> None:
    tensors = {
        "l.weight": codes(16, 32),
        "l.weight_scale": scale(1, dtype="BF16"),
        "l.input_scale": scale(1),
        "attn.k_scale": scale(1),
    }
    checkpoint = inspected(folder, tensors, quant_method="fp8")
    assert checkpoint.beside == tensors.keys() - {"l.weight"}
    assert checkpoint.parameters == 16 * 32


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({"w": codes(16, 32)}, "'w' holds F8_E4M3 codes and has no scale: 'w_scale"),
        (
            {"w": codes(2, 2), "w_scale": scale(1), "w_scale_inv": scale(1)},
            "'w' holds F8_E4M3 codes and has two scales",
        ),
        (
            {"w": codes(16, 32), "w_scale": scale(32)},
            r"the scale 'w_scale' has the shape \[32\], which is neither one for the "
            r"tensor of \[16, 32\], nor one a row, nor one a block of 128×128",
        ),
        (
            {"w": codes(4, 2, 2), "w_scale": scale(4)},
            r"the scale 'w_scale' has the shape \[4\]",
        ),
        (
            {"w": codes(16, 32), "w_scale": codes(1), "w_scale_scale": scale(1)},
            "the scale 'w_scale' is F8_E4M3",
        ),
        (
            {"l.qweight": ("I64", np.ones(3))},
            "'l.qweight' is a tensor of GPTQ or AWQ: .* give the model it was made from",
        ),
        ({"l.weight.absmax": scale(3)}, "a tensor of bitsandbytes"),
        ({"l.weight_scale_2": scale(1)}, "a tensor of NVFP4"),
        (
            {"l.weight": ("I64", np.ones((2, 2)))},
            r"'l\.weight' is a tensor of integers \(I64\): of models",
        ),
        ({"l.weight_packed": ("I64", np.ones(3))}, "packed integers"),
    ],
)
def test_codes_that_cannot_be_read_are_named(
    folder: Path, tensors: Tensors, said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        inspected(folder, tensors)


def _groups(**weights: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"g": weights}}


FLOAT8 = {"num_bits": 8, "type": "float"}
SAYS = "of models that are already quantized only FP8 is read; give the model it was"


@pytest.mark.parametrize(
    ("quantization", "said"),
    [
        ({"quant_method": "gptq"}, "(gptq)"),
        ({"quant_method": "awq"}, "(awq)"),
        ({"quant_method": "bitsandbytes"}, "(bitsandbytes)"),
        ({"quant_method": "mxfp4"}, "(mxfp4)"),
        ({"bits": 4}, "(no quant_method)"),
        (
            _groups(weights={"num_bits": 4, "type": "int"}),
            "(compressed-tensors, 4-bit int)",
        ),
        (
            _groups(weights={"num_bits": 4, "type": "float"}),
            "(compressed-tensors, 4-bit float)",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "(compressed-tensors, pack-quantized)",
        ),
        (
            {
                **_groups(weights=FLOAT8),
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "(compressed-tensors, sparsity_config)",
        ),
        (
            {**_groups(weights=FLOAT8), "transform_config": {"config_groups": {}}},
            "(compressed-tensors, transform_config)",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "(modelopt, NVFP4)"),
    ],
    ids=str,
)
def test_other_methods_are_refused_by_name(
    folder: Path, quantization: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError) as caught:
        inspected(folder, {"w": scale(2, 3)}, **quantization)
    assert f"quantization_config {said}" in str(caught.value)
    assert SAYS in str(caught.value)


def test_a_quantization_config_that_is_no_object_is_refused(folder: Path) -> None:
    write_config(folder, quantization_config=8)
    with pytest.raises(ModelError, match="no quant_method"):
        inspect(folder)


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {**_groups(weights=FLOAT8), "format": "float-quantized"},
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": None}, "b": 7},
            "sparsity_config": {"format": "dense"},
            "transform_config": {},
        },
    ],
    ids=str,
)
def test_fp8_methods_are_read(folder: Path, quantization: dict[str, Any]) -> None:
    tensors = {"w": codes(4, 2), "w_scale": scale(1)}
    assert set(inspected(folder, tensors, **quantization).scales) == {"w"}
