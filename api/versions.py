"""The version of the API by its date: each answer names it, and a request may pin it."""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api import problems
from api.errors import UnknownVersion

CURRENT = "2026-11-01"
HEADER = "API-Version"


class Versions:
    """Refuse a request that is written for a version which is not served."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        asked = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if asked is None or asked.strip() == CURRENT:
            await self.app(scope, receive, send)
            return
        refusal = UnknownVersion(asked, CURRENT)
        await problems.refuse(scope, receive, send, refusal)
