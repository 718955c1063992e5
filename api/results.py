"""The endpoints of what a job came to: its report, its stack, its front, its files."""

import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request, Response
from sqlalchemy.orm import Session

from api import auth, downloads, jobs, storage, views
from api.accept import preferred
from api.access import DB, Caller
from api.errors import Gone, InvalidState, NotFinal, NotFound, Unavailable
from api.models import FINAL, Artifact, Job, Status
from api.strict import StrictRoute

Format = Literal["json", "html"]
REPORTS: dict[Format, str] = {  # the first is the default
    "json": "application/json",
    "html": "text/html",
}
FORMATS = {kind: name for name, kind in REPORTS.items()}
PARTIAL: dict[int | str, dict[str, Any]] = {
    206: {"description": "The range that was asked for", "content": {"*/*": {}}},
    304: {"description": "It is still as `If-None-Match` says"},
}

router = APIRouter(prefix="/v1/jobs/{job_id}", route_class=StrictRoute, tags=["jobs"])


@router.head("/report", include_in_schema=False)
@router.get(
    "/report",
    response_class=Response,
    responses={
        200: {
            "content": {
                "application/json": {"schema": {"type": "object"}},
                "text/html": {"schema": {"type": "string"}},
            }
        },
        **PARTIAL,
    },
)
def get_report(
    job_id: str,
    caller: Caller,
    session: DB,
    request: Request,
    format: Format | None = None,
    accept: Annotated[str | None, Header()] = None,
) -> Response:
    """Return the report, for machines (JSON) or for people (HTML)."""
    _succeeded(session, caller, job_id)
    if format is None:
        wanted = preferred(accept, tuple(REPORTS.values()))
        format = FORMATS[wanted]
    row = _artifact(session, caller, job_id, f"report.{format}")
    return downloads.response(request, row, attached=False, vary="Accept")


@router.get("/stack", response_model=views.StackView)
def get_stack(job_id: str, caller: Caller, session: DB) -> Any:
    """Return the chosen stack by component, by layer and by site."""
    return views.stack(job_id, report_of(session, caller, job_id))


@router.get("/front", response_model=views.FrontView)
def get_front(job_id: str, caller: Caller, session: DB) -> Any:
    """Return the Pareto front, each point with its whole stack."""
    return views.front(job_id, report_of(session, caller, job_id))


@router.get("/artifacts", response_model=views.ArtifactList)
def list_artifacts(job_id: str, caller: Caller, session: DB) -> Any:
    """List the files that the job left."""
    rows = jobs.artifacts(session, caller.tenant_id, job_id)
    return views.whole_list([views.artifact(row) for row in rows])


@router.head("/artifacts/{name:path}", include_in_schema=False)
@router.get(
    "/artifacts/{name:path}",
    response_class=Response,
    responses={200: {"content": {"*/*": {}}}, **PARTIAL},
)
def get_artifact(
    job_id: str, name: str, caller: Caller, session: DB, request: Request
) -> Response:
    """Download a file. Its ETag is the sha256; one range is served, with If-Range."""
    return downloads.response(request, _artifact(session, caller, job_id, name))


def _succeeded(session: Session, caller: auth.Caller, job_id: str) -> Job:
    job = jobs.get(session, caller.tenant_id, job_id)
    if job.status not in FINAL:
        raise NotFinal(f"the job is {job.status}", current_status=job.status)
    if job.status is not Status.SUCCEEDED:
        detail = f"the job is {job.status}, so it has no result"
        raise InvalidState(detail, current_status=job.status)
    return job


def _artifact(
    session: Session, caller: auth.Caller, job_id: str, name: str
) -> Artifact:
    rows = jobs.artifacts(session, caller.tenant_id, job_id)
    artifact = next((row for row in rows if row.name == name), None)
    if artifact is None:
        raise NotFound(f"the job has no artifact {name[:64]!r}")
    return artifact


def report_of(session: Session, caller: auth.Caller, job_id: str) -> dict[str, Any]:
    """Return the report document of a job that succeeded. Raises NotFinal, or Gone."""
    _succeeded(session, caller, job_id)
    row = _artifact(session, caller, job_id, "report.json")
    try:
        key = storage.key(job_id, row.attempt, row.name)
        document: dict[str, Any] = json.loads(storage.store().read(key))
    except FileNotFoundError:
        raise Gone("the report is no longer stored") from None
    except OSError:
        raise Unavailable("the storage does not answer; try again") from None
    return document
