"""A job as it is answered: with an ETag, at once or when it has changed."""

import hashlib
import time
from dataclasses import dataclass

from fastapi import Response
from starlette.concurrency import run_in_threadpool

from api import db, jobs, owners, views
from api.models import FINAL
from api.owners import Mark
from api.places import places
from api.watch import Watcher


@dataclass(frozen=True, slots=True)
class Look:
    """A job at one moment."""

    text: bytes  # JSON
    mark: Mark
    etag: str
    poll_after_s: int | None

    @property
    def final(self) -> bool:
        """Nothing will change but by a delete."""
        return self.mark.status in FINAL

    def unchanged(self, if_none_match: str | None) -> bool:
        """Whether this is what the caller has, compared weakly (RFC 9110 §8.8.3.2)."""
        tags = [t.strip().removeprefix("W/") for t in (if_none_match or "").split(",")]
        return "*" in tags or self.etag.removeprefix("W/") in tags

    def response(self, status: int = 200) -> Response:
        """Return the answer; 304 has no body."""
        headers = {"ETag": self.etag, "Cache-Control": "private, no-cache"}
        if self.poll_after_s is not None:
            headers["Retry-After"] = str(self.poll_after_s)
        text = b"" if status == 304 else self.text
        return Response(text, status, headers, "application/json")


def look(tenant_id: str, job_id: str) -> Look:
    """Return the tenant's job as it is now. Raises NotFound."""
    with db.glancing() as session:
        row = jobs.get(session, tenant_id, job_id)
        view = views.job(row, places().of(session, row))
    text = view.model_dump_json().encode()
    etag = f'W/"{hashlib.sha256(text).hexdigest()[:24]}"'
    return Look(text, owners.mark(row), etag, view.poll_after_seconds)


async def change(
    watcher: Watcher, tenant_id: str, job_id: str, wait_s: float, known: str | None
) -> Look:
    """Return the job once it is not as the caller knows it, has ended, or time is up.

    `known` is the caller's `If-None-Match`; None: as it is at first.
    """
    until = time.monotonic() + wait_s
    seen = await run_in_threadpool(look, tenant_id, job_id)
    known = known or seen.etag
    while not seen.final and seen.unchanged(known):
        left_s = until - time.monotonic()
        if left_s <= 0 or not await watcher.changed(job_id, seen.mark, left_s):
            break
        seen = await run_in_threadpool(look, tenant_id, job_id)
    return seen


async def end(watcher: Watcher, tenant_id: str, job_id: str, wait_s: float) -> Look:
    """Return the job once it has ended, or time is up."""
    until = time.monotonic() + wait_s
    seen = await run_in_threadpool(look, tenant_id, job_id)
    while not seen.final and (left_s := until - time.monotonic()) > 0:
        if not await watcher.changed(job_id, seen.mark, left_s):
            break
        seen = await run_in_threadpool(look, tenant_id, job_id)
    return seen
