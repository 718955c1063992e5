"""`precision keys` and `precision tenants`, on the database of a data folder."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from api import auth, db, scopes
from api.cli import app
from api.models import AuditEvent, Tenant
from api.operate import OperateError


@pytest.fixture(autouse=True)
def _folder(data_dir: Path) -> None:
    """Every command works on a folder of its own."""


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), catch_exceptions=False)


def said(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def held(key: str) -> frozenset[str]:
    with db.reading() as session:
        return auth.verify(session, f"Bearer {key}").scopes


def test_a_key_has_what_was_asked_for(data_dir: Path) -> None:
    assert held(said("keys", "create")) == set(scopes.EVERYDAY)
    narrow = said("keys", "create", "--scopes", "jobs:*, models:read")
    assert held(narrow) == {"jobs:read", "jobs:write", "models:read"}
    args = ("--scopes", "admin", "--kind", "service", "--expires-in", "90d")
    made = json.loads(said("keys", "create", *args, "--json"))
    assert "admin" in held(made["key"])
    listed = {key["id"]: key for key in json.loads(said("keys", "list", "--json"))}
    row = listed[made["id"]]
    assert (row["kind"], row["scopes"], row["status"]) == ("service", "admin", "active")
    ends = datetime.fromisoformat(row["expires_at"])
    assert abs(ends - datetime.now(UTC) - timedelta(days=90)) < timedelta(minutes=1)
    assert made["id"] in said("keys", "list")


def test_a_key_is_rotated_and_both_work() -> None:
    old = said("keys", "create", "--scopes", "jobs:read")
    new = said("keys", "rotate", auth.key_id(old))
    assert held(old) == held(new) == {"jobs:read"}
    newer = json.loads(
        said("keys", "rotate", auth.key_id(new), "--overlap", "0s", "--json")
    )
    assert held(newer["key"]) == {"jobs:read"}
    with pytest.raises(auth.Unauthenticated):
        held(new)
    with pytest.raises(OperateError, match=r"expired.*keys list"):
        run("keys", "rotate", auth.key_id(new))


def test_tenants_are_made_and_limited() -> None:
    first = said("tenants", "create", "ads")
    assert said("tenants", "create", "ads") == first
    options = ("--max-queued", "50", "--max-running", "4", "--json")
    (limited,) = json.loads(said("tenants", "limits", "ads", *options))
    assert limited == {"name": "ads", "max_queued": 50, "max_running": 4}
    said("tenants", "limits", "ads", "--max-queued", "default")
    (shown,) = json.loads(said("tenants", "limits", "ads", "--json"))
    assert shown == {"name": "ads", "max_queued": None, "max_running": 4}
    (row,) = json.loads(said("tenants", "list", "--json"))
    assert (row["id"], row["max_running"]) == (first, 4)
    with db.reading() as session:
        assert session.query(Tenant).count() == 1


def test_what_the_operator_does_is_written_down() -> None:
    key = said("keys", "create", "--tenant", "ads")
    said("keys", "rotate", auth.key_id(key))
    said("keys", "revoke", auth.key_id(key))
    said("tenants", "limits", "ads", "--max-queued", "5")
    said("tenants", "create", "search")
    with db.reading() as session:
        rows = session.query(AuditEvent).order_by(AuditEvent.id).all()
        told = [row.action for row in rows]
        assert {row.actor for row in rows} == {"operator"}
    keys = ["api_key.created", "api_key.rotated", "api_key.revoked"]
    assert sorted(told) == sorted([*keys, "tenant.limited", "tenant.created"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("keys", "create", "--scopes", "jobs:read,jobs:rm"), "jobs:rm"),
        (("keys", "create", "--scopes", ""), "--scopes"),
        (("keys", "create", "--kind", "robot"), "robot"),
        (("keys", "create", "--expires-in", "soon"), "soon"),
        (("keys", "create", "--tenant", "a b"), "a b"),
        (("keys", "rotate", "x", "--overlap", "-1d"), "-1d"),
        (("tenants", "create", ""), "letters"),
        (("tenants", "limits", "ads", "--max-queued", "many"), "many"),
        (("tenants", "limits", "ads", "--max-running", "-1"), "-1"),
    ],
)
def test_a_wrong_option_is_named(arguments: tuple[str, ...], named: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert named in result.output


@pytest.mark.parametrize(
    "arguments",
    [("keys", "rotate", "nokey"), ("tenants", "limits", "nobody")],
)
def test_what_is_not_there_is_said(arguments: tuple[str, ...]) -> None:
    with pytest.raises(OperateError, match=r"no .* list` shows them"):
        run(*arguments)
