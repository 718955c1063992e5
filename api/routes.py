"""The endpoints of jobs. Each is a few lines: translate, call, translate back."""

from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response

from api import db, events, jobs, queue, resolve, views
from api.accept import preferred
from api.access import DB, Caller
from api.models import FINAL, Status
from api.schemas import OptimizeRequest
from api.strict import StrictRoute

MAX_SEQ = 2**31 - 1

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["jobs"])


@router.post("/optimize", status_code=202)
def optimize(
    body: OptimizeRequest, caller: Caller, request: Request, response: Response
) -> views.JobView:
    """Queue an optimization. Only `model` and `hardware` are required."""
    with db.reading() as session:  # checking may take a while: hold no lock
        spec = resolve.to_spec(session, caller.tenant_id, body)
    written = body.model_dump(mode="json", exclude_unset=True)
    with db.transaction() as session:
        view = views.job(jobs.submit(session, caller.tenant_id, spec, written))
    queue.ring(view.id, spec.hardware)  # after the commit: the worker must find the row
    request.app.state.metrics.note_job(spec.task, spec.hardware)
    response.headers["Location"] = view.links["self"]
    response.headers["Retry-After"] = str(views.POLL_AFTER_S)
    return view


@router.get("/jobs")
def list_jobs(
    caller: Caller,
    session: DB,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    after: Annotated[str | None, Query(max_length=200)] = None,
    status: Status | None = None,
) -> views.JobPage:
    """List jobs, the newest first, without their results."""
    rows, cursor = jobs.page(session, caller.tenant_id, limit, after, status)
    found = [views.listed_job(row) for row in rows]
    return views.JobPage(data=found, has_more=cursor is not None, next_cursor=cursor)


@router.get("/jobs/{job_id}")
def get_job(
    job_id: str, caller: Caller, session: DB, response: Response
) -> views.JobView:
    """Report how far a job got, and its result once it succeeded."""
    view = views.job(jobs.get(session, caller.tenant_id, job_id))
    if view.poll_after_seconds is not None:
        response.headers["Retry-After"] = str(view.poll_after_seconds)
    return view


@router.post("/jobs/{job_id}/cancel", status_code=202)
def cancel_job(job_id: str, caller: Caller, response: Response) -> views.JobView:
    """Ask a job to stop. 200 where it has ended, however it did."""
    with db.transaction() as session:
        view = views.job(jobs.cancel(session, caller.tenant_id, job_id))
    response.status_code = 200 if view.status in FINAL else 202
    return view


@router.get(
    "/jobs/{job_id}/events",
    response_model=None,
    responses={
        200: {"content": {"text/event-stream": {}}},
        204: {"description": "The stream has ended, and nothing will follow"},
    },
)
def list_events(
    job_id: str,
    caller: Caller,
    after: Annotated[int, Query(ge=0, le=MAX_SEQ)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    accept: Annotated[str | None, Header()] = None,
    last_event_id: Annotated[int | None, Header(ge=0, le=MAX_SEQ)] = None,
) -> Response | dict[str, Any]:
    """List events, or stream them with `Accept: text/event-stream`."""
    wanted = preferred(accept, ("application/json", "text/event-stream"))
    if wanted == "text/event-stream":
        since = last_event_id if last_event_id is not None else after
        found, over = events.look(caller.tenant_id, job_id, since)
        if over and not found:
            return Response(status_code=204)  # tells EventSource to stop
        return events.response(caller.tenant_id, job_id, since)
    with db.reading() as session:
        rows = jobs.events(session, caller.tenant_id, job_id, after, limit + 1)
        page = [views.event(row) for row in rows[:limit]]
    more = len(rows) > limit
    next_cursor = str(page[-1]["seq"]) if more else None
    return {
        "object": "list",
        "data": page,
        "has_more": more,
        "next_cursor": next_cursor,
    }
