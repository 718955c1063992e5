"""The API's own server in a process of its own, on the test's database."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.service import eventually


@dataclass(frozen=True)
class Served:
    """A running `python -m api.server`."""

    port: int
    pid: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, trust_env=False, timeout=30)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def memory(self) -> int:
        """Return the bytes that the server has in memory."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def answers(self) -> bool:
        try:
            return self.get("/readyz").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def served(**settings: str) -> Iterator[Served]:
    """Run the server with these settings beside those of the test."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "api.server", "--port", str(port)]
    with subprocess.Popen(command, env={**os.environ, **settings}) as process:
        running = Served(port, process.pid)
        try:
            assert eventually(running.answers, 120)
            yield running
        finally:
            process.terminate()
