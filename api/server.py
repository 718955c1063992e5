"""The HTTP server: `python -m api.server --host 0.0.0.0 --port 8080`.

uvicorn, with an end to its patience. A client that takes minutes over its headers, or
goes on sending a body that was answered long ago or has no end, is cut off here: the
application never sees it.
"""

import argparse
import asyncio
import socket
from collections.abc import Sequence

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from api.settings import settings

MAX_INCOMPLETE_BYTES = 64 * 1024  # of a request line and headers; more is 400
MAX_UNREAD_BYTES = 64 * 2**20  # of a body that was answered; no part is longer


class Patient(H11Protocol):
    """Waits so long for headers, and for the rest of what is answered, and no longer."""

    _waiting: asyncio.TimerHandle | None = None
    _unread_bytes = 0  # that came since the answer: nobody reads them

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no longer."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait until there is a request to serve; dribbling does not prolong it."""
        super().data_received(data)
        if self._serves():
            self._stop()
        elif self._waiting is None:
            self._wait()
        self._count_unread(len(data))

    def on_response_complete(self) -> None:
        """Let the pause between two requests be: uvicorn has a limit for that."""
        self._stop()
        super().on_response_complete()

    def _count_unread(self, size: int) -> None:
        """Hang up where an answered body goes on and on; some is left to be read, for a
        client that looks for an answer only when it has sent all.
        """
        unread = self.conn.their_state is h11.SEND_BODY and not self._serves()
        self._unread_bytes = self._unread_bytes + size if unread else 0
        if self._unread_bytes > MAX_UNREAD_BYTES:
            self.transport.close()

    def _serves(self) -> bool:
        return getattr(self.cycle, "response_complete", True) is False

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(settings().body_patience_s, self._give_up)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _give_up(self) -> None:
        self._waiting = None
        if not self._serves():
            self.transport.close()


def run(sockets: Sequence[socket.socket], stop_s: int, proxied: bool = False) -> None:
    """Serve until a signal; answers that are open then have `stop_s` to end."""
    config = uvicorn.Config(
        "api.app:create_app",
        factory=True,
        http=Patient,
        h11_max_incomplete_event_size=MAX_INCOMPLETE_BYTES,
        server_header=False,
        proxy_headers=proxied,
        timeout_graceful_shutdown=stop_s,
    )
    uvicorn.Server(config).run(sockets=list(sockets))


def _main() -> None:
    parser = argparse.ArgumentParser(prog="python -m api.server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--stop-seconds", type=int, default=20)
    parser.add_argument(
        "--proxied",
        action="store_true",
        help="believe X-Forwarded-For and -Proto of FORWARDED_ALLOW_IPS",
    )
    asked = parser.parse_args()
    ports = [asked.port, settings().metrics_port]
    sockets = [_listener(asked.host, port) for port in ports if port]
    run(sockets, asked.stop_seconds, asked.proxied)


def _listener(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=512)


if __name__ == "__main__":
    _main()
