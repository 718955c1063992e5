"""What a key may do: every operation has its scope, and nothing else opens it."""

import pytest
from fastapi.testclient import TestClient

from api import auth, db, scopes
from api.app import create_app
from api.models import ApiKey
from tests.api.conftest import Refused


def headers(*words: str) -> dict[str, str]:
    """Return the header of a new key of `acme`."""
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "narrow", words)
    return {"Authorization": f"Bearer {key}"}


def test_every_operation_that_wants_a_key_says_which_scope() -> None:
    paths = create_app().openapi()["paths"]
    secured = {
        operation["operationId"]
        for operations in paths.values()
        for operation in operations.values()
        if operation.get("security")
    }
    assert len(secured) >= 20
    assert secured - set(scopes.NEEDED) == set()
    assert set(scopes.NEEDED) - secured == set(), "no such operation any more"
    wanted = {scope for scope in scopes.NEEDED.values() if scope}
    assert wanted <= {*scopes.EVERYDAY, scopes.ADMIN}


def test_an_operation_that_nobody_listed_is_for_admins() -> None:
    assert scopes.needed("launch_rockets") == "admin"


@pytest.mark.parametrize(
    ("words", "held"),
    [
        (["jobs:read"], {"jobs:read"}),
        (["jobs:*"], {"jobs:read", "jobs:write"}),
        (["models:*", "usage:read"], {"models:read", "models:write", "usage:read"}),
        (["admin"], {*scopes.EVERYDAY, "admin"}),
        (None, set(scopes.EVERYDAY)),  # keys of before scopes
        ([], set()),
        (["jobs", "JOBS:READ", "*", "portal:role"], set()),  # others' words
    ],
)
def test_words_stand_for_scopes(words: list[str] | None, held: set[str]) -> None:
    assert scopes.expand(words) == held
    assert "admin" not in held or held == scopes.expand(["admin"])


def test_words_that_are_no_scope_are_named() -> None:
    assert scopes.unknown(["jobs:read", "jobs:rm", "admin", "jobs:*", "*"]) == [
        "jobs:rm",
        "*",
    ]


def test_a_key_opens_what_its_scopes_say_and_nothing_more(
    client: TestClient, refused: Refused
) -> None:
    reader = headers("jobs:read")
    assert client.get("/v1/jobs", headers=reader).status_code == 200
    assert client.get("/v1/formats", headers=reader).status_code == 200  # any key
    answer = client.post("/v1/optimize", headers=reader, json={})
    problem = refused(answer, 403, "insufficient_scope")
    assert problem["required_scope"] == "jobs:write"
    assert "jobs:write" in problem["detail"]
    answer = client.get("/v1/datasets", headers=reader)
    assert refused(answer, 403, "insufficient_scope")["required_scope"] == (
        "datasets:read"
    )
    nothing = headers()
    refused(client.get("/v1/jobs", headers=nothing), 403, "insufficient_scope")
    assert client.get("/v1/jobs", headers=headers("jobs:*")).status_code == 200


def test_the_scope_is_checked_before_the_thing_is_looked_for(
    client: TestClient, refused: Refused
) -> None:
    answer = client.post("/v1/jobs/job_x/cancel", headers=headers("jobs:read"))
    refused(answer, 403, "insufficient_scope")


def test_a_key_of_before_scopes_does_all_but_administer(sqlite: object) -> None:
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "old")
        row = session.get(ApiKey, auth.key_id(key))
        assert row is not None
        row.scopes = None
    with db.reading() as session:
        caller = auth.verify(session, f"Bearer {key}")
    assert caller.scopes == set(scopes.EVERYDAY)
    with db.transaction() as session:
        auth.grant(session, caller.actor)
        assert "admin" in auth.verify(session, f"Bearer {key}").scopes


def test_a_grant_does_not_widen_a_key_that_has_scopes(sqlite: object) -> None:
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "narrow", ["jobs:read"])
        auth.grant(session, auth.key_id(key))
        assert auth.verify(session, f"Bearer {key}").scopes == {"jobs:read"}
