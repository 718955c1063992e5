"""The JSON that goes out: rows, as their owner sees them."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from api.models import FINAL, Artifact, Job, JobEvent, Status

Json = dict[str, Any]

POLL_AFTER_S = 2  # a job's percent moves about this often
RESULTS = ("report", "stack", "front", "trials", "artifacts")
SERVER_PATHS = ("model_path", "dataset_path")  # the caller's business are names


class Best(BaseModel):
    """What the chosen stack came to."""

    per_token_s: float | None
    first_token_s: float | None
    kl_nats: float | None


class Progress(BaseModel):
    """How far a job got; 100 percent is for final states.

    Of `trials_planned` measurements that its last attempt asked for so far,
    `trials_done` are there; those of earlier jobs that were read count as well.
    """

    percent: float
    trials_done: int
    trials_planned: int
    eta_seconds: float | None
    best: Best | None  # None: nothing has been chosen yet


class Timestamps(BaseModel):
    """When a job changed its state, in UTC."""

    created_at: datetime
    queued_at: datetime
    started_at: datetime | None
    finalizing_at: datetime | None
    cancel_requested_at: datetime | None
    finished_at: datetime | None
    expires_at: datetime
    deleted_at: datetime | None


class Durations(BaseModel):
    """How long a job waited for its first worker, and ran in all."""

    queued_seconds: float | None
    running_seconds: float | None


class Provenance(BaseModel):
    """What computed a job; the report has all of it."""

    service_version: str
    torch: str
    code_sha256: str  # of the numerics' own files
    seed: int
    versions: dict[str, str]
    driver: str | None = None  # None: no GPU computed it
    device_uuid_hash: str | None = None  # sha256 of the GPU's own number


class ListedJob(BaseModel):
    """A job as lists show it: without its result."""

    id: str
    object: str = "job"
    status: Status
    phase: str | None
    outcome: str | None
    attempt: int
    retried_from: str | None
    priority: int
    progress: Progress
    poll_after_seconds: int | None
    timestamps: Timestamps
    durations: Durations
    error: Json | None
    warnings: list[Any]
    request: Json
    links: dict[str, str]
    metadata: dict[str, str]


class JobView(ListedJob):
    """A job. `result` and `provenance`, of what computed it, are there once it
    succeeded.

    `queue_position` counts from 1, and is a forecast: others may come first.
    """

    queue_position: int | None
    provenance: Provenance | None
    result: Json | None


class JobPage(BaseModel):
    """Some jobs, the newest first; `next_cursor` is the next page's `after`."""

    object: str = "list"
    data: list[ListedJob]
    has_more: bool
    next_cursor: str | None


class Event(BaseModel):
    """What happened to a job. `seq` has no gaps, and is the id in a stream."""

    id: str
    seq: int
    type: str
    timestamp: str
    data: Json


class EventPage(BaseModel):
    """Some events, the oldest first; `next_cursor` is the next page's `after`."""

    object: str = "list"
    data: list[Event]
    has_more: bool
    next_cursor: str | None


class ArtifactView(BaseModel):
    """A file that a job left. Once `purged_at` is set its bytes are gone."""

    name: str
    object: str = "artifact"
    kind: str
    bytes: int
    sha256: str
    media_type: str
    created_at: datetime
    expires_at: datetime | None
    purged_at: datetime | None
    links: dict[str, str]


class ArtifactList(BaseModel):
    """All files of a job, on one page."""

    object: str = "list"
    data: list[ArtifactView]
    has_more: bool = False
    next_cursor: None = None


class StackSite(BaseModel):
    """A place in the network, its choice, what that costs and why it was made."""

    site: str
    component: str
    layer: int | None
    choice: str
    kl_nats: float | None
    reason: str | None


class StackView(BaseModel):
    """The chosen stack: a choice for each component, each layer and each site."""

    object: str = "stack"
    job_id: str
    chosen: str | None  # a point of the front; None: it is none
    precision_stack: dict[str, str]
    components: list[Json]
    layers: list[Json]
    sites: list[StackSite]


class FrontView(BaseModel):
    """Every stack that no other one beats, each with its figures."""

    object: str = "front"
    job_id: str
    chosen: str | None
    data: list[Json]


def job(row: Job, queue_position: int | None = None) -> JobView:
    """Return a job with its result, and its place in the queue where that is known."""
    return JobView(
        **_job_fields(row),
        queue_position=queue_position,
        provenance=_provenance(row),
        result=_result(row),
    )


def listed_job(row: Job) -> ListedJob:
    """Return a job without its result."""
    return ListedJob(**_job_fields(row))


