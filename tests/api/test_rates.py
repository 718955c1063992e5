"""How often a caller may ask: per key, per address, per replica or all together."""

import asyncio
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event
from structlog.testing import capture_logs

from api import auth, callers, db, rates, serve
from api.app import create_app
from api.settings import settings
from tests.api.conftest import BODY, Refused

NOON = 1_800_000_000.0  # the first second of a minute

Api = Callable[..., TestClient]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A minute that does not end in the middle of a test."""
    now = [NOON + 12.5]
    monkeypatch.setattr(rates, "_now", lambda: now[0])
    return now


@pytest.fixture
def api(
    sqlite: Path, bells: list[str], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Api]:
    """Make an API with limits of its own, asked by a new key of acme."""
    opened: list[TestClient] = []

    def make(peer: str = "192.0.2.1", **limits: object) -> TestClient:
        for name, value in limits.items():
            monkeypatch.setenv(f"PRECISION_{name.upper()}", str(value))
        settings.cache_clear()
        client = TestClient(create_app(), headers=new_key(), client=(peer, 50_000))
        opened.append(client.__enter__())
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


def new_key() -> dict[str, str]:
    with db.transaction() as session:
        key = auth.create_key(session, "acme", "test", ["admin"])
    return {"Authorization": f"Bearer {key}"}


def test_every_answer_says_what_is_left(api: Api) -> None:
    client = api(requests_per_minute=100)
    first, second = client.get("/v1/jobs"), client.get("/v1/jobs/job_none")
    assert first.headers["ratelimit-policy"] == '"default";q=100;w=60'
    assert first.headers["ratelimit"] == '"default";r=99;t=48'
    assert second.status_code == 404
    assert second.headers["ratelimit"] == '"default";r=98;t=48'


def test_a_key_that_asks_too_often_waits_for_the_next_minute(
    api: Api, clock: list[float], refused: Refused
) -> None:
    client = api(requests_per_minute=3)
    assert [client.get("/v1/jobs").status_code for _ in range(3)] == [200] * 3
    answer = client.get("/v1/jobs")
    problem = refused(answer, 429, "rate_limited")
    assert problem["type"].endswith("http-problem-types#quota-exceeded")
    assert problem["violated-policies"] == ["default"]
    assert problem["limit"] == 3
    assert answer.headers["retry-after"] == "48"
    assert answer.headers["ratelimit"] == '"default";r=0;t=48'
    assert client.get("/v1/jobs", headers=new_key()).status_code == 200
    assert client.get("/livez").status_code == 200
    clock[0] += float(answer.headers["retry-after"])
    assert client.get("/v1/jobs").status_code == 200


def test_creating_has_a_limit_of_its_own(
    tiny: Path, api: Api, refused: Refused
) -> None:
    client = api(creates_per_minute=2)
    created = [client.post("/v1/optimize", json=BODY) for _ in range(2)]
    assert [answer.status_code for answer in created] == [202, 202]
    assert created[0].headers["ratelimit-policy"].endswith(', "create";q=2;w=60')
    assert re.search(
        r'"default";r=\d+;t=48, "create";r=1;t=48', created[0].headers["ratelimit"]
    )
    problem = refused(client.post("/v1/optimize", json={}), 429, "rate_limited")
    assert problem["violated-policies"] == ["create"]
    job = created[0].json()["id"]
    assert client.post(f"/v1/jobs/{job}/cancel").status_code < 300
    assert client.post("/v1/estimate", json=BODY).status_code != 429


def test_keys_are_not_guessed_nor_the_database_worn_out(
    api: Api, refused: Refused
) -> None:
    client = api(refusals_per_minute=3)
    unknown = auth._sealed(f"po_live_{'k' * 8}_{'s' * 32}")
    guess = {"Authorization": f"Bearer {unknown}"}
    answer = client.get("/v1/jobs", headers=guess)
    refused(answer, 401, "unauthenticated")
    assert answer.headers["ratelimit"] == '"address";r=2;t=48'
    client.get("/v1/jobs", headers={"Authorization": "Bearer junk"})
    client.get("/v1/jobs", headers={"Authorization": ""})
    queries: list[str] = []
    event.listen(db.engine(), "before_cursor_execute", lambda *a: queries.append(a[2]))
    for header in (guess, {"Authorization": ""}, {"Authorization": "Basic x"}):
        problem = refused(client.get("/v1/jobs", headers=header), 429, "rate_limited")
        assert problem["violated-policies"] == ["address"]
    assert queries == []


def test_a_neighbour_who_guesses_does_not_lock_a_good_key_out(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callers, "KEPT_S", 0.0)
    client = api(refusals_per_minute=2)
    assert client.get("/v1/jobs").status_code == 200
    for _ in range(3):
        client.get("/v1/jobs", headers={"Authorization": "Bearer junk"})
    assert client.get("/v1/jobs").status_code == 200
    assert client.get("/v1/jobs", headers=new_key()).status_code == 429


def test_addresses_are_told_apart(api: Api) -> None:
    one, other = api(refusals_per_minute=1), api("198.51.100.7", refusals_per_minute=1)
    other.app.state.rates = one.app.state.rates  # type: ignore[attr-defined]
    junk = {"Authorization": "Bearer junk"}
    assert [one.get("/v1/jobs", headers=junk).status_code for _ in range(2)] == [
        401,
        429,
    ]
    assert other.get("/v1/jobs", headers=junk).status_code == 401


@pytest.mark.parametrize(
    ("host", "whose"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("2001:db8:1:2::", "2001:db8:1:2::"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("testclient", "testclient"),
        ("", ""),
    ],
)
def test_one_site_of_ipv6_is_one_address(host: str, whose: str) -> None:
    assert rates.network(host) == whose


def test_no_limit_is_a_limit_of_nought(api: Api) -> None:
    client = api(requests_per_minute=0, creates_per_minute=0, refusals_per_minute=0)
    answer = client.get("/v1/jobs")
    assert answer.status_code == 200
    assert "ratelimit" not in answer.headers
    junk = {"Authorization": "Bearer junk"}
    assert {client.get("/v1/jobs", headers=junk).status_code for _ in range(3)} == {401}


def test_memory_holds_one_minute_and_has_an_end(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "MAX_COUNTED", 10)
    counts = rates.Memory()

    async def fill() -> None:
        for number in range(100):
            await counts.add(str(number), 1)
            assert len(counts._counts) <= 12
        clock[0] += 60
        assert await counts.add("0", 0) == 0
        assert len(counts._counts) <= 1

    asyncio.run(fill())


# -- counted for all replicas --------------------------------------------------


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """Start a server that speaks the Redis protocol."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    folder = tmp_path / "redis"
    folder.mkdir()
    command = [serve._broker(), "--port", str(port), "--save", "", "--dir", str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _wait_for(port)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)


