"""Places in lists: read back, signed, and good for one list."""

import base64
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from api import cursors, ids, secret
from api.errors import BadCursor
from api.settings import settings


def test_a_cursor_is_read_back(data_dir: Path) -> None:
    job_id = ids.new("job")
    assert cursors.read("jobs:a", cursors.write("jobs:a", job_id)) == job_id


@pytest.mark.parametrize("text", ["", "job_1", "!!!", "é", "a" * 9999, "AAAA"])
def test_a_strange_cursor_is_refused(data_dir: Path, text: str) -> None:
    with pytest.raises(BadCursor):
        cursors.read("jobs:a", text)


def test_a_cursor_is_good_for_its_own_list_alone(data_dir: Path) -> None:
    written = cursors.write("jobs:a", ids.new("job"))
    with pytest.raises(BadCursor):
        cursors.read("jobs:b", written)


def test_every_changed_byte_is_noticed(data_dir: Path) -> None:
    written = cursors.write("jobs:a", ids.new("job"))
    raw = base64.urlsafe_b64decode(written + "=" * (-len(written) % 4))
    for place in range(len(raw)):
        changed = bytearray(raw)
        changed[place] ^= 1
        with pytest.raises(BadCursor):
            cursors.read("jobs:a", base64.urlsafe_b64encode(bytes(changed)).decode())


def test_the_secret_is_made_once_and_for_the_owner_alone(data_dir: Path) -> None:
    def made(_: int) -> bytes:
        return secret._kept(data_dir / "secret")

    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(made, range(8)))) == 1
    assert stat.S_IMODE((data_dir / "secret").stat().st_mode) == 0o600
    assert [path.name for path in data_dir.iterdir()] == ["secret"]


def test_a_secret_that_is_set_is_the_one(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_SECRET_KEY", "one")
    settings.cache_clear()
    secret.key.cache_clear()
    first = secret.sign("cursor", b"x")
    assert first != secret.sign("link", b"x")
    monkeypatch.setenv("PRECISION_SECRET_KEY", "two")
    settings.cache_clear()
    secret.key.cache_clear()
    assert secret.sign("cursor", b"x") != first
    assert not (data_dir / "secret").exists()
