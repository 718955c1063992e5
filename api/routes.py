"""The endpoints of jobs. Each is a few lines: translate, call, translate back."""

import json
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool

from api import (
    audit,
    creations,
    db,
    events,
    jobs,
    owners,
    polls,
    prefer,
    storage,
    views,
)
from api.accept import preferred
from api.access import DB, Caller
from api.errors import Unavailable
from api.filters import METADATA, wanted
from api.idempotency import Answer, Idempotent
from api.models import FINAL
from api.owners import Filter
from api.prefer import MAX_WAIT_S
from api.schemas import OptimizeRequest
from api.strict import StrictRoute

MAX_SEQ = 2**31 - 1
KEPT = ("Location", "Idempotency-Replayed", "Idempotency-Expires")

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["jobs"])

Prefer = Annotated[
    str | None,
    Header(alias="Prefer", description="RFC 7240: `respond-async`, `wait=SECONDS`."),
]


@router.post(
    "/optimize",
    status_code=202,
    response_model=views.JobView,
    responses={
        200: {"model": views.JobView, "description": "It ended while we waited"}
    },
)
async def optimize(
    body: OptimizeRequest,
    once: Idempotent,
    request: Request,
    preference: Prefer = None,
) -> Response:
    """Queue an optimization. Only `model` and `hardware` are required.

    `Prefer: wait=N` holds the answer back for up to 60 seconds, until the job ends.
    """
    made = await creations.create(request, once, body)
    return await _waited(request, once.tenant_id, made, preference)


@router.get("/jobs", openapi_extra=METADATA)
def list_jobs(
    caller: Caller,
    session: DB,
    wanted: Annotated[Filter, Depends(wanted)],
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=200)] = None,
) -> views.JobPage:
    """List jobs, the newest first, without their results. Deleted ones are left out."""
    rows, cursor = owners.page(session, caller.tenant_id, limit, after, wanted)
    found = [views.listed_job(row) for row in rows]
    return views.JobPage(data=found, has_more=cursor is not None, next_cursor=cursor)


@router.get(
    "/jobs/{job_id}",
    response_model=views.JobView,
    responses={304: {"description": "It is still as `If-None-Match` says"}},
)
async def get_job(
    job_id: str,
    caller: Caller,
    request: Request,
    wait: Annotated[
        int | None,
        Query(ge=0, le=MAX_WAIT_S, description="Seconds to wait for a change."),
    ] = None,
    if_none_match: Annotated[str | None, Header()] = None,
    preference: Prefer = None,
) -> Response:
    """Report how far a job got, and its result once it succeeded.

    With `wait`, the answer comes when the job is not as `If-None-Match` says, or as it
    was when the request came; when it ends; or when the time is up.
    """
    asked = prefer.read(preference)
    wait_s = asked.wait_s if wait is None else wait
    seen = await polls.change(
        request.app.state.watcher, caller.tenant_id, job_id, wait_s, if_none_match
    )
    same = if_none_match is not None and seen.unchanged(if_none_match)
    return _applied(seen.response(304 if same else 200), asked.applied)


@router.post(
    "/jobs/{job_id}/cancel",
    status_code=202,
    responses={200: {"model": views.JobView, "description": "It has ended"}},
)
def cancel_job(job_id: str, caller: Caller, response: Response) -> views.JobView:
    """Ask a job to stop. 200 where it has ended, however it did."""
    with db.transaction() as session:
        view = views.job(jobs.cancel(session, caller.tenant_id, job_id))
    response.status_code = 200 if view.status in FINAL else 202
    return view


@router.post(
    "/jobs/{job_id}/retry",
    status_code=202,
    response_model=views.JobView,
    responses={
        200: {"model": views.JobView, "description": "It ended while we waited"}
    },
)
async def retry_job(
    job_id: str,
    once: Idempotent,
    request: Request,
    preference: Prefer = None,
) -> Response:
    """Queue the request of a job that has ended once more, as `retried_from` it.

    What the job measured is kept, and not measured again.
    """
    made = await creations.retry(request, once, job_id)
    return await _waited(request, once.tenant_id, made, preference)


@router.delete("/jobs/{job_id}", status_code=204)
def delete_job(job_id: str, caller: Caller) -> None:
    """Delete the files of a job that has ended, and leave it out of lists.

    What it was stays: `GET` shows it, with `deleted_at` and without its result.
    """
    with db.transaction() as session:
        if owners.delete(session, caller.tenant_id, job_id):
            who = (caller.tenant_id, caller.actor)
            audit.record(session, *who, "job.deleted", job_id)
    try:
        storage.remove_job(job_id)  # again on each call: the last one may have died
    except OSError:
        detail = "the job is deleted, but the storage of its files does not answer; "
        raise Unavailable(f"{detail}send the request again") from None


@router.get(
    "/jobs/{job_id}/events",
    response_model=views.EventPage,
    responses={
        200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
        204: {"description": "The stream has ended, and nothing will follow"},
    },
)
async def list_events(
    job_id: str,
    caller: Caller,
    request: Request,
    after: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_SEQ)] = None,
) -> Response:
    """List events, or stream them with `Accept: text/event-stream`."""
    offered = ("application/json", "text/event-stream")
    if preferred(accept, offered) == "application/json":
        page = await run_in_threadpool(
            events.page, caller.tenant_id, job_id, after, limit
        )
        return Response(page.model_dump_json(), media_type="application/json")
    since = after if last_event_id is None else last_event_id
    first = await run_in_threadpool(events.look, caller.tenant_id, job_id, since)
    if first.over and not first.found:
        return Response(status_code=204)  # tells EventSource to stop
    if request.method == "HEAD":
        return Response(headers=events.HEADERS, media_type="text/event-stream")
    state = request.app.state
    lines = events.lines(state.watcher, caller.tenant_id, job_id, since, first)
    return events.EventStream(state.streams, caller.actor, lines)


async def _waited(
    request: Request, tenant_id: str, made: Answer, preference: str | None
) -> Response:
    """Answer a creation, later where the caller prefers to wait for the end."""
    asked = prefer.read(preference)
    if not asked.wait_s or made.replayed:
        return _applied(made.response(), asked.applied)
    job_id = json.loads(made.text)["id"]
    watcher = request.app.state.watcher
    seen = await polls.end(watcher, tenant_id, job_id, asked.wait_s)
    response = seen.response(200 if seen.final else 202)
    response.headers.update({k: made.headers[k] for k in KEPT if k in made.headers})
    return _applied(response, asked.applied)


def _applied(response: Response, applied: str) -> Response:
    if applied:
        response.headers["Preference-Applied"] = applied
    return response
