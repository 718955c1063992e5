"""The pages as a browser asks for them, but without one: sessions, guards, errors."""

import re
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api import auth, db, jobs, page_session, retention
from api.app import create_app
from api.callers import verified
from api.models import now
from api.settings import settings
from tests.api.conftest import BODY
from tests.api.test_trainings import SUMMARY

FAILED = {
    "code": "out_of_memory",
    "category": "platform",
    "retryable": True,
    "message": "no memory",
}
ASSETS = Path(__file__).parents[2] / "api" / "data" / "assets"
TEMPLATES = ASSETS.parent / "pages"


@pytest.fixture
def browser(sqlite: Path, bells: list[str]) -> Iterator[TestClient]:
    """A browser that nobody signed in with."""
    with TestClient(create_app(), follow_redirects=False) as client:
        yield client


def signed_in(browser: TestClient, key: str) -> str:
    """Sign in; gives the token that changes need."""
    answer = browser.post("/ui/signin", data={"key": key})
    assert answer.status_code == 303, answer.text
    page = browser.get("/ui/hardware").text
    found = re.search(r'name="csrf-token" content="([^"]+)"', page)
    assert found
    return found[1]


def key_with(*scopes: str, **more: object) -> str:
    with db.transaction() as session:
        return auth.create_key(session, "acme", "page", scopes, **more)  # type: ignore[arg-type]


def test_who_has_no_session_is_led_to_the_sign_in_and_back(
    browser: TestClient, key: str
) -> None:
    answer = browser.get("/ui/jobs?status=failed")
    assert answer.status_code == 303
    assert (
        answer.headers["location"] == "/ui/signin?next=%2Fui%2Fjobs%3Fstatus%3Dfailed"
    )
    form = browser.get(answer.headers["location"]).text
    assert 'name="next" value="/ui/jobs?status=failed"' in form
    there = "/ui/jobs?status=failed"
    entered = browser.post("/ui/signin", data={"key": key, "next": there})
    assert entered.headers["location"] == there
    assert browser.get(there).status_code == 200


def test_the_cookie_holds_no_key_and_no_script_reads_it(
    browser: TestClient, key: str
) -> None:
    answer = browser.post("/ui/signin", data={"key": key})
    cookie = answer.headers["set-cookie"]
    assert key.split("_")[3] not in cookie
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(cookie.split("; "))
    assert "Secure" not in cookie


def test_over_https_the_cookie_is_bound_to_the_host(sqlite: Path, key: str) -> None:
    with TestClient(create_app(), "https://precision.example") as client:
        answer = client.post("/ui/signin", data={"key": key}, follow_redirects=False)
    assert answer.headers["set-cookie"].startswith("__Host-precision=ps_")
    assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize("shown", ["", "po_live_x", "nonsense", "ps_e30.x"])
def test_what_is_no_key_begins_no_session(browser: TestClient, shown: str) -> None:
    answer = browser.post("/ui/signin", data={"key": shown})
    assert answer.status_code == 401
    assert "not valid" in answer.text
    assert "set-cookie" not in answer.headers


def test_guessing_keys_soon_ends(
    sqlite: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_REFUSALS_PER_MINUTE", "3")
    settings.cache_clear()
    with TestClient(create_app(), follow_redirects=False) as browser:
        answers = [browser.post("/ui/signin", data={"key": "guess"}) for _ in range(4)]
        assert [a.status_code for a in answers] == [401, 401, 401, 429]
        assert browser.post("/ui/signin", data={"key": key}).status_code == 429


@pytest.mark.parametrize(
    "address",
    ["https://evil.example/", "//evil.example/ui/", "/ui/\\evil", "/v1/jobs", "/ui"],
)
def test_a_sign_in_leads_nowhere_else(
    browser: TestClient, key: str, address: str
) -> None:
    answer = browser.post("/ui/signin", data={"key": key, "next": address})
    assert answer.headers["location"] == "/ui/jobs"


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}],
)
def test_another_site_signs_nobody_in_or_out(
    browser: TestClient, key: str, headers: dict[str, str]
) -> None:
    for path in ("/ui/signin", "/ui/signout"):
        answer = browser.post(path, data={"key": key}, headers=headers)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers


def test_a_session_reads_the_api_and_changes_nothing_without_its_token(
    tiny: Path, browser: TestClient, key: str, bells: list[str]
) -> None:
    token = signed_in(browser, key)
    assert browser.get("/v1/jobs").status_code == 200
    refused = browser.post("/v1/optimize", json=BODY)
    assert (refused.status_code, refused.json()["code"]) == (403, "cross_site_request")
    forged = {page_session.HEADER: token[::-1]}
    assert browser.post("/v1/optimize", json=BODY, headers=forged).status_code == 403
    assert bells == []
    own = {page_session.HEADER: token}
    assert browser.post("/v1/optimize", json=BODY, headers=own).status_code == 202


