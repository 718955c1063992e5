"""Weights in several files with an index: whole, or refused by the name of a file."""

import json
from pathlib import Path

import numpy as np
import pytest

from optimizer.checkpoint import fingerprint, inspect
from optimizer.errors import ModelError
from optimizer.folder import INDEX, WEIGHTS
from tests.optimizer.by_hand import write_folder, write_index, write_tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model")


@pytest.fixture
def sharded(folder: Path) -> Path:
    """The same with three shards of one, two and one tensors."""
    (folder / WEIGHTS).unlink()
    shards = {"s1": ["a"], "s2": ["b", "c"], "s3": ["d"]}
    for shard, names in shards.items():
        tensors = {name: np.ones(4) for name in names}
        write_tensors(folder / f"{shard}.safetensors", tensors, "F32")
    write_index(
        folder, {n: f"{s}.safetensors" for s, names in shards.items() for n in names}
    )
    return folder


def test_all_shards_are_one_model(sharded: Path) -> None:
    checkpoint = inspect(sharded)
    assert sorted(checkpoint.tensors) == ["a", "b", "c", "d"]
    assert checkpoint.files == ("s1.safetensors", "s2.safetensors", "s3.safetensors")


def test_fingerprint_progress_reaches_one_and_never_goes_back(sharded: Path) -> None:
    seen: list[float] = []
    fingerprint(sharded, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


# --- shards (case C14a) ----------------------------------------------------------


def test_missing_shard_is_named_with_the_number_of_its_tensors(sharded: Path) -> None:
    (sharded / "s2.safetensors").unlink()
    with pytest.raises(ModelError, match=r"s2\.safetensors missing .*: 2 of 4 tensors"):
        inspect(sharded)


def test_truncated_shard_is_named(sharded: Path) -> None:
    shard = sharded / "s2.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"s2\.safetensors is refused: truncated"):
        inspect(sharded)


def test_index_with_a_tensor_that_no_shard_has_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    write_index(sharded, {**index["weight_map"], "ghost": "s3.safetensors"})
    with pytest.raises(ModelError, match="1 tensors that its shards do not: ghost"):
        inspect(sharded)


def test_shard_with_a_tensor_that_the_index_lacks_is_refused(sharded: Path) -> None:
    tensors = {"d": np.ones(4), "stale": np.ones(4)}
    write_tensors(sharded / "s3.safetensors", tensors, "F32")
    with pytest.raises(ModelError, match=r"s3\.safetensors holds 'stale'"):
        inspect(sharded)


def test_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    write_tensors(sharded / "s3.safetensors", {"d": np.ones(4), "a": np.ones(4)}, "F32")
    said = r"s1\.safetensors and s3\.safetensors both hold 'a'.*Copy all files of one"
    with pytest.raises(ModelError, match=said):
        inspect(sharded)


def test_index_that_has_a_tensor_in_another_shard_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    write_index(sharded, {**index["weight_map"], "b": "s3.safetensors"})
    with pytest.raises(ModelError, match=r"s2\.safetensors holds 'b', which"):
        inspect(sharded)


def test_index_that_states_another_size_is_a_warning(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    for total, warned in ((4 * 4 * 4, False), (4 * 4 * 4 + 1, True), ("x", False)):
        index["metadata"] = {"total_size": total}
        (sharded / INDEX).write_text(json.dumps(index))
        assert any("total_size" in w for w in inspect(sharded).warnings) is warned


def test_files_that_nobody_reads_are_named(sharded: Path) -> None:
    assert inspect(sharded).warnings == ()
    write_tensors(sharded / "consolidated.safetensors", {"x": np.ones(2)}, "F32")
    (warning,) = inspect(sharded).warnings
    assert warning.endswith("not read: consolidated.safetensors")


def test_an_index_beside_a_single_file_is_not_read(folder: Path) -> None:
    write_index(folder, {"w": "of-another-save.safetensors"})
    (warning,) = inspect(folder).warnings
    assert warning.endswith(f"not read: {INDEX}")


@pytest.mark.parametrize("name", ["../s1.safetensors", "/etc/passwd", "s1.bin", ""])
def test_index_that_names_a_file_elsewhere_is_refused(sharded: Path, name: str) -> None:
    write_index(sharded, {"a": name})
    with pytest.raises(ModelError, match=r"it must be a .* file beside it"):
        inspect(sharded)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    with pytest.raises(ModelError, match=r"s1\.safetensors is there, but neither"):
        inspect(sharded)


@pytest.mark.parametrize("index", [b"{}", b'{"weight_map": []}', b'{"weight_map": {}}'])
def test_index_without_a_weight_map_is_refused(sharded: Path, index: bytes) -> None:
    (sharded / INDEX).write_bytes(index)
    with pytest.raises(ModelError, match="has no weight_map"):
        inspect(sharded)
