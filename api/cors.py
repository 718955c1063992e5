"""Pages of other origins that may call the API from a browser: those in the settings.

An origin is compared as a whole, never by a part of it. Who calls shows a key in
`Authorization`: no answer allows cookies.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.settings import settings

METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE"
READ = (  # what scripts may read of an answer, beside its body
    "API-Version",
    "Accept-Ranges",
    "Content-Disposition",
    "Content-Length",
    "Content-Range",
    "ETag",
    "Idempotency-Expires",
    "Idempotency-Replayed",
    "Location",
    "Preference-Applied",
    "RateLimit",
    "RateLimit-Policy",
    "Repr-Digest",
    "Retry-After",
    "X-Request-Id",
)
SENT = (  # what they may send
    "API-Version",
    "Accept",
    "Authorization",
    "Content-Digest",
    "Content-Type",
    "Idempotency-Key",
    "If-Match",
    "If-None-Match",
    "If-Range",
    "Last-Event-ID",
    "Prefer",
    "Range",
    "X-Request-Id",
    "traceparent",
)
MAX_AGE_S = 600  # so long a browser remembers what it was allowed


class Cors:
    """Tell browsers which pages may read an answer; it is given to all alike."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        origins = settings().cors_origins
        if scope["type"] != "http" or not origins:
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope)
        origin = asked.get("origin")
        told = _told(origin if origin in origins else None, scope["method"])

        async def tell(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.add_vary_header("Origin")  # also where another one asks
                headers.update(told)
            await send(message)

        await self.app(scope, receive, tell)


def _told(origin: str | None, method: str) -> dict[str, str]:
    if origin is None:
        return {}
    told = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": ", ".join(READ),
    }
    if method == "OPTIONS":
        told["Access-Control-Allow-Methods"] = METHODS
        told["Access-Control-Allow-Headers"] = ", ".join(SENT)
        told["Access-Control-Max-Age"] = str(MAX_AGE_S)
    return told