def _wait_for(port: int) -> None:
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError(port)


@pytest.mark.service
def test_replicas_count_together(api: Api, redis_url: str, refused: Refused) -> None:
    limits = {"rate_limit_url": redis_url, "requests_per_minute": 4}
    one, other = api(**limits), api(**limits)
    other.headers = one.headers
    said = [r.get("/v1/jobs").headers["ratelimit"] for r in (one, other, one, other)]
    assert said == [f'"default";r={n};t=48' for n in (3, 2, 1, 0)]
    refused(other.get("/v1/jobs"), 429, "rate_limited")


def test_requests_pass_uncounted_where_the_counter_is_away(api: Api) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    client = api(rate_limit_url=f"redis://127.0.0.1:{port}/0", requests_per_minute=1)
    with capture_logs() as logs:
        began = time.monotonic()
        answers = [client.get("/v1/jobs") for _ in range(5)]
        took_s = time.monotonic() - began
    assert [answer.status_code for answer in answers] == [200] * 5
    assert "ratelimit" not in answers[0].headers
    warned = [line for line in logs if line["event"] == "rate_limits_not_counted"]
    assert len(warned) == 1  # and not one a request
    assert took_s < 3


def test_a_counter_that_hangs_holds_requests_up_once(api: Api) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, never answers
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        client = api(rate_limit_url=url)
        began = time.monotonic()
        assert {client.get("/v1/jobs").status_code for _ in range(5)} == {200}
        assert time.monotonic() - began < 3
