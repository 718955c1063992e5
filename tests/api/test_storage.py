"""One contract, two storages: a folder, and a bucket of a real S3 server."""

import hashlib
import os
from pathlib import Path

import pytest

from api import storage
from api.settings import settings
from api.storage import StorageUnavailable


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.service)])
def store(request: pytest.FixtureRequest, data_dir: Path) -> storage.Store:
    if request.param == "bucket":
        request.getfixturevalue("bucket")
    return storage.store()


def test_what_is_put_is_described(store: storage.Store) -> None:
    stored = storage.put("job_1", 2, "report.json", b"{}")
    key = storage.key("job_1", 2, "report.json")
    assert store.read(key) == b"{}"
    assert store.size(key) == 2
    assert stored.sha256 == hashlib.sha256(b"{}").hexdigest()
    assert (stored.bytes, stored.media_type) == (2, "application/json")


def test_a_file_is_put_as_it_is(store: storage.Store, tmp_path: Path) -> None:
    content = os.urandom(3 * 2**20 + 17)
    (tmp_path / "weights").write_bytes(content)
    stored = storage.put_file("job_1", 1, "out/w.safetensors", tmp_path / "weights")
    key = storage.key("job_1", 1, "out/w.safetensors")
    assert stored.sha256 == hashlib.sha256(content).hexdigest()
    assert stored.media_type == "application/octet-stream"
    assert b"".join(store.chunks(key, 0, len(content))) == content
    assert (
        b"".join(store.chunks(key, 2**20 - 1, 2**21 + 1))
        == content[2**20 - 1 : 2**21 + 1]
    )
    assert b"".join(store.chunks(key, 5, 5)) == b""


def test_attempts_do_not_share_a_folder(store: storage.Store) -> None:
    storage.put("job_1", 1, "a.txt", b"first")
    storage.put("job_1", 2, "a.txt", b"second")
    assert store.read(storage.key("job_1", 1, "a.txt")) == b"first"


def test_a_job_is_removed_with_all_its_attempts(store: storage.Store) -> None:
    storage.put("job_1", 1, "a.txt", b"first")
    storage.put("job_1", 2, "dir/a.txt", b"second")
    storage.put("job_12", 1, "a.txt", b"another's")
    storage.remove_job("job_1")
    storage.remove_job("job_1")  # nothing is there any more
    with pytest.raises(FileNotFoundError):
        store.size(storage.key("job_1", 1, "a.txt"))
    with pytest.raises(FileNotFoundError):
        store.read(storage.key("job_1", 2, "dir/a.txt"))
    assert store.read(storage.key("job_12", 1, "a.txt")) == b"another's"


def test_a_failed_put_leaves_the_old_file_and_no_part(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.put("job_1", 1, "a.txt", b"old")

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        storage.put("job_1", 1, "a.txt", b"new")
    folder = data_dir / "artifacts" / "job_1" / "1"
    assert os.listdir(folder) == ["a.txt"]
    assert (folder / "a.txt").read_bytes() == b"old"


@pytest.mark.service
def test_a_bucket_that_is_away_says_so(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_STORAGE_URL", "s3://no-such-bucket/x")
    settings.cache_clear()
    storage.store.cache_clear()
    with pytest.raises(OSError, match=r"no.such|bucket|storage"):
        storage.put("job_1", 1, "a.txt", b"x")


def test_a_storage_that_nobody_knows_is_refused(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_STORAGE_URL", "nonsense://x")
    settings.cache_clear()
    storage.store.cache_clear()
    with pytest.raises(StorageUnavailable, match="nonsense"):
        storage.store()


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/../b", "a/", "/a", "a//b", ".hidden", "x" * 200, "é"],
)
def test_a_path_that_leads_elsewhere_is_not_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="artifact name"):
        storage.key("job_1", 1, name)
