"""The pages of jobs: the list, the form, one job, two side by side."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from sqlalchemy.orm import Session

from api import (
    catalog,
    datasets,
    filters,
    jobs,
    owners,
    page_compare,
    page_losses,
    page_plot,
    page_words,
    views,
)
from api.access import DB
from api.callers import Caller
from api.errors import Invalid
from api.models import FINAL, Artifact, Job, Status
from api.owners import Filter
from api.page_render import page
from api.pages import PageRoute, Visitor
from api.places import places
from optimizer.abilities import FORMATS
from optimizer.hardware import DEVICES, LOCAL
from optimizer.spec import ENGINES, ROUNDINGS, SWEPT_FORMATS, TASKS
from optimizer.training.candidates import CANDIDATES, Arithmetic
from optimizer.training.spec import OPTIMIZERS, TASKS_OF

PER_PAGE = 25
MAX_EVENTS = 1000  # lines of the log
MAX_CHOICES = 100  # models and datasets that the form lists

router = APIRouter(route_class=PageRoute, include_in_schema=False)


@router.get("/ui/jobs")
def jobs_page(request: Request, visitor: Visitor, session: DB) -> Response:
    """List jobs, the newest first, with filters."""
    wanted, after = _wanted(request), request.query_params.get("after")
    rows, cursor = owners.page(session, visitor.tenant_id, PER_PAGE, after, wanted)
    found = [views.listed_job(row) for row in rows]
    return page(
        request,
        "jobs.html.j2",
        visitor,
        here="jobs",
        jobs=found,
        live=any(job.status not in FINAL for job in found),
        next=_with(request, after=cursor) if cursor else None,
        first=_with(request, after=None) if after else None,
        statuses=list(Status),
        devices=_devices(),
        asked=_asked(request),
        filtered=any(_asked(request).values()),
    )


@router.get("/ui/new")
def new_page(
    request: Request, visitor: Visitor, session: DB, like: str | None = None
) -> Response:
    """Ask for a job; `like` is one whose request is filled in."""
    before = jobs.get(session, visitor.tenant_id, like) if like else None
    return page(
        request,
        "new.html.j2",
        visitor,
        here="new",
        models=_models(session, visitor),
        data=_data(session, visitor),
        devices=_devices(),
        tasks=TASKS,
        before=_trained(before),
        usual={name: how.to_json() for name, how in TASKS_OF.items()},
        optimizers=OPTIMIZERS,
        arithmetics=list(Arithmetic),
        candidates=list(CANDIDATES),
        engines=ENGINES,
        roundings=ROUNDINGS,
        formats=sorted(FORMATS),
        swept=SWEPT_FORMATS,
        was=before.spec if before else {},
        metadata=before.body.get("metadata", {}) if before else {},
    )


@router.get("/ui/jobs/{job_id}")
def job_page(job_id: str, request: Request, visitor: Visitor, session: DB) -> Response:
    """Show a job: how far it is, its log, its front, what it came to, its files."""
    row = jobs.get(session, visitor.tenant_id, job_id)
    events = jobs.events(session, visitor.tenant_id, job_id, 0, MAX_EVENTS)
    found = [views.event(event) for event in events]
    view = views.job(row, places().of(session, row))
    return page(
        request,
        "job.html.j2",
        visitor,
        here="jobs",
        job=view,
        live=row.status not in FINAL,
        log=_log(view, found),
        last_seq=found[-1]["seq"] if found else 0,
        files=_files(jobs.artifacts(session, visitor.tenant_id, job_id)),
        front=page_plot.of_jobs([_points(view, found)], _sla_s(view)),
        losses=page_losses.drawn(_losses(session, visitor, job_id)),
        can_write="jobs:write" in visitor.scopes,
    )


def _log(job: Any, events: Sequence[Any]) -> list[tuple[Any, str]]:
    trains = page_words.trains(job)
    said = [(each, page_words.event(each, trains)) for each in events]
    return [(each, line) for each, line in said if line]


@router.get("/ui/compare")
def compare_page(request: Request, visitor: Visitor, session: DB) -> Response:
    """Show two jobs side by side."""
    ids = list(dict.fromkeys(request.query_params.getlist("job")))
    found = [views.job(jobs.get(session, visitor.tenant_id, each)) for each in ids[:2]]
    others, _ = owners.page(
        session, visitor.tenant_id, 100, None, Filter(statuses=[Status.SUCCEEDED])
    )
    done = [job for job in found if job.result]
    return page(
        request,
        "compare.html.j2",
        visitor,
        here="jobs",
        chosen=[job.id for job in found],
        others=[views.listed_job(row) for row in others],
        jobs=found,
        said="" if len(ids) < 3 else "Only the first two are shown.",
        compared=page_compare.compare(*done) if len(done) == 2 else None,
        front=page_plot.of_jobs([_points(job, []) for job in done], None),
    )


def _wanted(request: Request) -> Filter:
    """Return the filter that the form says. Raises Invalid naming the field."""
    asked = _asked(request)
    pairs = filters.metadata(request)
    if asked["entity_ref"]:
        pairs = {**pairs, "entity_ref": asked["entity_ref"]}
    return Filter(
        statuses=[
            _status(word) for word in request.query_params.getlist("status") if word
        ],
        hardware=asked["hardware"] or None,
        created_after=_day(asked["since"]),
        metadata=pairs,
    )


def _asked(request: Request) -> dict[str, str]:
    names = ("status", "hardware", "entity_ref", "since")
    return {name: request.query_params.get(name, "").strip() for name in names}


def _status(word: str) -> Status:
    if word not in {str(status) for status in Status}:
        raise Invalid("", f"there is no status {word[:40]!r}: {', '.join(Status)}")
    return Status(word)


def _day(text: str) -> datetime | None:
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC) if text else None
    except ValueError:
        raise Invalid("", f"{text[:40]!r} is no day such as 2026-12-31") from None


def _with(request: Request, **changes: str | None) -> str:
    """Return the address of this page with other parameters; None takes one away."""
    url = request.url
    for name, value in changes.items():
        if value is None:
            url = url.remove_query_params(name)
        else:
            url = url.include_query_params(**{name: value})
    return f"{url.path}?{url.query}"


def _devices() -> list[tuple[str, str]]:
    named = [(found.id, found.name) for found in DEVICES.values()]
    return [*named, (LOCAL, "this worker's own device, measured")]


def _trained(before: Job | None) -> dict[str, Any]:
    """Return how a job's task trained; empty: it served, or there is none."""
    training = before.spec.get("training") if before else None
    return {"task": before.spec["task"], **training} if before and training else {}


