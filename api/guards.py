"""What is refused before anything is read: too much, too slow, or not meant for us.

Plain ASGI, so that streams pass through untouched. What happens before there are
headers to look at is in `api.server`.

* APIError
  * UnknownHost      400  unknown_host
  * HeadersTooLarge  431  headers_too_large
"""

import asyncio
import time
from collections.abc import Callable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api import maintenance, problems
from api.errors import APIError, BodyTooLarge, NotFound
from api.settings import settings
from api.upload_errors import RequestTimeout

PROBES = frozenset({"/livez", "/readyz", "/healthz", "/metrics"})  # asked by address
MIN_BYTES_S = 1024  # a body that comes more slowly than this holds us up


class UnknownHost(APIError):
    """The request is for a host that we are not."""

    status = 400
    code = "unknown_host"
    title = "No such host"


class HeadersTooLarge(APIError):
    """The headers are longer than any request needs."""

    status = 431
    code = "headers_too_large"
    title = "The headers are too large"


class Doors:
    """Let in what calls us by our name, at the right port, with headers of a size; while
    the operator works on the service, only who reads.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        refusal = (
            _too_large(scope)
            or _wrong_port(scope)
            or _wrong_host(scope)
            or maintenance.refusal(scope)
        )
        if refusal is not None:
            await problems.refuse(scope, receive, send, refusal)
        else:
            await self.app(scope, receive, send)


class Bodies:
    """Refuse a body by its length, or, where it comes in chunks, by counting; and one
    that does not come.
    """

    def __init__(self, app: ASGIApp, limits: dict[str, int]) -> None:
        """Take limits in bytes by path prefix; the longest prefix that fits counts."""
        self.app = app
        self.limits = sorted(limits.items(), key=lambda item: -len(item[0]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request. Raises BodyTooLarge, or RequestTimeout, where the body is read."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = next(n for prefix, n in self.limits if scope["path"].startswith(prefix))
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > limit:
            await problems.refuse(scope, receive, send, BodyTooLarge(limit))
        else:
            await self.app(scope, _measured(receive, limit), send)


def _measured(receive: Receive, limit: int) -> Receive:
    """Return `receive` with an eye on how much comes, and how fast."""
    began, seen, over = time.monotonic(), 0, False

    async def measured() -> Message:
        nonlocal seen, over
        if over:  # what else may come is that the client leaves
            return await receive()
        message = await _within(receive, _patience_s(time.monotonic() - began, seen))
        seen += len(message.get("body", b""))
        if seen > limit:
            raise BodyTooLarge(limit)
        over = not message.get("more_body", False)
        return message

    return measured


def _patience_s(passed_s: float, seen: int) -> float:
    """Return how long the next bytes may take: less for who was slow until now."""
    grace_s = settings().body_patience_s
    return min(grace_s, max(grace_s + seen / MIN_BYTES_S - passed_s, 0.0))


async def _within(receive: Receive, seconds: float) -> Message:
    try:
        async with asyncio.timeout(seconds):
            return await receive()
    except TimeoutError:
        raise RequestTimeout(
            f"after {settings().body_patience_s:g} s a body has to come at {MIN_BYTES_S} "
            "bytes a second or faster; send it again",
            headers={"Connection": "close"},
        ) from None


def _too_large(scope: Scope) -> APIError | None:
    limit = settings().max_headers_bytes
    total = sum(len(name) + len(value) for name, value in scope["headers"])
    total += len(scope.get("raw_path") or b"") + len(scope["query_string"])
    if total <= limit:
        return None
    detail = f"path and headers have {total} bytes, limit {limit}"
    return HeadersTooLarge(detail, limit_bytes=limit)


def _wrong_port(scope: Scope) -> APIError | None:
    """Metrics alone are at their port, and nowhere else."""
    port = settings().metrics_port
    if not port or not scope.get("server"):
        return None
    for_metrics = scope["server"][1] == port
    asks_metrics = scope["path"] == "/metrics"
    return None if for_metrics == asks_metrics else NotFound("Not found")


def _wrong_host(scope: Scope) -> APIError | None:
    allowed = settings().allowed_hosts
    if not allowed or scope["path"] in PROBES:
        return None
    said = Headers(scope=scope).get("host", "").lower()
    host = said.rsplit(":", 1)[0] if not said.endswith("]") else said
    if any(map(_names(host), allowed)):
        return None
    return UnknownHost("the Host header names nobody that lives here")


def _names(host: str) -> Callable[[str], bool]:
    def names(pattern: str) -> bool:
        if pattern.startswith("*."):
            return host.endswith(pattern[1:])
        return host == pattern

    return names