def test_a_session_is_no_bearer_token(browser: TestClient, key: str) -> None:
    signed_in(browser, key)
    value = browser.cookies["precision"]
    browser.cookies.clear()
    answer = browser.get("/v1/jobs", headers={"Authorization": f"Bearer {value}"})
    assert answer.status_code == 401


def test_a_session_ends_with_its_key(browser: TestClient, key: str) -> None:
    signed_in(browser, key)
    with db.transaction() as session:
        auth.revoke(session, auth.key_id(key))
    answer = browser.get("/ui/jobs")
    assert answer.status_code == 303
    assert 'precision=""' in answer.headers["set-cookie"]
    assert browser.get("/v1/jobs").status_code == 401


def test_a_session_ends_by_itself(
    browser: TestClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed_in(browser, key)
    later = (now() + timedelta(hours=13)).timestamp()
    monkeypatch.setattr(page_session.time, "time", lambda: later)
    verified.clear()
    assert browser.get("/v1/jobs").status_code == 401


def test_a_changed_session_is_none(browser: TestClient, key: str) -> None:
    signed_in(browser, key)
    value = browser.cookies["precision"]
    for changed in (value[:-1], "ps_" + value[5:], value + "A", "ps_.", ""):
        browser.cookies.clear()
        browser.cookies.set("precision", changed)
        assert browser.get("/v1/jobs").status_code == 401, changed


def test_signing_out_takes_the_cookie_away(browser: TestClient, key: str) -> None:
    signed_in(browser, key)
    assert browser.post("/ui/signout").headers["location"] == "/ui/signin"
    assert browser.get("/ui/jobs").status_code == 303


def test_a_copy_of_the_cookie_is_worthless_after_signing_out(
    browser: TestClient, key: str
) -> None:
    signed_in(browser, key)
    stolen = browser.cookies["precision"]
    browser.post("/ui/signout")
    browser.cookies.set("precision", stolen)
    assert browser.get("/v1/jobs").status_code == 401
    verified.clear()  # as another replica, which never knew it
    assert browser.get("/v1/jobs").status_code == 401
    assert browser.post("/ui/signout").status_code == 303  # once more is no error
    browser.cookies.clear()
    signed_in(browser, key)  # the same key begins another
    assert browser.get("/v1/jobs").status_code == 200


def test_what_is_known_of_ended_sessions_goes_with_their_time(
    browser: TestClient, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signed_in(browser, key)
    browser.post("/ui/signout")
    with db.transaction() as session:
        assert retention.purge_sessions(session) == 0
        monkeypatch.setattr(retention, "now", lambda _: now() + timedelta(hours=13))
        assert retention.purge_sessions(session) == 1


def test_a_portals_proxy_needs_no_session(client: TestClient) -> None:
    assert client.get("/ui/jobs").status_code == 200


def test_a_page_needs_its_scope(browser: TestClient) -> None:
    signed_in(browser, key_with("models:read"))
    answer = browser.get("/ui/jobs")
    assert answer.status_code == 403
    assert "jobs:read" in answer.text
    assert browser.get("/ui/models").status_code == 200


def test_errors_are_pages(client: TestClient) -> None:
    for path, status in (
        ("/ui/jobs/job_none", 404),
        ("/ui/nowhere/at/all", 404),
        ("/ui/jobs?status=odd", 422),
        ("/ui/jobs?since=yesterday", 422),
        ("/ui/jobs?after=odd", 400),
        ("/ui/jobs/%00", 404),
    ):
        answer = client.get(path)
        assert answer.status_code == status, path
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        assert "To the jobs" in answer.text


def test_pages_allow_no_script_of_others_and_no_frame(client: TestClient) -> None:
    for path in ("/ui/signin", "/ui/jobs", "/ui/nowhere"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-frame-options"] == "DENY"


def test_templates_hold_no_script_and_no_style_of_their_own() -> None:
    for path in TEMPLATES.glob("*.html.j2"):
        text = path.read_text("utf-8")
        assert not re.search(r"<style|style=|\son\w+=|<script(?![^>]*src=)", text), path
        assert not re.search(r"(src|href)=\"https?:", text), path
        assert "| safe" not in text, path


def test_assets_are_kept_for_ever_under_the_name_of_their_bytes(
    client: TestClient,
) -> None:
    page = client.get("/ui/jobs").text
    named = re.findall(r'(?:href|src)="(/ui/assets/[0-9a-f]{12}/[\w.]+)"', page)
    assert {name.rpartition("/")[2] for name in named} >= {"portal.css", "portal.js"}
    for address in named:
        answer = client.get(address)
        assert answer.status_code == 200
        assert "immutable" in answer.headers["cache-control"]
    assert client.get("/ui/assets/x/../../pages/base.html.j2").status_code == 404


def test_the_list_filters(tiny: Path, client: TestClient, job_id: str) -> None:
    other = {**BODY, "metadata": {"entity_ref": "component:default/ads"}}
    ads = client.post("/v1/optimize", json=other).json()["id"]
    found = client.get("/ui/jobs?entity_ref=component:default/ads&status=&since=").text
    assert (ads in found, job_id in found) == (True, False)
    assert "No job fits" in client.get("/ui/jobs?status=failed").text
    assert job_id in client.get("/ui/jobs?hardware=h100&status=queued").text


def test_names_of_customers_are_text(tiny: Path, client: TestClient) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    body = {**BODY, "metadata": {"entity_ref": hostile, hostile: "\u202eright"}}
    made = client.post("/v1/optimize", json=body).json()["id"]
    for path in ("/ui/jobs", f"/ui/jobs/{made}", f"/ui/new?like={made}"):
        page = client.get(path)
        assert page.status_code == 200, path
        assert "<img src=x" not in page.text


def test_another_tenants_job_is_no_page(
    tiny: Path, client: TestClient, job_id: str
) -> None:
    with db.transaction() as session:
        key = auth.create_key(session, "other", "other")
    client.headers["Authorization"] = f"Bearer {key}"
    assert client.get(f"/ui/jobs/{job_id}").status_code == 404
    assert job_id not in client.get("/ui/jobs").text
    assert client.get(f"/ui/compare?job={job_id}").status_code == 404
    assert client.get(f"/ui/new?like={job_id}").status_code == 404


def test_jobs_of_both_kinds_stand_side_by_side(client: TestClient, done: str) -> None:
    body = {"model": "tiny", "hardware": "h100", "task": "finetune"}
    made = client.post("/v1/optimize", json=body).json()["id"]
    with db.transaction() as session:
        claim = jobs.claim(session, made, "worker-1")
        assert claim is not None
        jobs.succeed(session, claim, "recommended", SUMMARY, [])
    for pair in (f"job={made}&job={done}", f"job={done}&job={made}"):
        assert client.get(f"/ui/compare?{pair}").status_code == 200


def test_the_phases_of_a_probe_have_its_own_names(
    tiny: Path, client: TestClient
) -> None:
    body = {"model": "tiny", "hardware": "h100", "task": "finetune"}
    made = client.post("/v1/optimize", json=body).json()["id"]
    with db.transaction() as session:
        claim = jobs.claim(session, made, "worker-1")
        assert claim is not None
        jobs.progress(session, claim, "calibrate", 5)
    page = client.get(f"/ui/jobs/{made}").text
    assert "Baseline in fp32 began at 5 %" in page  # the log
    assert '<span data-phase="validate">Promotions</span>' in page
    assert "Calibrate" not in page
    with db.transaction() as session:
        jobs.fail(session, claim, {**FAILED, "phase": "sweep"})
    assert "Failed in Candidates" in client.get(f"/ui/jobs/{made}").text


def test_where_a_process_crashed_is_shown_as_text(
    client: TestClient, job_id: str
) -> None:
    with db.transaction() as session:
        claim = jobs.claim(session, job_id, "worker-1")
        assert claim is not None
        said = {"phase": "sweep", "log_excerpt": "Fatal Python error: <b>"}
        jobs.fail(session, claim, {**FAILED, **said})
    page = client.get(f"/ui/jobs/{job_id}").text
    assert "<pre>Fatal Python error: &lt;b&gt;</pre>" in page
    told = client.get(f"/v1/jobs/{job_id}").json()["error"]
    assert told["log_excerpt"] == "Fatal Python error: <b>"


def test_the_legend_of_two_fronts_shows_how_both_are_drawn(
    client: TestClient, done: str
) -> None:
    body = {"model": "tiny", "hardware": "h200"}
    made = client.post("/v1/optimize", json=body).json()["id"]
    with db.transaction() as session:
        claim = jobs.claim(session, made, "worker-1")
        assert claim is not None
        jobs.succeed(session, claim, "sla_met", SUMMARY, [])
    page = client.get(f"/ui/compare?job={done}&job={made}").text
    legend = page.partition('<ul class="legend">')[2].partition("</ul>")[0]
    said = re.findall(r'class="mark (s\d \w+)"', legend)
    both = [f"s{n} {kind}" for kind in ("measured", "predicted") for n in (0, 1)]
    assert said == ["s0 measured", "s1 measured", *both, "s0 chosen"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("p100", "Pre-training: <strong>fp32</strong>"),
        ("t4", "Pre-training: <strong>fp16 with loss scaling</strong>"),
        ("h100", "Pre-training: <strong>bf16 with FP8 matrices</strong>"),
    ],
)
def test_a_device_says_what_to_train_in_and_who_says_so(
    browser: TestClient, key: str, name: str, said: str
) -> None:
    signed_in(browser, key)
    page = browser.get(f"/ui/hardware/{name}").text
    assert said in page
    assert '<span class="chip even">folklore</span>' in page
    assert "arXiv:1710.03740" in page  # who said to keep master weights in fp32
    assert ("unscale the gradients before they are clipped" in page) == (name == "t4")