def _models(session: Session, visitor: Caller) -> list[Any]:
    if "models:read" not in visitor.scopes:
        return []
    return catalog.page(session, visitor.tenant_id, MAX_CHOICES)[0]


def _data(session: Session, visitor: Caller) -> list[Any]:
    if "datasets:read" not in visitor.scopes:
        return []
    return list(datasets.page(session, visitor.tenant_id, MAX_CHOICES)[0])


def _files(rows: list[Artifact]) -> dict[str, list[Artifact]]:
    """Return files by the folder that they lie in; "" is none."""
    found: dict[str, list[Artifact]] = {"": []}
    for row in rows:
        folder, slash, _ = row.name.partition("/")
        found.setdefault(folder if slash else "", []).append(row)
    return found


def _sla_s(view: views.JobView) -> float | None:
    sla = view.request.get("latency_sla") or {}
    seconds: float | None = sla.get("per_token_s")
    return seconds


def _losses(session: Session, visitor: Caller, job_id: str) -> list[dict[str, Any]]:
    told = jobs.events_of(session, visitor.tenant_id, job_id, "job.losses", MAX_EVENTS)
    return [event.details for event in told]


def _points(view: views.JobView, events: list[dict[str, Any]]) -> page_plot.Drawn:
    """Return what is known of a job's front: at its end all, before it what was told."""
    if view.result:
        return page_plot.drawn(view.id, view.result["front"], view.result["chosen"])
    told = [e["data"] for e in events if e["type"] == "job.trial_completed"]
    return page_plot.emerging(view.id, told)
