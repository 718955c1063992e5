"""What a job tried, one by one."""

import json

import pytest
from fastapi.testclient import TestClient

from api import db, jobs, storage
from tests.api.conftest import SUMMARY, Refused
from tests.optimizer.example_document import example_document

pytestmark = pytest.mark.both


@pytest.fixture
def tried(job_id: str) -> str:
    """A job that succeeded with a report of a real one's form."""
    report = json.dumps(example_document(layers=2)).encode()
    with db.transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        stored = [storage.put(job_id, 1, "report.json", report)]
        jobs.succeed(session, claim, "sla_met", SUMMARY, stored)
    return job_id


def test_every_choice_and_every_stack_is_a_trial(
    tried: str, client: TestClient
) -> None:
    document = example_document(layers=2)
    url = f"/v1/jobs/{tried}/trials"
    found, after = [], None
    while True:
        query = {"limit": 7} | ({"after": after} if after else {})
        page = client.get(url, params=query).json()
        found += page["data"]
        after = page["next_cursor"]
        assert page["has_more"] == (after is not None)
        if after is None:
            break
    sites = [t for t in found if t["kind"] == "site"]
    choices = [
        (s["site"], a["choice"]) for s in document["sites"] for a in s["alternatives"]
    ]
    assert [(t["site"], t["choice"]) for t in sites] == choices
    assert len({t["id"] for t in found}) == len(found)
    assert sum(t["chosen"] for t in sites) == len(document["sites"])
    first = document["sites"][0]["alternatives"][0]
    assert sites[0]["kl_nats"] == first["kl_nats"]
    assert sites[0]["per_token_s"] == first["per_token_s"]
    stacks = client.get(url, params={"kind": "stack"}).json()["data"]
    assert stacks == [t for t in found if t["kind"] == "stack"]
    measured = document["validation"]["stacks"]
    assert [t["id"] for t in stacks] == [row["id"] for row in measured]
    assert stacks[0]["kl_nats_high"] == measured[0]["kl_nats"]["high"]


def test_before_the_end_there_are_no_trials(
    job_id: str, client: TestClient, refused: Refused
) -> None:
    answer = client.get(f"/v1/jobs/{job_id}/trials")
    assert refused(answer, 409, "not_final")["current_status"] == "queued"
    client.post(f"/v1/jobs/{job_id}/cancel")
    answer = client.get(f"/v1/jobs/{job_id}/trials")
    assert refused(answer, 409, "invalid_state")["current_status"] == "cancelled"


def test_a_cursor_is_good_for_one_list(
    tried: str, client: TestClient, refused: Refused
) -> None:
    url = f"/v1/jobs/{tried}/trials"
    after = client.get(url, params={"limit": 2}).json()["next_cursor"]
    answer = client.get(url, params={"after": after, "kind": "stack"})
    refused(answer, 400, "bad_cursor")
    refused(client.get("/v1/jobs", params={"after": after}), 400, "bad_cursor")
