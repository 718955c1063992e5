"""What stands at the door: names, ports, sizes, and what browsers are told."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient
from starlette.types import Message

from api import settings
from api.app import create_app
from tests.api.conftest import Json, Refused

PORTAL = "https://portal.example.com"
Make = Callable[..., TestClient]


@pytest.fixture
def made(sqlite: object, key: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a client of a service with settings of its own."""
    opened: list[TestClient] = []

    def make(base_url: str = "http://testserver", **said: str) -> TestClient:
        for name, value in said.items():
            monkeypatch.setenv(f"PRECISION_{name.upper()}", value)
        settings.settings.cache_clear()
        headers = {"Authorization": f"Bearer {key}"}
        client = TestClient(create_app(), base_url=base_url, headers=headers)
        opened.append(client.__enter__())
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


def test_every_answer_is_safe_to_show(client: TestClient) -> None:
    for path in ("/v1/jobs", "/v1/nowhere", "/livez", "/openapi.json"):
        headers = client.get(path).headers
        assert headers["x-content-type-options"] == "nosniff"
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "strict-transport-security" not in headers  # it did not come by TLS


def test_who_came_by_tls_is_told_to_stay(made: Make) -> None:
    client = made("https://testserver")
    assert "max-age" in client.get("/livez").headers["strict-transport-security"]


# -- hosts -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "welcome"),
    [
        ("precision.example.com", True),
        ("PRECISION.example.com:8080", True),
        ("a.internal", True),
        ("a.b.internal:80", True),
        ("[::1]:8080", True),
        ("[::1]", True),
        ("internal", False),
        ("evil.example.com", False),
        ("precision.example.com.evil.example", False),
        ("precision.example.com@evil.example", False),
        ("", False),
    ],
)
def test_a_host_that_we_are_not_is_refused(
    made: Make, refused: Refused, host: str, welcome: bool
) -> None:
    client = made(allowed_hosts="precision.example.com, *.internal, [::1]")
    answer = client.get("/v1/hardware", headers={"Host": host})
    if welcome:
        assert answer.status_code == 200
    else:
        refused(answer, 400, "unknown_host")
    assert client.get("/livez", headers={"Host": host}).status_code == 200


def test_any_host_is_ours_where_nothing_is_said(client: TestClient) -> None:
    assert client.get("/v1/jobs", headers={"Host": "whatever"}).status_code == 200


# -- pages of other origins ------------------------------------------------------------


def test_the_portals_pages_may_call_and_read(made: Make) -> None:
    client = made(cors_origins=f"{PORTAL}, http://localhost:3000")
    asked = {
        "Origin": PORTAL,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,idempotency-key",
    }
    preflight = client.options("/v1/optimize", headers=asked)
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == PORTAL
    assert "POST" in preflight.headers["access-control-allow-methods"]
    allowed = preflight.headers["access-control-allow-headers"]
    assert {"Authorization", "Idempotency-Key", "Last-Event-ID", "Range"} <= set(
        allowed.split(", ")
    )
    answer = client.get("/v1/jobs", headers={"Origin": PORTAL})
    assert answer.headers["access-control-allow-origin"] == PORTAL
    exposed = answer.headers["access-control-expose-headers"].split(", ")
    sent = {"Location", "ETag", "RateLimit", "RateLimit-Policy", "X-Request-Id"}
    assert sent | {"API-Version", "Retry-After", "Repr-Digest"} <= set(exposed)
    assert "access-control-allow-credentials" not in answer.headers
    refusal = client.get("/v1/jobs/job_none", headers={"Origin": PORTAL})
    assert refusal.headers["access-control-allow-origin"] == PORTAL


