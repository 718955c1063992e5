"""Clients that send too much, too slowly, or nothing at all, to the real server."""

import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from api.server import MAX_UNREAD_BYTES
from tests.api.serving import Served, served

GIB = 1 << 30
MEMORY = 64 << 20  # more than this beyond what the server has at rest is too much
IN_FLIGHT = 16 << 20  # what two sockets hold, and the server read meanwhile
PATIENCE_S = 1.0

pytestmark = pytest.mark.service


@pytest.fixture
def server(sqlite: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("PRECISION_BODY_PATIENCE_S", str(PATIENCE_S))
    with served() as running:
        yield running


def head(size: int | str, path: str = "/v1/optimize", method: str = "POST") -> bytes:
    """Return a request whose body of so many bytes, or in chunks, is to follow."""
    if size == "chunked":
        length = "Transfer-Encoding: chunked"
    else:
        length = f"Content-Length: {size}"
    lines = [f"{method} {path} HTTP/1.1", "Host: x", length]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode()


def read_all(connection: socket.socket) -> bytes:
    """Return what comes until the server hangs up."""
    found = b""
    try:
        while block := connection.recv(65_536):
            found += block
    except ConnectionResetError:
        pass
    return found


def push(connection: socket.socket, block: bytes, total: int) -> int:
    """Send so many bytes, or as many as the server takes; return how many."""
    sent = 0
    try:
        while sent < total:
            connection.sendall(block)
            sent += len(block)
    except (BrokenPipeError, ConnectionResetError):
        pass
    return sent


@pytest.mark.parametrize("path", ["/v1/optimize", "/v1/datasets/x", "/nowhere"])
def test_a_gigabyte_is_refused_before_it_comes(server: Served, path: str) -> None:
    with server.connect() as connection:
        connection.sendall(head(GIB, path, "PUT" if "data" in path else "POST"))
        began = time.monotonic()
        answer = connection.recv(65_536)
        assert time.monotonic() - began < 5
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"application/problem+json" in answer


class Offered(NamedTuple):
    """What became of a body that was sent until the server hung up."""

    answer: bytes
    before_answer: int  # bytes that were on their way when the answer came
    sent: int  # in all


def offer(connection: socket.socket, block: bytes, total: int) -> Offered:
    """Send so many bytes, whatever is answered, until the server takes no more."""
    answer, before, sent = b"", 0, 0
    with suppress(BrokenPipeError, ConnectionResetError):
        while sent < total:
            readable, writable, _ = select.select([connection], [connection], [], 60)
            if readable:
                found = connection.recv(65_536)
                answer, before = answer + found, before or sent
                if not found:
                    break
            elif writable:
                connection.sendall(block)
                sent += len(block)
    return Offered(answer, before, sent)


@pytest.mark.parametrize(
    ("method", "path", "limit"),
    [("POST", "/v1/optimize", 1 << 20), ("PUT", "/v1/datasets/x", 64 << 20)],
)
def test_a_gigabyte_in_chunks_is_refused_early(
    server: Served, key: str, method: str, path: str, limit: int
) -> None:
    asked = head("chunked", path, method)
    if method == "PUT":
        asked = asked.replace(b"application/json", b"application/x-ndjson")
    offered = offer_a_gigabyte(server, asked, key)
    assert offered.answer.startswith(b"HTTP/1.1 413 ")
    assert b"\r\nconnection: close\r\n" in offered.answer.lower()
    assert b'"code":"body_too_large"' in offered.answer
    assert offered.before_answer < limit + IN_FLIGHT
    assert offered.sent < limit + 2 * IN_FLIGHT  # it hung up; nobody took the rest


@pytest.mark.parametrize(("path", "status"), [("/v1/jobs", 405), ("/nowhere", 404)])
def test_a_gigabyte_that_nobody_reads_is_cut_off(
    sqlite: Path, key: str, path: str, status: int
) -> None:
    """However long the server would wait for somebody slow."""
    with served(PRECISION_BODY_PATIENCE_S="60") as server:
        offered = offer_a_gigabyte(server, head("chunked", path), key)
    assert offered.answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert offered.before_answer < IN_FLIGHT
    assert offered.sent < MAX_UNREAD_BYTES + 2 * IN_FLIGHT


def offer_a_gigabyte(server: Served, asked: bytes, key: str) -> Offered:
    """Ask with a body in chunks. The server stays small, and serves the next."""
    at_rest = server.memory()
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    with server.connect() as connection:
        signed = f"Host: x\r\nAuthorization: Bearer {key}".encode()
        connection.sendall(asked.replace(b"Host: x", signed))
        offered = offer(connection, chunk, GIB)
        assert server.memory() - at_rest < MEMORY
    assert server.get("/livez").status_code == 200
    return offered


def test_a_million_tiny_parts_hold_nobody_up(server: Served, key: str) -> None:
    at_rest, longest_s = server.memory(), 0.0
    with server.connect() as connection:
        request = head("chunked").replace(
            b"Host: x",
            f"Host: x\r\nConnection: close\r\nAuthorization: Bearer {key}".encode(),
        )
        connection.sendall(request)
        for _ in range(20):
            connection.sendall(b"1\r\n{\r\n" * 50_000)
            began = time.monotonic()
            assert server.get("/livez").status_code == 200
            longest_s = max(longest_s, time.monotonic() - began)
        connection.sendall(b"0\r\n\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"malformed_json"' in answer
    assert longest_s < 10  # a second where the processor is ours
    assert server.memory() - at_rest < MEMORY


def test_a_megabyte_of_headers_is_refused(server: Served) -> None:
    at_rest = server.memory()
    with server.connect() as connection:
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: x\r\n")
        push(connection, b"X-Long: " + b"x" * 4000 + b"\r\n", 1 << 20)
        answer = read_all(connection)
    assert answer.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")) or answer == b""
    assert server.memory() - at_rest < MEMORY
    assert server.get("/livez").status_code == 200


@pytest.mark.parametrize(
    "sent", [b"", b"GET /livez HTT", b"GET /livez HTTP/1.1\r\nA: "]
)
def test_who_does_not_finish_the_headers_is_cut_off(
    server: Served, sent: bytes
) -> None:
    began = time.monotonic()
    with server.connect() as connection:
        connection.sendall(sent)
        connection.settimeout(0.1)
        while time.monotonic() - began < 30:
            try:
                if sent:
                    connection.sendall(b"x")  # dribbling does not help
                assert connection.recv(1) == b""
                break
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
    assert PATIENCE_S / 2 < time.monotonic() - began < 10


def test_a_body_that_does_not_come_is_a_problem(server: Served, key: str) -> None:
    with server.connect() as connection:
        request = head(1000).replace(
            b"Host: x", f"Host: x\r\nAuthorization: Bearer {key}".encode()
        )
        connection.sendall(request + b"{")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b'"code":"request_timeout"' in answer


def test_500_slow_clients_hold_nobody_up(server: Served) -> None:
    with ExitStack() as opened:
        for _ in range(500):
            connection = opened.enter_context(server.connect())
            connection.sendall(b"POST /v1/optimize HTTP/1.1\r\nHost: ")
        began = time.monotonic()
        assert server.get("/livez").status_code == 200
        assert time.monotonic() - began < 5


def test_a_request_after_a_pause_is_served(server: Served) -> None:
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/livez").status_code == 200
        time.sleep(2 * PATIENCE_S)
        assert client.get("/livez").status_code == 200


def test_metrics_have_a_port_of_their_own(
    sqlite: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("PRECISION_METRICS_PORT", str(port))
    with served() as running:
        assert running.get("/metrics").status_code == 404
        beside = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False)
        assert beside.status_code == 200
        assert "precision_build_info" in beside.text
    assert os.environ["PRECISION_METRICS_PORT"] == str(port)
