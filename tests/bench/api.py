"""The API under load, beside a bare FastAPI endpoint that does one query, or one insert.

    python -m tests.bench.api

Both run in uvicorn, one process each, on SQLite, and are asked in turns by one client
over the same number of connections, so that what the machine does meanwhile hits both.
Printed are requests per second, p99, the ratio of throughputs (0.6 is the aim) and that
of the servers' processor time, which other processes disturb less; then the handles of
the database that 200 open streams hold, then the server's memory over 50,000 requests:
of five, three read a job, one lists 20 and one makes a job, whose rows stay.
"""

import argparse
import asyncio
import json
import os
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from pathlib import Path

import httpx
import psutil

CONNECTIONS = 16
ROUNDS = 5
ROUND_S = 4.0
SOAK = 50_000
SOAK_PARTS = 5
STREAMS = 200
BODY = {
    "model": "tiny",
    "hardware": "h100",
    "latency_sla": 0.02,
    "data_distribution": {"name": "web_text", "calibration_tokens": 512},
}
BARE = """
import os
from fastapi import FastAPI
from sqlalchemy import select
from api import db, ids
from api.models import Job, now
app = FastAPI()

@app.get("/jobs/{job_id}")
def get_job(job_id: str):
    with db.reading() as session:
        job = session.scalar(select(Job).where(Job.id == job_id))
        return {"id": job.id, "status": job.status, "created_at": job.created_at}

@app.post("/jobs", status_code=202)
def add_job(body: dict):
    at = now()
    with db.transaction() as session:
        job = Job(id=ids.new("job"), tenant_id=os.environ["TENANT"], body=body, spec={},
                  status="cancelled", created_at=at, queued_at=at, rung_at=at,
                  expires_at=at)
        session.add(job)
    return {"id": job.id, "status": job.status}
"""

Row = dict[str, float]
Target = tuple[int, tuple[bytes, ...]]  # a port, and what is sent to it in turns
Server = tuple[Target, int]  # with its process


@dataclass(frozen=True, slots=True)
class Load:
    """What a number of requests came to."""

    per_second: float
    p99_s: float
    statuses: dict[int, int]
    cpu_s: float = 0.0  # of the server, for each request


class Asker(asyncio.Protocol):
    """One connection that sends the next request as soon as the last is answered."""

    def __init__(
        self,
        requests: Iterator[bytes],
        times_s: list[float],
        statuses: dict[int, int],
    ):
        self.requests, self.times_s, self.statuses = requests, times_s, statuses
        self.buffer = b""
        self.stopped = False
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._send()

    def _send(self) -> None:
        self.sent_at = time.perf_counter()
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, found, body = self.buffer.partition(b"\r\n\r\n")
        if not found:
            return
        lines = head.lower().split(b"\r\n")
        length = next(int(x[15:]) for x in lines if x.startswith(b"content-length:"))
        if len(body) < length:
            return
        self.buffer = body[length:]
        self.times_s.append(time.perf_counter() - self.sent_at)
        status = int(head[9:12])
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if self.stopped:
            self.transport.close()
        else:
            self._send()

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def _ask(target: Target, seconds: float, count: int | None) -> Load:
    loop = asyncio.get_running_loop()
    port, requests = target
    in_turns = cycle(requests)  # all connections together
    times_s: list[float] = []
    statuses: dict[int, int] = {}
    askers = []
    began = time.perf_counter()
    for _ in range(CONNECTIONS):
        _, asker = await loop.create_connection(
            lambda: Asker(in_turns, times_s, statuses), "127.0.0.1", port
        )
        askers.append(asker)
    while (
        time.perf_counter() - began < seconds if count is None else len(times_s) < count
    ):
        await asyncio.sleep(0.02)
    for asker in askers:
        asker.stopped = True
    await asyncio.gather(*(asker.done for asker in askers))
    took_s = time.perf_counter() - began
    p99_s = statistics.quantiles(times_s, n=100)[98]
    return Load(len(times_s) / took_s, p99_s, statuses)


def ask(target: Target, seconds: float = ROUND_S, count: int | None = None) -> Load:
    """Send the request again and again, for so long or so often."""
    load = asyncio.run(_ask(target, seconds, count))
    assert set(load.statuses) <= {200, 202}, load.statuses
    return load


