"""What a portal shows of a job without a key: view tokens, the card, the badge."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from fastapi.testclient import TestClient

from api import badge, db, jobs, view_tokens
from api.models import Job, Status
from api.settings import settings
from tests.api.conftest import BODY, Refused

PORTAL = "https://portal.example.com"


@pytest.fixture
def stranger(client: TestClient) -> Iterator[TestClient]:
    """Somebody without a key."""
    with TestClient(client.app) as someone:
        yield someone


def token_of(client: TestClient, job_id: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/jobs/{job_id}/view_tokens", json=body)
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def vt(made: dict[str, Any]) -> dict[str, str]:
    return {"Authorization": f"Bearer {made['token']}"}


def test_a_view_token_shows_one_job_and_nothing_else(
    client: TestClient, stranger: TestClient, done: str
) -> None:
    made = token_of(client, done)
    card = stranger.get(f"/embed/jobs/{done}/card", headers=vt(made))
    assert card.status_code == 200
    assert card.headers["x-job-state"] == "final"
    assert "SLA met" in card.text
    other = client.post("/v1/optimize", json=BODY).json()["id"]
    for path in (
        f"/embed/jobs/{other}/card",
        f"/v1/jobs/{done}",
        f"/v1/jobs/{done}/report",
        "/v1/jobs",
        "/ui/jobs",
    ):
        answer = stranger.get(path, headers=vt(made), follow_redirects=False)
        assert answer.status_code in (303, 401), path


def test_a_token_ends_by_itself(
    client: TestClient, stranger: TestClient, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()  # before: a busy machine may take a second for the token
    made = token_of(client, done, expires_in=60)
    monkeypatch.setattr(view_tokens.time, "time", lambda: now + 58)
    assert stranger.get(f"/embed/jobs/{done}/card", headers=vt(made)).status_code == 200
    monkeypatch.setattr(view_tokens.time, "time", lambda: now + 600)
    assert stranger.get(f"/embed/jobs/{done}/card", headers=vt(made)).status_code == 401
    late = stranger.get(f"/embed/jobs/{done}?vt={made['token']}")
    assert late.status_code == 401
    assert "expired" in late.text


def test_what_is_forged_opens_nothing(
    client: TestClient, stranger: TestClient, done: str
) -> None:
    token = token_of(client, done)["token"]
    for forged in (token[:-1], token + "A", "pv_" + token[4:], "pv_.", "", "x" * 600):
        headers = {"Authorization": f"Bearer {forged}"}
        answer = stranger.get(f"/embed/jobs/{done}/card", headers=headers)
        assert answer.status_code == 401, forged
        query = {"token": forged[:500]}
        found = stranger.get(f"/v1/jobs/{done}/badge.svg", params=query)
        assert found.status_code == 401, forged


def test_too_long_a_life_is_refused(
    client: TestClient, refused: Refused, done: str
) -> None:
    path = f"/v1/jobs/{done}/view_tokens"
    problem = refused(
        client.post(path, json={"expires_in": 901}),
        422,
        "validation_error",
        "/expires_in",
    )
    assert "900" in problem["detail"]
    refused(client.post(path, json={"use": "all"}), 422, "validation_error", "/use")
    refused(client.post("/v1/jobs/job_x/view_tokens", json={}), 404, "not_found")


def test_a_badge_token_opens_the_badge_alone(
    client: TestClient, stranger: TestClient, done: str
) -> None:
    made = token_of(client, done, use="badge", expires_in=86_400)
    assert set(made["links"]) == {"badge"}
    assert stranger.get(made["links"]["badge"]).status_code == 200
    assert stranger.get(f"/embed/jobs/{done}/card", headers=vt(made)).status_code == 401


def test_the_frame_page_lists_who_may_frame_it(
    stranger: TestClient, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = stranger.get(f"/embed/jobs/{done}")
    assert "frame-ancestors 'none'" in closed.headers["content-security-policy"]
    monkeypatch.setenv("PRECISION_FRAME_ORIGINS", f"{PORTAL}, http://127.0.0.1:9")
    settings.cache_clear()
    opened = stranger.get(f"/embed/jobs/{done}?entity=a&blueprint=b&vt=")
    policy = opened.headers["content-security-policy"]
    assert policy.endswith(f"frame-ancestors {PORTAL} http://127.0.0.1:9")
    assert "x-frame-options" not in opened.headers
    assert opened.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize(
    "origin", ["*", "portal.example.com", "https://portal.example.com/", "'self'"]
)
def test_what_is_no_origin_stops_the_start(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, origin: str
) -> None:
    monkeypatch.setenv("PRECISION_FRAME_ORIGINS", origin)
    settings.cache_clear()
    with pytest.raises(ValueError, match="frame_origins"):
        settings()


def test_without_scripts_the_query_opens_the_card(
    client: TestClient, stranger: TestClient, job_id: str
) -> None:
    made = token_of(client, job_id)
    page = stranger.get(f"/embed/jobs/{job_id}?vt={made['token']}").text
    assert "Waits for a worker" in page
    assert made["token"] not in page
    assert "opens with a token" in stranger.get(f"/embed/jobs/{job_id}").text
    hostile = stranger.get('/embed/jobs/"><img src=x>?vt=<img src=x>')
    assert "<img" not in hostile.text


def test_the_badge_says_how_a_job_is(client: TestClient, done: str) -> None:
    answer = client.get(f"/v1/jobs/{done}/badge.svg")
    assert answer.headers["content-type"] == "image/svg+xml"
    assert answer.headers["cache-control"] == "max-age=60"
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    root = ElementTree.fromstring(answer.text)
    assert root.attrib["aria-label"] == "precision: SLA met"
    tag = {"If-None-Match": answer.headers["etag"]}
    assert client.get(f"/v1/jobs/{done}/badge.svg", headers=tag).status_code == 304
    assert client.head(f"/v1/jobs/{done}/badge.svg").status_code == 200


@pytest.mark.parametrize(
    ("job", "words", "tone"),
    [
        (Job(status=Status.QUEUED, percent=0), "queued", "even"),
        (Job(status=Status.RUNNING, percent=41.6), "running 42 %", "live"),
        (Job(status=Status.FAILED, percent=41.6), "failed", "bad"),
        (Job(status=Status.SUCCEEDED, outcome="sla_not_met"), "SLA not met", "bad"),
        (
            Job(status=Status.SUCCEEDED, outcome="no_improvement"),
            "No improvement",
            "even",
        ),
    ],
)
def test_badges_of_every_state(job: Job, words: str, tone: str) -> None:
    assert badge.message(job) == (words, tone)
    svg = badge.draw(f'{words}<&"', badge.COLORS[tone])
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    assert [text.text for text in texts] == ["precision", f'{words}<&"']


def test_colors_of_badges_are_readable() -> None:
    def luminance(color: str) -> float:
        parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [
            p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for color in badge.COLORS.values():
        assert 1.05 / (luminance(color) + 0.05) >= 4.5, color


def test_links_are_where_people_reach_the_service(
    client: TestClient, done: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_PUBLIC_URL", "https://precision.example/")
    settings.cache_clear()
    links = token_of(client, done)["links"]
    assert links["embed"].startswith(f"https://precision.example/embed/jobs/{done}#vt=")


def test_the_card_of_a_deleted_job_says_so(
    client: TestClient, stranger: TestClient, done: str
) -> None:
    made = token_of(client, done)
    assert client.delete(f"/v1/jobs/{done}").status_code == 204
    card = stranger.get(f"/embed/jobs/{done}/card", headers=vt(made))
    assert "Deleted" in card.text
    with db.reading() as session:
        assert badge.message(jobs.get(session, _tenant(made), done))[0] == "deleted"


def _tenant(made: dict[str, Any]) -> str:
    return view_tokens.read(made["token"], made["job_id"]).tenant_id