@pytest.mark.parametrize(
    "origin",
    ["https://evil.example.com", f"{PORTAL}.evil.example", f"{PORTAL}:8443", "null"],
)
def test_pages_of_others_are_told_nothing(made: Make, origin: str) -> None:
    client = made(cors_origins=PORTAL)
    asked = {"Origin": origin, "Access-Control-Request-Method": "GET"}
    for answer in (
        client.options("/v1/jobs", headers=asked),
        client.get("/v1/jobs", headers={"Origin": origin}),
    ):
        assert "access-control-allow-origin" not in answer.headers
        assert "Origin" in answer.headers["vary"]  # a cache must not give it to others


def test_a_failure_is_read_by_pages_too(
    made: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = made(cors_origins=PORTAL)
    monkeypatch.setattr("api.owners.page", lambda *_, **__: 1 / 0)
    answer = client.get("/v1/jobs", headers={"Origin": PORTAL})
    assert answer.status_code == 500
    assert answer.headers["access-control-allow-origin"] == PORTAL


@pytest.mark.parametrize("origin", ["*", "portal.example.com", f"{PORTAL}/", "null"])
def test_an_origin_that_is_none_stops_the_start(made: Make, origin: str) -> None:
    with pytest.raises(ValueError, match="cors_origins"):
        made(cors_origins=origin)


# -- sizes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "request_",
    [
        {"headers": {"X-Long": "x" * 40_000}},
        {"headers": {f"X-{n}": "x" * 100 for n in range(400)}},
        {"params": {"after": "x" * 40_000}},
    ],
)
def test_long_headers_are_refused(
    client: TestClient, refused: Refused, request_: Json
) -> None:
    problem = refused(client.get("/v1/jobs", **request_), 431, "headers_too_large")
    assert problem["limit_bytes"] == settings.settings().max_headers_bytes


def test_a_megabyte_in_bytes_is_one_body(client: TestClient, refused: Refused) -> None:
    limit = settings.settings().max_body_bytes
    headers = {"Content-Type": "application/json"}
    parts = (b"x" for _ in range(limit + 1))
    answer = client.post("/v1/optimize", content=parts, headers=headers)
    refused(answer, 413, "body_too_large")


async def _ask(messages: Any) -> Json:
    """Ask the application itself, with a body that comes as `messages` say."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "PUT",
        "path": "/v1/datasets/slow",
        "raw_path": b"/v1/datasets/slow",
        "query_string": b"",
        "headers": [(b"content-type", b"application/jsonl")],
        "client": ("127.0.0.1", 1),
    }
    key = settings.settings().data_dir.joinpath("key").read_text()
    scope["headers"].append((b"authorization", f"Bearer {key}".encode()))  # type: ignore[attr-defined]
    await create_app()(scope, messages, send)
    return {"status": sent[0]["status"], "body": sent[1]["body"]}


@pytest.mark.parametrize("pause_s", [60.0, 0.02])
def test_a_body_that_does_not_come_is_given_up(
    sqlite: Any, key: str, monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    # Silent, or a byte each 20 ms: after 0.3 s it must be a kilobyte a second.
    monkeypatch.setenv("PRECISION_BODY_PATIENCE_S", "0.3")
    settings.settings.cache_clear()
    (sqlite / "key").write_text(key)

    async def dribble() -> Message:
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": b"x", "more_body": True}

    answer = asyncio.run(asyncio.wait_for(_ask(dribble), 5))
    assert answer["status"] == 408
    assert b"request_timeout" in answer["body"]
    assert list((sqlite / "datasets").rglob("*.part")) == []


# -- the port of metrics ---------------------------------------------------------------


def test_metrics_have_a_port_of_their_own(made: Make, refused: Refused) -> None:
    beside = made("http://testserver:8080")
    assert beside.get("/metrics").status_code == 200
    made(metrics_port="9090")
    api, metrics = (made(f"http://testserver:{port}") for port in (8080, 9090))
    refused(api.get("/metrics"), 404, "not_found")
    assert api.get("/v1/jobs").status_code == 200
    assert metrics.get("/metrics").status_code == 200
    refused(metrics.get("/v1/jobs"), 404, "not_found")