def http(
    method: str, path: str, key: str, body: object = None, more: str = ""
) -> bytes:
    """Return the bytes of a request."""
    data = b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"{more}Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def process(command: list[str], environment: dict[str, str]) -> Iterator[int]:
    """Run a server until the block ends; give its process."""
    with (Path(environment["PRECISION_DATA_DIR"]) / "server.log").open("ab") as log:
        started = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=log, stderr=log
        )
    try:
        yield started.pid
    finally:
        started.terminate()
        started.wait(30)


@contextmanager
def serving(
    app: str, environment: dict[str, str], *more: str
) -> Iterator[tuple[int, int]]:
    """Run uvicorn; give its port and its process once it answers."""
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), *more]
    options = ["--log-level", "warning", "--no-access-log"]
    with process([*command, *options], environment) as pid:
        for _ in range(300):
            try:
                httpx.get(f"http://127.0.0.1:{port}/", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield port, pid


def measured(server: Server, seconds: float = ROUND_S) -> Load:
    """Ask, and see how much the server worked for each request."""
    target, pid = server
    before = _cpu_s(pid)
    load = ask(target, seconds)
    return replace(load, cpu_s=(_cpu_s(pid) - before) / sum(load.statuses.values()))


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


def empty_queue(database: Path) -> None:
    """Let nothing wait: a tenant's queue has 20 jobs, not the thousands of a round.

    Each new job counts those that wait, which a round would make the longer the faster
    it goes.
    """
    with closing(sqlite3.connect(database, timeout=30)) as connection, connection:
        waits = "UPDATE jobs SET status = 'cancelled' WHERE status = 'queued'"
        connection.execute(waits)


def compare(name: str, ours: Server, bare: Server, database: Path) -> Row:
    """Ask both in turns; print throughputs, p99 and the ratios."""
    for server in (ours, bare):
        measured(server, 1.0)  # warm
    rounds = []
    for _ in range(ROUNDS):
        rounds.append((measured(ours), measured(bare)))
        empty_queue(database)
    ratios = [mine.per_second / theirs.per_second for mine, theirs in rounds]
    row = {
        "per_second": statistics.median(mine.per_second for mine, _ in rounds),
        "p99_s": statistics.median(mine.p99_s for mine, _ in rounds),
        "bare_per_second": statistics.median(bare.per_second for _, bare in rounds),
        "bare_p99_s": statistics.median(bare.p99_s for _, bare in rounds),
        "ratio": statistics.median(ratios),
        "cpu_s": statistics.median(mine.cpu_s for mine, _ in rounds),
        "bare_cpu_s": statistics.median(bare.cpu_s for _, bare in rounds),
        "cpu_ratio": statistics.median(b.cpu_s / m.cpu_s for m, b in rounds),
    }
    print(
        f"{name:20} {row['per_second']:6.0f}/s, p99 {row['p99_s'] * 1e3:5.1f} ms; "
        f"bare {row['bare_per_second']:6.0f}/s, p99 {row['bare_p99_s'] * 1e3:5.1f} ms; "
        f"ratio {row['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}), "
        f"of processor time {row['cpu_ratio']:.2f}"
    )
    return row


def soak(target: Target, pid: int, database: Path) -> dict[str, list[float]]:
    """Print the server's memory over many requests: a leak grows by as much each time.

    Nothing waits at the beginning of a part: what a server knows of its queue is bounded
    by the tenants' limits, and here by a part. The rows of jobs stay.
    """
    ask(target, count=SOAK // 10)
    empty_queue(database)
    found, rows = [_rss_mib(pid)], [_rows(database)]
    for _ in range(SOAK_PARTS):
        ask(target, count=SOAK // SOAK_PARTS)
        empty_queue(database)
        found.append(_rss_mib(pid))
        rows.append(_rows(database))
    grown = [after - before for before, after in pairwise(found)]
    said = ", ".join(f"{mib:+.1f}" for mib in grown)
    each = SOAK // SOAK_PARTS
    print(
        f"memory: {found[0]:.1f} MiB, then {said} MiB over {each} requests each, "
        f"while jobs went from {rows[0]} rows to {rows[-1]}"
    )
    return {"mib": found, "rows": [float(count) for count in rows]}


def _rows(database: Path) -> int:
    with closing(sqlite3.connect(database, timeout=30)) as connection:
        return int(connection.execute("SELECT count(*) FROM jobs").fetchone()[0])


def _rss_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss / 2**20)


async def _handles(target: Target, pid: int, database: Path) -> int:
    port, (request,) = target
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(STREAMS)]
    for _, writer in opened:
        writer.write(request)
    for reader, _ in opened:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head[:300]
    await asyncio.sleep(3)
    held = [_open_files(pid, database) for _ in range(20)]
    for _, writer in opened:
        writer.close()
    return int(statistics.median(held))


def _open_files(pid: int, database: Path) -> int:
    time.sleep(0.05)
    files = psutil.Process(pid).open_files()
    return sum(file.path == str(database) for file in files)


def streams(target: Target, pid: int, database: Path) -> Row:
    """Print how many handles of the database many idle streams hold, all together."""
    held = asyncio.run(_handles(target, pid, database))
    print(f"{STREAMS} idle streams: {held} open handles of the database in all")
    return {"streams": STREAMS, "handles": held}


def prepare(folder: Path) -> tuple[str, str, str]:
    """Return a key, its tenant and a job that waits, in a fresh database."""
    from api import auth, db, jobs
    from optimizer import checkpoint
    from optimizer.spec import OptimizeSpec
    from tests.service import tiny_model

    model = tiny_model(folder / "models" / "tiny")
    db.migrate()
    spec = OptimizeSpec("tiny", str(model), checkpoint.fingerprint(model), "h100")
    with db.transaction() as session:
        tenant = auth.tenant_named(session, "acme")
        tenant.max_queued = 10**9
        key = auth.create_key(session, "acme", "bench")
        job = jobs.submit(session, tenant.id, spec)
        made = (key, tenant.id, job.id)
    db.close()
    return made


def broker() -> tuple[list[str], str]:
    """Return the command of a real broker, and its address."""
    from api.serve import _broker

    port = free_port()
    command = [_broker(), "--port", str(port), "--save", "", "--bind", "127.0.0.1"]
    return command, f"redis://127.0.0.1:{port}/0"


def main() -> None:
    """Run everything and print one JSON object as the last line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--skip-soak", action="store_true", help="Leave memory out.")
    parser.add_argument("--soak-alone", action="store_true", help="Only memory.")
    options = parser.parse_args()
    command, address = broker()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        environment = {
            "PRECISION_DATA_DIR": str(folder),
            "PRECISION_BROKER_URL": address,
            "PRECISION_REQUESTS_PER_MINUTE": "1000000",
            "PRECISION_CREATES_PER_MINUTE": "1000000",
            "PRECISION_STREAMS_PER_KEY": str(2 * STREAMS),
            "MALLOC_ARENA_MAX": "2",  # as the image and `precision serve` have it
            "PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd())]),
        }
        os.environ.update(environment)
        key, environment["TENANT"], job_id = prepare(folder)
        (folder / "bare.py").write_text(BARE)
        stack.enter_context(process(command, environment))
        app = stack.enter_context(
            serving("api.app:create_app", environment, "--factory")
        )
        bare, bare_pid = stack.enter_context(serving("bare:app", environment))
        (ours, pid), jobs = app, f"/v1/jobs/{job_id}"
        reading = http("GET", jobs, key)
        making = http("POST", "/v1/optimize", key, BODY)
        listing = http("GET", "/v1/jobs?limit=20", key)
        read, create = (ours, (reading,)), (ours, (making,))
        mixed = (ours, (reading, making, reading, listing, reading))
        bare_read = (bare, (http("GET", f"/jobs/{job_id}", key),))
        bare_create = (bare, (http("POST", "/jobs", key, BODY),))
        database = folder / "precision.db"
        event_stream = "Accept: text/event-stream\r\n"
        follow = (ours, (http("GET", f"{jobs}/events", key, more=event_stream),))
        found: dict[str, object] = {}
        if not options.soak_alone:
            found["get"] = compare(
                "GET /v1/jobs/{id}", (read, pid), (bare_read, bare_pid), database
            )
            found["post"] = compare(
                "POST /v1/optimize", (create, pid), (bare_create, bare_pid), database
            )
            found["streams"] = streams(follow, pid, database)
        if not options.skip_soak:
            found["memory"] = soak(mixed, pid, database)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
