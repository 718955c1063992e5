"""Delivers webhooks, beside the sweeper, in the parent of each worker.

Any number of postmen share the outbox. Each letter goes out in a thread of its own, so
that a receiver who takes ten seconds holds up nobody but himself.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from urllib.parse import urlsplit

from sqlalchemy.orm import Session
from standardwebhooks import Webhook

from api import outbox, tracing, transitions, webhooks
from api.db import reading, transaction
from api.errors import NotFound
from api.outbox import Attempt, Letter
from api.settings import settings
from api.tracing import Span
from workers import outgoing
from workers.outgoing import NotSent

logger = logging.getLogger(__name__)

AT_ONCE = 8  # letters on the way
RETRY_S = (  # after each attempt that failed, as Standard Webhooks asks
    5.0,
    5 * 60.0,
    30 * 60.0,
    2 * 3600.0,
    5 * 3600.0,
    10 * 3600.0,
    14 * 3600.0,
    20 * 3600.0,
    24 * 3600.0,
)
JITTER = 0.1  # of each wait, so that what failed together does not come back together

Clock = Callable[[Session], datetime]
Post = Callable[[str, bytes, dict[str, str]], int]


def start() -> None:
    """Deliver from now on, in a thread that ends with the process."""
    postman = Postman()
    threading.Thread(target=postman.run, name="postman", daemon=True).start()


class Postman:
    """Takes what is due, sends it and writes down what came of it."""

    def __init__(
        self, clock: Clock = transitions.now, post: Post = outgoing.post
    ) -> None:
        self._clock = clock
        self._post = post
        self._lock = threading.Lock()
        self._on_the_way: dict[str, Letter] = {}  # by endpoint
        self._returned = threading.Event()

    def run(self) -> None:
        """Deliver for ever. A database that is away comes back."""
        while True:
            self._returned.clear()
            try:
                self.round()
            except Exception:
                logger.exception("no webhooks were taken; it will be tried again")
            # Who comes back makes room, and his endpoint may have more.
            self._returned.wait(settings().webhook_poll_s)

    def round(self) -> list[threading.Thread]:
        """Take as many letters as there are free hands, and send each off."""
        with self._lock:
            busy = dict(self._on_the_way)
        if len(busy) >= AT_ONCE or not self._anything():
            return []
        with transaction() as session:
            at = self._clock(session)
            tenants = [letter.tenant_id for letter in busy.values()]
            free = AT_ONCE - len(busy)
            letters = outbox.claim(session, at, free, list(busy), tenants)
        return [self._send_off(letter) for letter in letters]

    def deliver(self, letter: Letter) -> None:
        """Send one letter, and write down what came of it."""
        attempt = self._attempt(letter)
        with transaction() as session, suppress(NotFound):  # it was deleted
            endpoint = webhooks.hold(session, letter.tenant_id, letter.endpoint_id)
            at = self._clock(session)
            again_at = retry_at(letter.attempt, at)
            if outbox.record(session, letter, attempt, at, again_at):
                webhooks.note(session, endpoint, letter, attempt, at)

    def _anything(self) -> bool:
        """Whether something is due. Looking takes no lock; taking does."""
        with reading() as session:
            return outbox.waiting(session, self._clock(session)).letters > 0

    def _send_off(self, letter: Letter) -> threading.Thread:
        with self._lock:
            self._on_the_way[letter.endpoint_id] = letter
        name = f"webhook {letter.id}"
        carrier = threading.Thread(
            target=self._carry, args=(letter,), name=name, daemon=True
        )
        carrier.start()
        return carrier

    def _carry(self, letter: Letter) -> None:
        try:
            self.deliver(letter)
        except Exception:  # it is taken again when the claim has run out
            logger.exception("what came of webhook %s is not written", letter.id)
        finally:
            with self._lock:
                del self._on_the_way[letter.endpoint_id]
            self._returned.set()

    def _attempt(self, letter: Letter) -> Attempt:
        began = time.monotonic()
        status, error = None, None
        with tracing.span("POST", "client") as span:
            sent = headers(letter) | span.headers
            try:
                status = self._post(letter.url, letter.payload.encode(), sent)
            except NotSent as reason:
                error = str(reason)
            _describe(span, letter, status)
        attempt = Attempt(status, error or _meaning(status), time.monotonic() - began)
        logger.info("webhook %s: %s", letter.id, attempt.error or attempt.status)
        return attempt


def retry_at(attempt: int, at: datetime) -> datetime | None:
    """Return when to try again after the attempt of this number. None: never."""
    if attempt > len(RETRY_S):
        return None
    wait_s = RETRY_S[attempt - 1] * random.uniform(1 - JITTER, 1 + JITTER)
    return at + timedelta(seconds=wait_s)


def headers(letter: Letter) -> dict[str, str]:
    """Return the headers of an attempt, signed by each secret that is valid.

    The library reads a time of another zone as if it were UTC: ours is in UTC.
    """
    at = letter.at.astimezone(UTC)
    signatures = [
        Webhook(secret).sign(letter.message_id, at, letter.payload)
        for secret in letter.secrets
    ]
    return {
        "Content-Type": "application/json",
        "User-Agent": _agent(),
        "webhook-id": letter.message_id,
        "webhook-timestamp": str(int(at.timestamp())),
        "webhook-signature": " ".join(signatures),
    }


def _describe(span: Span, letter: Letter, status: int | None) -> None:
    """Say what came of it. The rest of the address may hold a secret."""
    span.say(
        {
            "http.request.method": "POST",
            "http.response.status_code": status,
            "server.address": urlsplit(letter.url).hostname,
            "precision.webhook_id": letter.message_id,
            "precision.attempt": letter.attempt,
        }
    )
    if status is None or not 200 <= status < 300:
        span.failed("not_sent" if status is None else str(status))


def _meaning(status: int | None) -> str | None:
    if status is None or 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return f"{status} is a redirect, and those are not followed"
    return f"the receiver answered {status}"


@cache
def _agent() -> str:
    try:
        return f"precision/{version('precision')}"
    except PackageNotFoundError:  # run from a checkout that is only on the path
        return "precision"
