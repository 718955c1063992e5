"""A database that is away for a moment is waited for, and no longer than a lease."""

import pytest
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from api.settings import Settings
from workers import patience

AWAY = OperationalError("SELECT 1", None, Exception("server closed the connection"))


@pytest.fixture
def slept(sqlite: object, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited between two tries, seconds."""
    found: list[float] = []
    monkeypatch.setattr(patience.time, "sleep", found.append)
    return found


@pytest.mark.parametrize("name", ["insist", "look"])
def test_a_database_that_comes_back_is_asked_again(
    slept: list[float], name: str
) -> None:
    errors = [AWAY] * 2

    def once(session: Session) -> int:
        if errors:
            raise errors.pop()
        return int(session.execute(text("SELECT 7")).scalar_one())

    assert getattr(patience, name)(once) == 7
    assert slept == [0.5, 1.0]


def test_one_that_stays_away_is_waited_for_within_the_lease(
    slept: list[float],
) -> None:
    errors = [AWAY] * 100

    def once(session: Session) -> None:
        raise errors.pop()

    with pytest.raises(OperationalError):
        patience.insist(once)
    # 0.5 + 1 + 2 + 4 + 8
    assert sum(slept) == 15.5 < Settings.model_fields["lease_s"].default


def test_what_is_no_outage_is_not_tried_again(slept: list[float]) -> None:
    calls = []

    def once(session: Session) -> None:
        calls.append(session)
        raise KeyError

    with pytest.raises(KeyError):
        patience.look(once)
    assert (len(calls), slept) == (1, [])
