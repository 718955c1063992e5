"""Nobody sees, changes or finds out about what belongs to another tenant."""

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event

from api import auth, db
from api.app import create_app
from api.base import Base
from tests.api import tenancy
from tests.api.tenancy import MARK, Call

OWNED = [t.name for t in Base.metadata.sorted_tables if "tenant_id" in t.columns]
LISTS = frozenset(  # of things of a tenant; `lists_of` finds those that are missing
    {"list_hardware", "list_formats"}
)
FINDS_A_KEY = "WHERE api_keys.kid = "  # how we learn which tenant it is


@dataclass
class House:
    """Two tenants: acme, who has everything, and a stranger, who has nothing."""

    acme: TestClient
    stranger: TestClient
    acme_id: str
    values: dict[str, str]

    def calls(self) -> list[Call]:
        return list(tenancy.calls(self.acme.app, self.values))  # type: ignore[arg-type]


@pytest.fixture
def house(database: str, bells: list[str]) -> Iterator[House]:
    """Furnish acme, on SQLite and on PostgreSQL."""
    with db.transaction() as session:
        keys = [
            auth.create_key(session, tenant, "admin", ["admin"])
            for tenant in ("acme", "stranger")
        ]
        owner = auth.tenant_named(session, "acme").id
        values = tenancy.furnish(session, owner)
    app = create_app()
    acme, stranger = (
        TestClient(app, headers={"Authorization": f"Bearer {key}"}) for key in keys
    )
    with acme:
        yield House(acme, stranger, owner, values)


def ask(client: TestClient, call: Call) -> httpx.Response:
    return client.request(call.method, call.path, **call.request)


def rows(house: House) -> object:
    with db.reading() as session:
        return tenancy.rows_of(session, house.acme_id)


def test_another_tenants_ids_are_not_found_and_nothing_of_its_changes(
    house: House,
) -> None:
    calls = house.calls()
    assert len(calls) >= 14
    for call in calls:  # they are real
        if call.method == "GET":
            assert ask(house.acme, call).status_code not in (404, 422), call
    before = rows(house)
    wrong = {}
    for call in calls:
        answer = ask(house.stranger, call)
        if answer.status_code != 404 or answer.json()["code"] != "not_found":
            wrong[call.operation] = (answer.status_code, answer.text[:200])
        assert MARK not in answer.text
    assert wrong == {}
    assert rows(house) == before


def test_a_foreign_id_and_no_id_are_refused_in_the_same_words(house: House) -> None:
    for call in house.calls():
        told = []
        for value in (call.path, _unknown(call.path, house.values)):
            answer = ask(house.stranger, Call(call.method, value, "", call.request))
            said = answer.json()
            told.append((said["status"], said["code"], said["title"]))
        assert told[0] == told[1], call


def _unknown(path: str, values: dict[str, str]) -> str:
    """Put ids that nobody has into a path, of the same make."""
    for value in (each for each in values.values() if len(each) > 4):  # no numbers
        path = re.sub(rf"(?<=/){re.escape(value)}(?=/|$)", value[:-1] + "0", path)
    return path


def lists_of(house: House) -> list[str]:
    """Return the paths of every list that belongs to a tenant."""
    paths = house.acme.get("/openapi.json").json()["paths"]
    return [
        path
        for path, operations in paths.items()
        if "{" not in path
        and path.startswith("/v1/")
        and "get" in operations
        and operations["get"]["operationId"] not in LISTS
    ]


def test_no_list_shows_anything_of_another_tenant(house: House) -> None:
    paths = lists_of(house)
    assert {"/v1/jobs", "/v1/models", "/v1/datasets", "/v1/api_keys"} <= set(paths)
    for path in paths:
        own, others = house.acme.get(path), house.stranger.get(path)
        assert own.status_code == others.status_code == 200, path
        assert MARK not in others.text, path
        for value in house.values.values():
            assert len(value) < 5 or value not in others.text, path
    seen = [path for path in paths if MARK in house.acme.get(path).text]
    assert {"/v1/jobs", "/v1/models", "/v1/datasets", "/v1/api_keys"} <= set(seen)


def test_a_foreign_cursor_is_no_cursor(house: House) -> None:
    for _ in range(2):
        with db.transaction() as session:
            auth.create_key(session, "acme", "more")
    page = house.acme.get("/v1/api_keys", params={"limit": 1}).json()
    answer = house.stranger.get("/v1/api_keys", params={"after": page["next_cursor"]})
    assert answer.status_code == 400
    assert answer.json()["code"] == "bad_cursor"


def test_the_same_name_is_another_thing_for_another_tenant(house: House) -> None:
    lines = [f'{{"text": "what the stranger has to say, {n}"}}' for n in range(99)]
    before = rows(house)
    answer = house.stranger.put(
        f"/v1/datasets/{MARK}",
        content="\n".join(lines).encode(),
        headers={"Content-Type": "application/jsonl"},
    )
    assert answer.status_code == 201, answer.text
    assert rows(house) == before


# -- the statements themselves -----------------------------------------------------


def unfiltered(statement: str) -> list[str]:
    """Return the tables of tenants that a SELECT reads without asking whose rows."""
    if not statement.startswith("SELECT") or FINDS_A_KEY in statement:
        return []
    tables = re.findall(r"(?:FROM|JOIN) (\w+)", statement)
    _, _, condition = statement.partition("WHERE")
    asked = "tenant_id" in condition
    return [table for table in tables if table in OWNED and not asked]


def test_the_check_of_statements_finds_what_it_should() -> None:
    assert unfiltered("SELECT jobs.id FROM jobs WHERE jobs.id = ?") == ["jobs"]
    assert unfiltered("SELECT jobs.tenant_id FROM jobs") == ["jobs"]
    own = "SELECT jobs.id FROM jobs WHERE jobs.id = ? AND jobs.tenant_id = ?"
    assert unfiltered(own) == []
    assert unfiltered("SELECT tenants.id FROM tenants WHERE tenants.name = ?") == []


def test_every_statement_of_a_request_says_whose_rows_it_wants(house: House) -> None:
    found: dict[str, str] = {}
    asking = ""

    def look(_c: object, _cursor: object, statement: str, *_: object) -> None:
        beside = threading.current_thread().name == "check"  # it has an upload's id
        if asking and not beside and unfiltered(statement):
            found[asking] = statement

    event.listen(db.engine(), "before_cursor_execute", look)
    changing = [call for call in house.calls() if call.method != "GET"]
    reading = [call for call in house.calls() if call.method == "GET"]
    reading += [Call("GET", path, path) for path in lists_of(house)]
    for call in [*reading, *sorted(changing, key=lambda c: c.method == "DELETE")]:
        asking = call.operation
        ask(house.acme, call)
    asking = ""
    assert found == {}
