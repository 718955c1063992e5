"""Events, as pages and as a stream over a real socket."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi.testclient import TestClient
from sqlalchemy import event

from api import db, jobs, settings
from api.app import create_app
from api.models import FINAL
from api.transitions import Claim
from tests.api.conftest import Refused
from tests.service import eventually

pytestmark = pytest.mark.both

STREAM = {"Accept": "text/event-stream"}


@pytest.fixture
def live(client: TestClient, key: str) -> Iterator[httpx.Client]:
    """The same service on a real socket: the test client does not stream."""
    config = uvicorn.Config(
        create_app(), log_level="error", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        headers = {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(
            base_url=url, headers=headers, trust_env=False, limits=limits
        ) as http:
            yield http
        server.should_exit = True
        thread.join()


def claim(job_id: str) -> Claim:
    with db.transaction() as session:
        found = jobs.claim(session, job_id, "worker-1")
    assert found is not None
    return found


def succeed(claim: Claim) -> None:
    with db.transaction() as session:
        assert jobs.succeed(session, claim, "sla_met", {})


def read_stream(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    """Yield the fields of each event, as a browser would."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "data" in fields:
            yield fields
            fields = {}


def seqs(response: Any) -> list[int]:
    return [int(e["id"]) for e in read_stream(response.iter_lines())]


def test_pages_are_resumed_by_seq(done: str, client: TestClient) -> None:
    url = f"/v1/jobs/{done}/events"
    whole = client.get(url).json()
    types = [event["type"] for event in whole["data"]]
    before = ["job.created", "job.queued", "job.started"]
    assert types == [*before, "artifact.created", "artifact.created", "job.succeeded"]
    assert [event["seq"] for event in whole["data"]] == [1, 2, 3, 4, 5, 6]
    assert whole["data"][3]["data"]["name"] == "report.json"
    first = client.get(url, params={"limit": 3}).json()
    assert (first["has_more"], first["next_cursor"]) == (True, "3")
    rest = client.get(url, params={"after": first["next_cursor"]}).json()
    assert first["data"] + rest["data"] == whole["data"]
    assert (rest["has_more"], rest["next_cursor"]) == (False, None)


def test_a_stream_says_the_same_as_the_pages(done: str, client: TestClient) -> None:
    url = f"/v1/jobs/{done}/events"
    answer = client.get(url, headers=STREAM)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert answer.text.startswith("retry: ")
    streamed = list(read_stream(iter(answer.text.split("\n"))))
    events = [json.loads(event["data"]) for event in streamed]
    assert events == client.get(url).json()["data"]
    assert [event["event"] for event in streamed] == [event["type"] for event in events]


def test_who_has_seen_the_end_is_told_to_stop(
    done: str, client: TestClient, refused: Refused
) -> None:
    url = f"/v1/jobs/{done}/events"
    answer = client.get(url, headers={**STREAM, "Last-Event-ID": "6"})
    assert (answer.status_code, answer.content) == (204, b"")
    for strange in ("-1", "x", "9" * 30):
        answer = client.get(url, headers={**STREAM, "Last-Event-ID": strange})
        refused(answer, 422, "validation_error")
    answer = client.get(url, headers={"Accept": "application/xml"})
    refused(answer, 406, "not_acceptable")


def test_a_cut_stream_resumes_without_gap_or_double(
    job_id: str, live: httpx.Client
) -> None:
    url = f"/v1/jobs/{job_id}/events"
    held = claim(job_id)
    with live.stream("GET", url, headers=STREAM) as response:
        events = read_stream(response.iter_lines())
        before = [int(next(events)["id"]) for _ in range(2)]
    for step in range(3):
        with db.transaction() as session:
            jobs.progress(session, held, f"phase-{step}", 10.0 * step)
    timer = threading.Timer(0.3, succeed, [held])
    timer.start()
    resume = {**STREAM, "Last-Event-ID": str(before[-1])}
    with live.stream("GET", url, headers=resume) as response:
        after = seqs(response)  # ends by itself after the final event
    timer.join()
    assert before + after == list(range(1, len(before + after) + 1))
    assert live.get(f"/v1/jobs/{job_id}").json()["status"] in FINAL


def test_a_key_holds_so_many_streams_open(
    job_id: str, live: httpx.Client, refused: Refused
) -> None:
    url = f"/v1/jobs/{job_id}/events"
    limit = settings.settings().streams_per_key
    with ExitStack() as opened:
        for _ in range(limit):
            stream = opened.enter_context(live.stream("GET", url, headers=STREAM))
            assert stream.status_code == 200
        assert f"precision_sse_streams {limit}.0" in live.get("/metrics").text
        answer = live.get(url, headers=STREAM)
        problem = refused(answer, 429, "concurrency_limit")
        assert (problem["limit"], answer.headers["retry-after"]) == (limit, "5")
        assert live.get(url).status_code == 200  # pages are not counted
        assert live.head(url, headers=STREAM).status_code == 200
    for _ in range(100):
        with live.stream("GET", url, headers=STREAM) as stream:
            if stream.status_code == 200:
                break
        time.sleep(0.05)
    else:
        pytest.fail("streams that are gone are still counted")


def test_200_idle_streams_use_no_connection(
    job_id: str, live: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_STREAMS_PER_KEY", "200")
    monkeypatch.setenv("PRECISION_STREAM_POLL_S", "0.1")
    monkeypatch.setenv("PRECISION_STREAM_KEEPALIVE_S", "1")
    settings.settings.cache_clear()
    url = f"/v1/jobs/{job_id}/events"
    pool = db.engine().pool
    with ExitStack() as opened:
        streams = [
            opened.enter_context(live.stream("GET", url, headers=STREAM))
            for _ in range(200)
        ]
        every = [stream.iter_lines() for stream in streams]
        for lines in every:
            assert ": keep-alive" in lines
        queries: list[str] = []
        event.listen(
            db.engine(), "before_cursor_execute", lambda *a: queries.append(a[2])
        )
        samples = []
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            samples.append(pool.checkedout())  # type: ignore[attr-defined]
            time.sleep(0.002)
        # One look a tick for all of them, and nothing held between two.
        assert max(samples) <= 1
        assert sum(samples) < len(samples) / 2
        assert 1 <= len([q for q in queries if "FROM jobs" in q]) <= 11
        held = claim(job_id)
        succeed(held)
        for lines in every:  # each hears of it, and ends
            assert "event: job.succeeded" in lines
    assert eventually(lambda: pool.checkedout() == 0)  # type: ignore[attr-defined]


def test_the_service_stops_at_once_with_open_streams(
    job_id: str, client: TestClient, key: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        os.set_inheritable(listener.fileno(), True)
        port = listener.getsockname()[1]
        command = [sys.executable, "-m", "uvicorn", "--factory", "api.app:create_app"]
        command += ["--fd", str(listener.fileno()), "--log-level", "error"]
        environment = {**os.environ, "PRECISION_STREAM_KEEPALIVE_S": "60"}
        with subprocess.Popen(
            command, pass_fds=[listener.fileno()], env=environment
        ) as server:
            headers = {"Authorization": f"Bearer {key}", **STREAM}
            base = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=base, headers=headers, timeout=60) as http:
                url = f"/v1/jobs/{job_id}/events"
                with http.stream("GET", url) as response:
                    lines = response.iter_lines()
                    assert "event: job.queued" in lines
                    began = time.monotonic()
                    server.terminate()
                    assert [line for line in lines if line.startswith("id")] == []
            server.wait(10)
            assert time.monotonic() - began < 3
