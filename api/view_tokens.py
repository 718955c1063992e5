"""View tokens: signed, short-lived, for one job and for nothing but looking at it.

A portal makes one with its own key, and gives it to a browser that has none: in a
frame, where no cookie of ours arrives. One for `badge` shows a state in three words
and nothing else, so it may live as long as a page that holds the picture.
"""

import base64
import hmac
import json
import time
from dataclasses import dataclass
from enum import StrEnum

from api import secret
from api.callers import Caller
from api.errors import Unauthenticated

PREFIX = "pv_"
MAX_TOKEN = 500  # characters


class Use(StrEnum):
    """What a token opens."""

    VIEW = "view"  # the card of the job, and its badge
    BADGE = "badge"


LONGEST_S = {Use.VIEW: 900, Use.BADGE: 90 * 86_400}


@dataclass(frozen=True, slots=True)
class View:
    """What a token says."""

    tenant_id: str
    job_id: str
    use: Use
    ends_at: int  # Unix time

    @property
    def caller(self) -> Caller:
        """Return whom it stands for: somebody who may do nothing by any scope."""
        return Caller(self.tenant_id, f"view:{self.job_id}", "personal", frozenset())


def make(view: View) -> str:
    """Return the token."""
    said = {"t": view.tenant_id, "j": view.job_id, "u": view.use, "e": view.ends_at}
    payload = _encoded(json.dumps(said, separators=(",", ":")).encode())
    return f"{PREFIX}{payload}.{_mark(payload)}"


def read(token: str, job_id: str, use: Use = Use.BADGE) -> View:
    """Return what a token says, if it opens this of this job.

    Raises Unauthenticated: forged, over, of another job, or for a badge alone.
    """
    payload, _, mark = token.removeprefix(PREFIX).partition(".")
    if not token.startswith(PREFIX) or len(token) > MAX_TOKEN:
        raise Unauthenticated()
    if not hmac.compare_digest(mark.encode(), _mark(payload).encode()):
        raise Unauthenticated()
    said = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    found = View(said["t"], said["j"], Use(said["u"]), said["e"])
    opens = found.use is use or found.use is Use.VIEW
    if not opens or found.job_id != job_id or found.ends_at <= time.time():
        raise Unauthenticated()
    return found


def _mark(payload: str) -> str:
    return _encoded(secret.sign("view token", payload.encode()))


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
