"""The version of the API by its date: each answer names it.

A key is made for one, the newest there is unless somebody says which, and a request may
ask for another.
"""

from typing import Literal

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from api import problems
from api.errors import UnknownVersion

Version = Literal["2026-11-01"]
CURRENT: Version = "2026-11-01"
SERVED: tuple[str, ...] = (CURRENT,)
HEADER = "API-Version"


def answering(asked: str | None, pinned: str | None) -> str:
    """Return the version that answers: what the request asks for, or its key's.

    Raises UnknownVersion where the key's is not served any more.
    """
    if asked is not None:  # `Versions` has refused what is not served
        return asked.strip()
    if pinned not in (None, *SERVED):
        raise UnknownVersion(str(pinned), CURRENT)
    return pinned or CURRENT


class Versions:
    """Refuse a request that is written for a version which is not served."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        asked = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if asked is None or asked.strip() in SERVED:
            await self.app(scope, receive, send)
            return
        refusal = UnknownVersion(asked, CURRENT)
        await problems.refuse(scope, receive, send, refusal)
