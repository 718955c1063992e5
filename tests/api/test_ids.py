import re

import pytest

from api import ids


def test_later_ids_sort_later(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for ms in (1, 2, 10**6, 2**40, 2**47):
        monkeypatch.setattr(ids.time, "time_ns", lambda ms=ms: ms * 1_000_000)
        made.append(ids.new("job"))
    assert made == sorted(made)
    assert all(re.fullmatch(f"job_{ids.PATTERN}", name) for name in made)


def test_ids_of_one_moment_differ() -> None:
    assert len({ids.new("job") for _ in range(1000)}) == 1000


def test_ids_of_one_millisecond_sort_as_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ids.time, "time_ns", lambda: 7_000_000)
    made = [ids.new("job") for _ in range(1000)]
    assert made == sorted(set(made))


def test_ids_of_one_millisecond_may_run_into_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ids.time, "time_ns", lambda: 7_000_000)
    monkeypatch.setattr(ids, "_last", (7 << ids.RANDOM) + 2**ids.RANDOM - 2**ids.STEP)
    made = [ids.new("job") for _ in range(100)]
    assert ids._last >> ids.RANDOM == 8
    assert made == sorted(set(made))
