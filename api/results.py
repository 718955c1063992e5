"""The endpoints of what a job came to: its report, its stack, its front, its files."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request, Response
from sqlalchemy.orm import Session

from api import auth, downloads, jobs, storage, training_views, views
from api.accept import preferred
from api.access import DB, Caller
from api.errors import (
    Gone,
    InvalidState,
    NotAcceptable,
    NotFinal,
    NotFound,
    Unavailable,
)
from api.models import FINAL, Artifact, Job, Status
from api.strict import StrictRoute
from optimizer import report_script


@dataclass(frozen=True, slots=True)
class Form:
    """A form that the report comes in: the artifact, and its media type."""

    file: str
    media_type: str
    policy: str = downloads.POLICY


REPORTS = {  # by what `format` says; the first is the default
    "json": Form("report.json", "application/json"),
    # Its own script may run, by its digest, and in an origin of its own.
    "html": Form(
        "report.html", "text/html", f"sandbox allow-scripts; {report_script.policy()}"
    ),
    "md": Form("report.md", "text/markdown"),
    "csv": Form("layers.csv", "text/csv"),
    "pdf": Form("report.pdf", "application/pdf"),
}
PARTIAL: dict[int | str, dict[str, Any]] = {
    206: {"description": "The range that was asked for", "content": {"*/*": {}}},
    304: {"description": "It is still as `If-None-Match` says"},
}
FORMATS = Query(
    description="The form of the report: `json`, `html`, `md`, `pdf`, or `csv` for the "
    "table of layers. Without it, `Accept` decides."
)
CONTENT = {
    form.media_type: {"schema": {"type": "object" if name == "json" else "string"}}
    for name, form in REPORTS.items()
}

router = APIRouter(prefix="/v1/jobs/{job_id}", route_class=StrictRoute, tags=["jobs"])


@router.head("/report", include_in_schema=False)
@router.get(
    "/report",
    response_class=Response,
    responses={200: {"content": CONTENT}, **PARTIAL},
)
def get_report(
    job_id: str,
    caller: Caller,
    session: DB,
    request: Request,
    format: Annotated[str | None, FORMATS] = None,
    accept: Annotated[str | None, Header()] = None,
) -> Response:
    """Return the report, for machines, for people, for paper or for a spreadsheet."""
    _succeeded(session, caller, job_id)
    rows = {row.name: row for row in jobs.artifacts(session, caller.tenant_id, job_id)}
    there = {name: form for name, form in REPORTS.items() if form.file in rows}
    form = _form(there or REPORTS, format, accept)
    row = rows.get(form.file) or _artifact(session, caller, job_id, form.file)
    return downloads.response(
        request, row, attached=False, vary="Accept", policy=form.policy
    )


def _form(there: Mapping[str, Form], name: str | None, accept: str | None) -> Form:
    """Return the form that is asked for. Raises NotAcceptable with those there are."""
    if name is None:
        offered = {form.media_type: form for form in there.values()}
        return offered[preferred(accept, tuple(offered))]
    if name not in there:
        raise NotAcceptable(
            f"there is no format {name[:40]!r}; there are: {', '.join(there)}",
            available=list(there),
        )
    return there[name]


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
    return training_views.as_served(document)