def _job_fields(row: Job) -> Json:
    final = row.status in FINAL
    return {
        "id": row.id,
        "status": row.status,
        "phase": row.phase,
        "outcome": row.outcome,
        "attempt": row.attempt,
        "retried_from": row.retried_from,
        "priority": row.priority,
        "progress": _progress(row),
        "poll_after_seconds": None if final else POLL_AFTER_S,
        "timestamps": Timestamps.model_validate(row, from_attributes=True),
        "durations": _durations(row),
        "error": row.error,
        "warnings": row.warnings or [],
        "request": {k: v for k, v in row.spec.items() if k not in SERVER_PATHS},
        "links": _links(row),
        "metadata": row.body.get("metadata", {}),
    }


def _progress(row: Job) -> Progress:
    return Progress(
        percent=round(row.percent, 1),
        trials_done=row.trials_done,
        trials_planned=row.trials_planned,
        eta_seconds=row.eta_s,
        best=_best(row),
    )


def _best(row: Job) -> Best | None:
    chosen = (row.summary or {}).get("chosen")
    if row.status is not Status.SUCCEEDED or not chosen:
        return None
    kl = chosen.get("kl_nats")
    return Best(
        per_token_s=chosen.get("per_token_s"),
        first_token_s=chosen.get("first_token_s"),
        kl_nats=kl["value"] if isinstance(kl, dict) else kl,
    )


def _durations(row: Job) -> Durations:
    return Durations(
        queued_seconds=_seconds(row.created_at, row.started_at),
        running_seconds=_seconds(row.started_at, row.finished_at),
    )


def _seconds(since: datetime | None, until: datetime | None) -> float | None:
    return None if since is None or until is None else (until - since).total_seconds()


def _links(row: Job) -> dict[str, str]:
    base = f"/v1/jobs/{row.id}"
    links = {"self": base, "events": f"{base}/events"}
    action = "retry" if row.status in FINAL else "cancel"
    links[action] = f"{base}/{action}"
    if _has_result(row):
        links |= {name: f"{base}/{name}" for name in RESULTS}
    return links


def _has_result(row: Job) -> bool:
    return row.status is Status.SUCCEEDED and row.deleted_at is None


def _provenance(row: Job) -> Provenance | None:
    """Return what computed a job. None: it has not succeeded, or before this was kept."""
    said = (row.summary or {}).get("provenance")
    if said is None or not _has_result(row):
        return None
    versions = said["versions"]
    return Provenance(
        service_version=versions["precision"], torch=versions["torch"], **said
    )


def _result(row: Job) -> Json | None:
    if not _has_result(row):
        return None
    report = f"/v1/jobs/{row.id}/report?format="
    links = {"json": f"{report}json", "html": f"{report}html"}
    shown = {k: v for k, v in (row.summary or {}).items() if k != "provenance"}
    return {**shown, "outcome": row.outcome, "report": links}


def event(row: JobEvent) -> Json:
    """Return an event; its id is the same however it is read."""
    return {
        "id": f"evt_{row.job_id.removeprefix('job_')}_{row.seq}",
        "seq": row.seq,
        "type": row.type,
        "timestamp": row.at.isoformat().replace("+00:00", "Z"),
        "data": {"job_id": row.job_id, **row.details},
    }


def artifact(row: Artifact) -> Json:
    """Return what an artifact is and where its bytes are."""
    return {
        "name": row.name,
        "object": "artifact",
        "kind": row.kind,
        "bytes": row.bytes,
        "sha256": row.sha256,
        "media_type": row.media_type,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "purged_at": row.purged_at,
        "links": {"self": f"/v1/jobs/{row.job_id}/artifacts/{row.name}"},
    }


def stack(job_id: str, report: Json) -> Json:
    """Return the chosen stack: by component, by layer and by site."""
    kept = ("site", "component", "layer", "choice", "kl_nats", "reason")
    return {
        "object": "stack",
        "job_id": job_id,
        "chosen": report["verdict"]["chosen"],
        "precision_stack": report["precision_stack"],
        "components": report["components"],
        "layers": report["layers"],
        "sites": [{k: site[k] for k in kept} for site in report["sites"]],
    }


def front(job_id: str, report: Json) -> Json:
    """Return every point of the front, each with its whole stack."""
    return {
        "object": "front",
        "job_id": job_id,
        "chosen": report["verdict"]["chosen"],
        "data": report["front"],
    }


def whole_list(rows: Sequence[Mapping[str, Any]]) -> Json:
    """Return a list that has one page."""
    return {"object": "list", "data": rows, "has_more": False, "next_cursor": None}
