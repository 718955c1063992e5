"""Weights one at a time: what the file says, as float32, and nothing kept."""

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from optimizer import shards as module
from optimizer.errors import ModelError, NonFiniteError
from optimizer.folder import WEIGHTS
from optimizer.formats import E4M3, E5M2, Format
from optimizer.quantize import amax, quantize, scale_from_amax, to_codes
from optimizer.shards import Shards
from optimizer.stack import Granularity
from tests.optimizer.by_hand import (
    NUMPY,
    write_folder,
    write_index,
    write_mixed,
    write_tensors,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


def some(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_values_are_those_of_the_file_widened(folder: Path, dtype: str) -> None:
    values = some(5, 7)
    write_tensors(folder / WEIGHTS, {"a": some(3, seed=1), "w": values}, dtype)
    found = Shards.open(folder).get("w")
    wanted = values.astype(NUMPY[dtype]).astype(np.float32)
    assert found.dtype is torch.float32
    assert found.is_contiguous()
    assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_a_tensor_of_several_pieces_is_whole(
    folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 16)  # 17 values: up to nine pieces
    values = some(17)
    write_tensors(folder / WEIGHTS, {"w": values}, dtype)
    wanted = values.astype(NUMPY[dtype]).astype(np.float32)
    assert np.array_equal(Shards.open(folder).get("w").numpy(), wanted)


@pytest.mark.parametrize("shape", [(), (0,), (0, 4)])
def test_scalars_and_empty_tensors_keep_their_shape(
    folder: Path, shape: tuple[int, ...]
) -> None:
    write_tensors(folder / WEIGHTS, {"w": np.zeros(shape)}, "BF16")
    assert Shards.open(folder).get("w").shape == shape


def test_tensors_of_all_shards_are_found(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    write_tensors(folder / "1.safetensors", {"b": some(2)}, "F32")
    write_tensors(folder / "2.safetensors", {"a": some(3)}, "F32")
    write_index(folder, {"b": "1.safetensors", "a": "2.safetensors"})
    opened = Shards.open(folder)
    assert opened.names() == ("a", "b")
    assert opened.get("a").shape == (3,)


# --- FP8 (case C11) --------------------------------------------------------------


@pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
def test_every_code_becomes_code_times_scale(folder: Path, fmt: Format) -> None:
    dtype = {"fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}[fmt.name]
    codes = np.arange(256, dtype=np.uint8).view(NUMPY[dtype])
    codes = codes[np.isfinite(codes.astype(np.float32))].reshape(2, -1)
    scale = np.float32(0.0123)
    write_mixed(
        folder / WEIGHTS,
        {"w": (dtype, codes), "w_scale": ("F32", np.array([scale]))},
    )
    found = Shards.open(folder).get("w")
    assert np.array_equal(found.numpy(), codes.astype(np.float32) * scale)


@pytest.mark.parametrize(
    ("name", "scale_shape", "spread"),
    [
        ("w_scale", (), lambda s: s),
        ("w_scale", (300,), lambda s: s[:, None]),
        ("w_scale", (300, 1), lambda s: s),
        (
            "w_scale_inv",
            (3, 2),
            lambda s: s.repeat(128, 0).repeat(128, 1)[:300, :200],
        ),
    ],
    ids=["tensor", "row", "column of rows", "blocks"],
)
def test_each_scale_reaches_the_codes_it_covers(
    folder: Path,
    name: str,
    scale_shape: tuple[int, ...],
    spread: Callable[[np.ndarray], np.ndarray],
) -> None:
    codes = (80 * some(300, 200)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.exp(np.asarray(some(*scale_shape))).astype(np.float32)
    write_mixed(folder / WEIGHTS, {"w": ("F8_E4M3", codes), name: ("F32", scale)})
    opened = Shards.open(folder)
    assert opened.names() == ("w",)
    wanted = codes.astype(np.float32) * spread(scale)
    assert np.array_equal(opened.get("w").numpy(), wanted)


def test_codes_are_never_taken_for_values(folder: Path) -> None:
    # The largest code is 448 whatever the weights: an amax of codes says nothing.
    write_mixed(
        folder / WEIGHTS,
        {
            "w": ("F8_E4M3", np.array([[448.0, -2.0]])),
            "w_scale": ("BF16", np.array([0.03125])),
        },
    )
    assert Shards.open(folder).get("w").tolist() == [[14.0, -0.0625]]


@pytest.mark.parametrize("granularity", [Granularity.TENSOR, Granularity.CHANNEL])
def test_quantizing_again_gives_the_same_bytes(
    folder: Path, granularity: Granularity
) -> None:
    original = torch.from_numpy(some(64, 48)).float()
    scale = scale_from_amax(amax(original, granularity), E4M3)
    codes = to_codes(quantize(original, scale, E4M3), E4M3)
    write_mixed(
        folder / WEIGHTS,
        {
            "w": ("F8_E4M3", codes.numpy().view(ml_dtypes.float8_e4m3fn)),
            "w_scale": ("F32", scale.numpy()),
        },
    )
    weight = Shards.open(folder).get("w")
    again = scale_from_amax(amax(weight, granularity), E4M3)
    torch.testing.assert_close(again, scale, rtol=2.0**-22, atol=0)  # two roundings
    assert torch.equal(to_codes(quantize(weight, again, E4M3), E4M3), codes)


# --- what cannot be read -----------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_no_number_is_named(folder: Path, bad: float) -> None:
    values = some(4, 4)
    values[3, 3] = bad
    write_tensors(folder / WEIGHTS, {"fine": some(2), "w": values}, "BF16")
    opened = Shards.open(folder)
    opened.get("fine")
    with pytest.raises(NonFiniteError, match=r"tensor w of model\.safetensors"):
        opened.get("w")


def test_a_scale_that_is_no_number_is_named_by_its_weight(folder: Path) -> None:
    codes, scale = ("F8_E4M3", some(4, 4)), ("F32", np.array([np.nan]))
    write_mixed(folder / WEIGHTS, {"w": codes, "w_scale": scale})
    with pytest.raises(NonFiniteError, match="tensor w of"):
        Shards.open(folder).get("w")


def test_a_name_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"no tensor layers\.9 in model"):
        Shards.open(folder).get("layers.9")


def test_integers_are_no_weights(folder: Path) -> None:
    write_tensors(folder / WEIGHTS, {"ids": np.arange(3)}, "I64")
    with pytest.raises(ModelError, match=r"tensor ids of .* is I64, not a float"):
        Shards.open(folder).get("ids")


def test_a_file_that_shrinks_is_an_error(folder: Path) -> None:
    opened = Shards.open(folder)
    (folder / WEIGHTS).write_bytes(b"")
    with pytest.raises(ModelError, match="became shorter"):
        opened.get("w")


def test_reading_holds_one_piece_beside_the_result(folder: Path) -> None:
    count = 4 * module.CHUNK_BYTES // 2  # 64 MiB of bf16, four pieces
    write_tensors(folder / WEIGHTS, {"w": np.zeros(count, np.float32)}, "BF16")
    opened = Shards.open(folder)
    tracemalloc.start()  # sees numpy's pieces; the result is torch's
    found: Tensor = opened.get("w")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.numel() == count
    assert peak < 3 * module.CHUNK_BYTES
