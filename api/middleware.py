"""What surrounds every request: an id, a log line, a time, an answer.

Plain ASGI, so that streams pass through untouched.
"""

import re
import time
from collections.abc import Iterator
from typing import Any

import structlog
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import ids, problems, rates, versions
from api.errors import APIError
from api.metrics import Metrics

REQUEST_ID = re.compile(r"[a-zA-Z0-9._-]{1,128}")
QUIET = frozenset({"/livez", "/readyz", "/healthz", "/metrics"})  # asked all day long

SAFE = (  # of every answer that does not say otherwise; as ASGI has headers
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"default-src 'none'; frame-ancestors 'none'"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
)
# A year; subdomains are somebody else's.
BY_TLS = (b"strict-transport-security", b"max-age=31536000")

log = structlog.get_logger()


class Envelope:
    """Give each request an id and each answer a time, also where everything fails."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else ids.new("req")
        scope.setdefault("state", {})["request_id"] = request_id
        sent = _Sent(send, scope["state"], scope.get("scheme") == "https")
        began = time.perf_counter()
        with structlog.contextvars.bound_contextvars(request_id=request_id):
            try:
                await self.app(scope, receive, sent)
            except Exception:
                log.exception("request_failed", path=scope["path"])
                if sent.status:
                    raise  # half an answer is out: only a broken connection tells
                detail = "something is wrong on our side; the log has it by this id"
                answer = problems.response(scope["path"], request_id, APIError(detail))
                await answer(scope, receive, sent)
            finally:
                self._note(scope, sent.status, time.perf_counter() - began)

    def _note(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "unmatched")
        self.metrics.note_request(route, scope["method"], status, seconds)
        if scope["path"] not in QUIET:
            log.info(
                "request",
                method=scope["method"],
                path=scope["path"],
                status=status,
                duration_s=round(seconds, 4),
            )


class _Sent:
    """Send, with headers that every answer has, and remember the status; 0: none yet."""

    def __init__(self, send: Send, state: dict[str, Any], by_tls: bool) -> None:
        self.send = send
        self.state = state
        self.by_tls = by_tls
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), *self._more(message)]
        await self.send(message)

    def _more(self, message: Message) -> Iterator[tuple[bytes, bytes]]:
        said = {name for name, _ in message.get("headers", ())}
        yield b"x-request-id", self.state["request_id"].encode()
        yield b"api-version", self.state.get("api_version", versions.CURRENT).encode()
        yield from (header for header in SAFE if header[0] not in said)
        if self.by_tls:
            yield BY_TLS
        if counted := self.state.get("rates"):
            yield from rates.headers(counted)
