"""Who sent a request, and a memory of who was proven moments ago."""

import hashlib
import threading
import time
from dataclasses import dataclass
from datetime import datetime

from api.models import now

KEPT_S = 5.0  # so long may a revoked key still work in a process that knew it
MAX_KEPT = 10_000


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request, proven by a key or by a portal's token."""

    tenant_id: str
    actor: str  # a key's id, or "oidc:" and a token's subject
    kind: str  # personal, service
    scopes: frozenset[str]  # all that the words on the key stand for
    api_version: str | None = None  # that the key is for; None: the newest


@dataclass(frozen=True, slots=True)
class Proof:
    """A caller, and what else was learned with the proof."""

    caller: Caller
    expires_at: datetime | None
    stale: bool = False  # `last_used_at` of the key should be written again


class Verified:
    """Callers proven in the last seconds, by the digest of what they showed.

    What was good once is remembered after that as well: the attempts of others from
    the same address must not lock it out.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[bytes, tuple[float, Caller]] = {}

    def get(self, token: str) -> Caller | None:
        """Return who showed this token moments ago."""
        kept = self._kept.get(_digest(token))
        return kept[1] if kept and time.monotonic() < kept[0] else None

    def knows(self, token: str) -> bool:
        """Say whether this token was ever good."""
        return _digest(token) in self._kept

    def put(self, token: str, proof: Proof) -> None:
        """Remember a proof for `KEPT_S`, and no longer than it is good."""
        good_s = KEPT_S
        if proof.expires_at is not None:
            good_s = min(good_s, (proof.expires_at - now()).total_seconds())
        with self._lock:
            self._kept.pop(_digest(token), None)  # so that it is the youngest
            while len(self._kept) >= MAX_KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[_digest(token)] = time.monotonic() + good_s, proof.caller

    def clear(self) -> None:
        """Forget all: a key has changed."""
        with self._lock:
            self._kept.clear()


verified = Verified()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
