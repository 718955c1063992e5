"""While the operator works on the service: reads go on, and nothing else does."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api import db, jobs, settings
from api.app import create_app
from tests.api.conftest import BODY, Refused

SAID = "New database until 18:00 <UTC>."


@pytest.fixture
def closed(
    tiny: Path, client: TestClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[TestClient]:
    """The service of `client`, while somebody works on it."""
    monkeypatch.setenv("PRECISION_MAINTENANCE", SAID)
    settings.settings.cache_clear()
    headers = {"Authorization": f"Bearer {key}"}
    with TestClient(create_app(), headers=headers) as found:
        yield found


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/optimize"),
        ("POST", "/v1/jobs/job_none/cancel"),
        ("PUT", "/v1/datasets/mine"),
        ("PATCH", "/v1/api_keys/none"),
        ("DELETE", "/v1/jobs/job_none"),
    ],
)
def test_what_would_change_something_is_refused_with_the_operators_text(
    closed: TestClient, refused: Refused, method: str, path: str
) -> None:
    answer = closed.request(method, path, json=BODY)
    problem = refused(answer, 503, "maintenance")
    assert problem["detail"] == SAID
    assert problem["request_id"] == answer.headers["x-request-id"]
    assert int(answer.headers["retry-after"]) > 0


@pytest.mark.parametrize(
    "path",
    ["/v1/jobs", "/v1/hardware", "/livez", "/readyz", "/metrics", "/openapi.json"],
)
def test_reads_and_probes_go_on(closed: TestClient, path: str) -> None:
    assert closed.get(path).status_code == 200


def test_a_job_that_was_accepted_is_read_and_goes_on(
    client: TestClient, tiny: Path, request: pytest.FixtureRequest
) -> None:
    job_id = client.post("/v1/optimize", json=BODY).json()["id"]
    closed = request.getfixturevalue("closed")
    assert closed.get(f"/v1/jobs/{job_id}").json()["status"] == "queued"
    with db.transaction() as session:
        assert jobs.claim_next(session, "w", ["celery"]) is not None
    assert closed.get(f"/v1/jobs/{job_id}").json()["status"] == "running"


def test_every_page_says_so_and_people_still_sign_in_and_out(
    closed: TestClient, client: TestClient, key: str
) -> None:
    page = closed.get("/ui/new", headers={"Accept": "text/html"}).text
    assert "New database until 18:00 &lt;UTC&gt;." in page
    form = {"key": key}
    signed = closed.post("/ui/signin", data=form, follow_redirects=False)
    assert signed.status_code == 303


def test_nothing_is_said_where_nobody_works_on_it(
    client: TestClient, tiny: Path
) -> None:
    assert "Maintenance" not in client.get("/ui/new").text
    assert client.post("/v1/optimize", json=BODY).status_code == 202
