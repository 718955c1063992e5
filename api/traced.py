"""A span for each request, where there are spans.

Plain ASGI, so that streams pass through untouched; not there while spans are off.
FastAPI's own spans stay off: they have messages of errors, which may be anybody's data.
"""

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import ids, tracing
from api.metrics import METHODS
from api.middleware import QUIET
from api.orders import traceparent
from api.tracing import Span

JOB = re.compile(rf"job_{ids.PATTERN}")


class Traced:
    """Make a span of each request but those that are asked all day long."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; who makes a job of it finds the span's place in `state`."""
        if scope["type"] != "http" or scope["path"] in QUIET:
            await self.app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "other"
        parent = traceparent(Headers(scope=scope).get("traceparent"))
        with tracing.span(method, "server", parent) as span:
            scope.setdefault("state", {})["traceparent"] = span.traceparent
            sent = _Seen(send)
            try:
                await self.app(scope, receive, sent)
            finally:
                _describe(span, scope, method, sent.status)


class _Seen:
    """Send, and remember the status; 0: nothing was sent."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.status = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self.send(message)


def _describe(span: Span, scope: Scope, method: str, status: int) -> None:
    """Say what is known at the end: the template of the path, never what is in it."""
    route, state = getattr(scope.get("route"), "path", None), scope["state"]
    if route is not None:
        span.name(f"{method} {route}")
    named = scope.get("path_params", {}).get("job_id", "")
    span.say(
        {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status or None,
            "precision.request_id": state.get("request_id"),
            "precision.job_id": named if JOB.fullmatch(named) else state.get("job_id"),
        }
    )
    if status >= 500:
        span.failed(str(status))
