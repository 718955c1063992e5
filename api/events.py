"""A job's events as a stream: server-sent events that resume where they were cut.

Polling the page `events?after=` is the equal of this, for who cannot hold a stream.
"""

import asyncio
import json
from collections.abc import AsyncIterator

from starlette.concurrency import run_in_threadpool
from starlette.responses import StreamingResponse

from api import db, jobs, views
from api.models import FINAL
from api.settings import settings

BATCH = 100
RETRY_MS = 2_000
HEADERS = {
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would hold events back
}


def response(tenant_id: str, job_id: str, after: int) -> StreamingResponse:
    """Return the stream of events with `seq` > `after`; it ends after the final one."""
    return StreamingResponse(
        stream(tenant_id, job_id, after),
        media_type="text/event-stream",
        headers=HEADERS,
    )


async def stream(tenant_id: str, job_id: str, after: int) -> AsyncIterator[str]:
    """Yield lines of the protocol. No session is held between two looks."""
    yield f"retry: {RETRY_MS}\n\n"
    silent_s = 0.0
    while True:
        found, over = await run_in_threadpool(look, tenant_id, job_id, after)
        for event in found:
            after = event["seq"]
            yield f"id: {after}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"
        if over:
            return
        silent_s = 0.0 if found else silent_s + settings().stream_poll_s
        if silent_s >= settings().stream_keepalive_s:
            silent_s = 0.0
            yield ": keep-alive\n\n"
        await asyncio.sleep(settings().stream_poll_s)


def look(tenant_id: str, job_id: str, after: int) -> tuple[list[views.Json], bool]:
    """Return the next events, and whether there will be no others after them."""
    with db.reading() as session:
        job = jobs.get(session, tenant_id, job_id)
        rows = jobs.events(session, tenant_id, job_id, after, BATCH)
        last = rows[-1].seq if rows else after
        over = job.status in FINAL and last >= job.last_seq
        return [views.event(row) for row in rows], over
