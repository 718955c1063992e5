import hashlib
import os
from pathlib import Path

import pytest

from api import storage

pytestmark = pytest.mark.usefixtures("data_dir")


def test_what_is_put_is_described() -> None:
    stored = storage.put("job_1", 2, "report.json", b"{}")
    path = storage.path("job_1", 2, "report.json")
    assert path.read_bytes() == b"{}"
    assert stored.sha256 == hashlib.sha256(b"{}").hexdigest()
    assert (stored.bytes, stored.media_type) == (2, "application/json")
    assert os.listdir(path.parent) == ["report.json"]


def test_attempts_do_not_share_a_folder() -> None:
    storage.put("job_1", 1, "a.txt", b"first")
    storage.put("job_1", 2, "a.txt", b"second")
    assert storage.path("job_1", 1, "a.txt").read_bytes() == b"first"


def test_a_failed_put_leaves_the_old_file_and_no_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    storage.put("job_1", 1, "a.txt", b"old")

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        storage.put("job_1", 1, "a.txt", b"new")
    folder = storage.path("job_1", 1, "a.txt").parent
    assert os.listdir(folder) == ["a.txt"]
    assert Path(folder, "a.txt").read_bytes() == b"old"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".hidden", "x" * 200])
def test_a_path_is_not_a_name(name: str) -> None:
    with pytest.raises(ValueError, match="artifact name"):
        storage.path("job_1", 1, name)
