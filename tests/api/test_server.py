"""Clients that send too much, too slowly, or nothing at all, to the real server."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.api.serving import Served, served

GIB = 1 << 30
MEMORY = 64 << 20  # more than this beyond what the server has at rest is too much
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


def test_a_gigabyte_in_chunks_takes_no_memory(server: Served, key: str) -> None:
    at_rest = server.memory()
    chunk = b"10000\r\n" + b" " * 65_536 + b"\r\n"
    with server.connect() as connection:
        request = head("chunked").replace(
            b"Host: x", f"Host: x\r\nAuthorization: Bearer {key}".encode()
        )
        connection.sendall(request)
        push(connection, chunk, GIB // 4)  # a quarter is enough to see it grow
        assert server.memory() - at_rest < MEMORY
    assert server.get("/livez").status_code == 200


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
