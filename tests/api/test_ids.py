import re

import pytest

from api import ids
from api.errors import BadCursor


def test_later_ids_sort_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for ms in (1, 2, 10**6, 2**40, 2**47):
        monkeypatch.setattr(ids.time, "time_ns", lambda ms=ms: ms * 1_000_000)
        made.append(ids.new("job"))
    assert made == sorted(made)
    assert all(re.fullmatch(f"job_{ids.PATTERN}", name) for name in made)


def test_ids_of_one_moment_differ() -> None:
    assert len({ids.new("job") for _ in range(1000)}) == 1000


def test_a_cursor_is_read_back() -> None:
    job_id = ids.new("job")
    assert ids.read_cursor(ids.cursor(job_id)) == job_id


@pytest.mark.parametrize(
    "text", ["", "job_1", "!!!", "é", ids.cursor("job_x"), "a" * 9999]
)
def test_a_strange_cursor_is_refused(text: str) -> None:
    with pytest.raises(BadCursor):
        ids.read_cursor(text)
