"""Lists of jobs: filters, order, cursors."""

from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from api import auth, db, owners
from api.owners import Filter
from tests.api.conftest import BODY, Refused

Query = list[tuple[str, str]] | dict[str, Any]


@pytest.fixture
def made(tiny: Path, client: TestClient) -> list[str]:
    """Four queued jobs, the second of them cancelled, oldest first."""
    bodies = [
        {**BODY, "metadata": {"team": "ads", "a.b": 'x"y'}},
        {**BODY, "metadata": {"team": "search"}},
        {**BODY, "hardware": "a100", "metadata": {"team": "ads"}},
        BODY,
    ]
    found = [client.post("/v1/optimize", json=body).json()["id"] for body in bodies]
    client.post(f"/v1/jobs/{found[1]}/cancel")
    return found


def ids(client: TestClient, query: Query) -> list[str]:
    answer = client.get("/v1/jobs", params=query)
    assert answer.status_code == 200, answer.text
    return [job["id"] for job in answer.json()["data"]]


def test_jobs_are_found_by_what_they_are(made: list[str], client: TestClient) -> None:
    first, second, third, fourth = made
    a100 = client.get(f"/v1/jobs/{third}").json()["request"]["hardware"]
    for query, found in [
        ({"status": "cancelled"}, [second]),
        (
            [("status", "cancelled"), ("status", "queued")],
            [fourth, third, second, first],
        ),
        ({"status": "running"}, []),
        ({"hardware": a100}, [third]),
        ({"metadata[team]": "ads"}, [third, first]),
        ({"metadata[team]": "ads", "metadata[a.b]": 'x"y'}, [first]),
        ({"metadata[team]": "ads", "hardware": a100}, [third]),
        ({"metadata[tea]": "ads"}, []),
        ({"metadata[$.team]": "ads"}, []),
        ({"metadata[te'am\\]": "%"}, []),
        ({"order": "asc"}, [first, second, third, fourth]),
    ]:
        assert ids(client, query) == found, query  # type: ignore[arg-type]


def test_jobs_are_found_by_when_they_came(made: list[str], client: TestClient) -> None:
    at = [
        client.get(f"/v1/jobs/{job_id}").json()["timestamps"]["created_at"]
        for job_id in made
    ]
    assert ids(client, {"created_after": at[1]}) == [made[3], made[2]]
    assert ids(client, {"created_before": at[1]}) == [made[0]]
    both = {"created_after": at[0], "created_before": at[3], "order": "asc"}
    assert ids(client, both) == [made[1], made[2]]
    assert ids(client, {"created_after": "2999-01-01T00:00:00+02:00"}) == []


def test_pages_go_either_way_with_a_cursor_of_their_own(
    made: list[str], client: TestClient, refused: Refused
) -> None:
    for order, expected in (("asc", made), ("desc", made[::-1])):
        seen: list[str] = []
        query: dict[str, Any] = {"limit": 3, "order": order}
        while True:
            page = client.get("/v1/jobs", params=query).json()
            seen += [job["id"] for job in page["data"]]
            if not page["has_more"]:
                break
            query["after"] = page["next_cursor"]
        assert seen == expected
        other = "desc" if order == "asc" else "asc"
        answer = client.get("/v1/jobs", params={**query, "order": other})
        refused(answer, 400, "bad_cursor")
    after = str(query["after"])
    for strange in (after[:-2], after.swapcase(), f"{after}AA", "é", "=" * 9):
        answer = client.get("/v1/jobs", params={"limit": 3, "after": strange})
        refused(answer, 400, "bad_cursor")
    with db.transaction() as session:
        theirs = auth.create_key(session, "other", "test")
    headers = {"Authorization": f"Bearer {theirs}"}
    query["order"] = "desc"
    refused(client.get("/v1/jobs", params=query, headers=headers), 400, "bad_cursor")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limit", "0"),
        ("limit", "-1"),
        ("limit", "1e9"),
        ("order", "up"),
        ("status", "done"),
        ("created_after", "yesterday"),
        ("created_after", "2026-13-01T00:00:00Z"),
        ("created_after", "99999-01-01T00:00:00Z"),
        ("created_after", "2026-01-01T00:00:00"),  # of which zone?
        ("created_before", "9999-12-31T23:59:59-12:00"),
        ("created_before", "0001-01-01T00:00:00+12:00"),
    ],
)
def test_a_value_out_of_range_is_named(
    client: TestClient, refused: Refused, name: str, value: str
) -> None:
    answer = client.get("/v1/jobs", params={name: value})
    problem = refused(answer, 422, "validation_error")
    assert [field["parameter"] for field in problem["errors"]] == [name]


@pytest.mark.parametrize(
    "query",
    [
        [("metadata[]", "x")],
        [("metadata[" + "k" * 65 + "]", "x")],
        [("metadata[k]", "v" * 513)],
        [("metadata[k]", "a"), ("metadata[k]", "b")],
        [(f"metadata[{i}]", "") for i in range(17)],
    ],
)
def test_pairs_that_no_job_can_have_are_refused(
    client: TestClient, refused: Refused, query: list[tuple[str, str]]
) -> None:
    refused(client.get("/v1/jobs", params=query), 422, "validation_error")


def test_metadata_without_brackets_is_no_parameter(
    client: TestClient, refused: Refused
) -> None:
    for name in ("metadata", "metadata[k", "meta[k]"):
        answer = client.get("/v1/jobs", params={name: "x"})
        refused(answer, 422, "unknown_parameter")


def test_pairs_are_found_on_both_databases(database: str) -> None:
    with db.transaction() as session:
        tenant = auth.tenant_named(session, "acme").id
        wanted = Filter(metadata={"a'b\"c": "d", "e": ""})
        assert owners.page(session, tenant, 5, None, wanted) == ([], None)
