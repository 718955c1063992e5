"""A job's events as a stream: server-sent events that resume where they were cut.

Polling the page `events?after=` is the equal of this, for who cannot hold a stream.
"""

import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from api import db, jobs, owners, views
from api.errors import ConcurrencyLimit
from api.models import FINAL
from api.owners import Mark
from api.settings import settings
from api.watch import Watcher

BATCH = 100
RETRY_MS = 2_000
HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


class Look(NamedTuple):
    """The next events of a job, and what tells whether there are others."""

    found: list[views.Json]
    mark: Mark
    over: bool  # nothing will follow

    @property
    def last(self) -> int:
        """The place of the last event in sight; 0: there is none."""
        return int(self.found[-1]["seq"]) if self.found else 0


class Streams:
    """How many streams each key holds open in this process."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    def enter(self, who: str) -> None:
        """Let one more in. Raises ConcurrencyLimit."""
        limit = settings().streams_per_key
        if self._open[who] >= limit:
            raise ConcurrencyLimit("event streams", limit)
        self._open[who] += 1

    def leave(self, who: str) -> None:
        """Say that one has ended."""
        self._open[who] -= 1
        if not self._open[who]:
            del self._open[who]

    def total(self) -> int:
        """Return how many are open."""
        return self._open.total()


class EventStream(StreamingResponse):
    """A stream that gives its place back however it ends."""

    def __init__(self, streams: Streams, who: str, lines: AsyncIterator[str]) -> None:
        super().__init__(lines, media_type="text/event-stream", headers=HEADERS)
        self._streams, self._who = streams, who
        streams.enter(who)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams.leave(self._who)


async def lines(
    watcher: Watcher, tenant_id: str, job_id: str, after: int, first: Look
) -> AsyncIterator[str]:
    """Yield the protocol's lines for events with `seq` > `after`, up to the last one.

    Between two looks nothing is held, and nobody looks before the job has changed.
    """
    yield f"retry: {RETRY_MS}\n\n"
    seen, said_at = first, time.monotonic()
    while True:
        for event in seen.found:
            yield f"id: {event['seq']}\nevent: {event['type']}\n"
            yield f"data: {json.dumps(event)}\n\n"
        if seen.found:
            after, said_at = seen.last, time.monotonic()
        if seen.over or watcher.closing:
            return
        if after >= seen.mark.last_seq:
            silent_s = time.monotonic() - said_at
            patience_s = max(settings().stream_keepalive_s - silent_s, 0.001)
            if not await watcher.changed(job_id, seen.mark, patience_s):
                said_at = time.monotonic()
                yield ": keep-alive\n\n"
                seen = seen._replace(found=[])
                continue
        seen = await run_in_threadpool(look, tenant_id, job_id, after)


def page(tenant_id: str, job_id: str, after: int, limit: int) -> views.EventPage:
    """Return events with `seq` > `after`, and where the next page begins."""
    with db.reading() as session:
        rows = jobs.events(session, tenant_id, job_id, after, limit + 1)
    found = [views.Event(**views.event(row)) for row in rows[:limit]]
    more = len(rows) > limit
    cursor = str(found[-1].seq) if more else None
    return views.EventPage(data=found, has_more=more, next_cursor=cursor)


def look(tenant_id: str, job_id: str, after: int) -> Look:
    """Return the next events, and whether there will be no others after them."""
    with db.reading() as session:
        job = jobs.get(session, tenant_id, job_id)
        rows = jobs.events(session, tenant_id, job_id, after, BATCH)
        last = rows[-1].seq if rows else after
        over = job.status in FINAL and last >= job.last_seq
        return Look([views.event(row) for row in rows], owners.mark(job), over)
