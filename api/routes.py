"""The endpoints of jobs. Each is a few lines: translate, call, translate back."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Header, Query, Request, Response, Security
from fastapi.responses import FileResponse
from fastapi.security import HTTPBearer
from sqlalchemy.orm import Session

from api import auth, db, events, jobs, queue, resolve, storage, views
from api.accept import preferred
from api.errors import Gone, InvalidState, NotFinal, NotFound
from api.models import FINAL, Artifact, Job, Status
from api.schemas import OptimizeRequest
from api.strict import StrictRoute

# The report is made from names that customers chose: nothing in it may run.
HTML_POLICY = "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:"
SAFE = {"Content-Security-Policy": HTML_POLICY, "Cache-Control": "private, no-cache"}
MAX_SEQ = 2**31 - 1

_bearer = HTTPBearer(auto_error=False, scheme_name="api_key", bearerFormat="po_live_…")


def authenticate(request: Request, _: Annotated[Any, Security(_bearer)]) -> auth.Caller:
    """FastAPI dependency: who is calling. Raises Unauthenticated."""
    header = request.headers.get("authorization")
    with db.reading() as session:
        caller = auth.verify(session, header)
    if caller.stale:
        with db.transaction() as session:
            auth.touch(session, caller)
    return caller


router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["jobs"])
DB = Annotated[Session, Depends(db.get_session, scope="function")]
Caller = Annotated[auth.Caller, Depends(authenticate)]


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
    queue.ring(view.id)  # after the commit: the worker must find the row
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


# -- results -------------------------------------------------------------------


@router.get(
    "/jobs/{job_id}/report",
    response_class=FileResponse,
    responses={200: {"content": {"application/json": {}, "text/html": {}}}},
)
def get_report(
    job_id: str,
    caller: Caller,
    session: DB,
    format: Literal["json", "html"] | None = None,
    accept: Annotated[str | None, Header()] = None,
) -> FileResponse:
    """Return the report, for machines (JSON) or for people (HTML)."""
    _succeeded(session, caller, job_id)
    if format is None:
        wanted = preferred(accept, ("application/json", "text/html"))
        format = "html" if wanted == "text/html" else "json"
    file, _ = _file(session, caller, job_id, f"report.{format}")
    file.headers["Vary"] = "Accept"
    return file


@router.get("/jobs/{job_id}/stack")
def get_stack(job_id: str, caller: Caller, session: DB) -> dict[str, Any]:
    """Return the chosen stack by component, by layer and by site."""
    return views.stack(job_id, _report(session, caller, job_id))


@router.get("/jobs/{job_id}/front")
def get_front(job_id: str, caller: Caller, session: DB) -> dict[str, Any]:
    """Return the Pareto front, each point with its whole stack."""
    return views.front(job_id, _report(session, caller, job_id))


@router.get("/jobs/{job_id}/artifacts")
def list_artifacts(job_id: str, caller: Caller, session: DB) -> dict[str, Any]:
    """List the files that the job left."""
    rows = jobs.artifacts(session, caller.tenant_id, job_id)
    return views.whole_list([views.artifact(row) for row in rows])


@router.head("/jobs/{job_id}/artifacts/{name}", include_in_schema=False)
@router.get("/jobs/{job_id}/artifacts/{name}", response_class=FileResponse)
def get_artifact(
    job_id: str,
    name: str,
    caller: Caller,
    session: DB,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """Download a file. Its ETag is the sha256; ranges are served."""
    file, artifact = _file(session, caller, job_id, name)
    file.headers["Content-Disposition"] = f'attachment; filename="{artifact.name}"'
    etag = file.headers["etag"]
    if if_none_match and etag in [tag.strip() for tag in if_none_match.split(",")]:
        return Response(status_code=304, headers={"ETag": etag})
    return file


def _succeeded(session: Session, caller: auth.Caller, job_id: str) -> Job:
    job = jobs.get(session, caller.tenant_id, job_id)
    if job.status not in FINAL:
        raise NotFinal(f"the job is {job.status}", current_status=job.status)
    if job.status is not Status.SUCCEEDED:
        detail = f"the job is {job.status}, so it has no result"
        raise InvalidState(detail, current_status=job.status)
    return job


def _file(
    session: Session, caller: auth.Caller, job_id: str, name: str
) -> tuple[FileResponse, Artifact]:
    artifact, path = _artifact(session, caller, job_id, name)
    headers = {"ETag": f'"{artifact.sha256}"', **SAFE}
    return FileResponse(path, media_type=artifact.media_type, headers=headers), artifact


def _artifact(
    session: Session, caller: auth.Caller, job_id: str, name: str
) -> tuple[Artifact, Path]:
    rows = jobs.artifacts(session, caller.tenant_id, job_id)
    artifact = next((row for row in rows if row.name == name), None)
    if artifact is None:
        raise NotFound(f"the job has no artifact {name[:64]!r}")
    path = storage.path(job_id, artifact.attempt, artifact.name)
    if not path.is_file():
        raise Gone(f"the bytes of {artifact.name} are no longer stored")
    return artifact, path


def _report(session: Session, caller: auth.Caller, job_id: str) -> dict[str, Any]:
    _succeeded(session, caller, job_id)
    _, path = _artifact(session, caller, job_id, "report.json")
    document: dict[str, Any] = json.loads(path.read_bytes())
    return document
