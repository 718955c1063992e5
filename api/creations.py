"""How a job comes to be: from a request, or again from a job that has ended."""

from dataclasses import replace
from typing import Any

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request
from pydantic import ValidationError
from sqlalchemy.orm import Session

from api import auth, bells, db, idempotency, jobs, orders, resolve, views, webhooks
from api.errors import Invalid, InvalidState, NotFound, SourceChanged
from api.idempotency import Answer, Once
from api.models import FINAL, Job
from api.orders import Order
from api.schemas import OptimizeRequest
from api.settings import settings
from optimizer.spec import OptimizeSpec


def crew() -> CapacityLimiter:
    """Return what keeps the threads few that make jobs of known models.

    More of them take turns at SQLite's one lock and at the interpreter's, and under
    load that costs a request a third of its time. PostgreSQL answers from afar.
    """
    return CapacityLimiter(2 if settings().database_url.startswith("sqlite") else 8)


async def create_soon(request: Request, once: Once, body: OptimizeRequest) -> Answer:
    """Do as `create`, in a thread: one of the crew's, but for a folder, which may take
    long to look at.
    """
    limiter = request.app.state.crew if body.model.path is None else None
    return await run_sync(create, request, once, body, limiter=limiter)


def create(request: Request, once: Once, body: OptimizeRequest) -> Answer:
    """Queue the job that a request asks for."""
    written = body.model_dump(mode="json", exclude_unset=True)
    if told := once.told(written):
        return told
    with db.glancing() as session:  # checking may take a while: hold no lock
        order = _order(session, once.tenant_id, body)
        spec = resolve.to_spec(session, once.tenant_id, body)
        signed = _signed(request, once.caller, order)
        return _submit(request, once, session, spec, written, signed)


def retry(request: Request, once: Once, job_id: str) -> Answer:
    """Queue a job like one that has ended; what that one measured is read, not redone.

    Raises InvalidState before its end, and SourceChanged where its model or its data
    are others by now: that would not be a retry.
    """
    if told := once.told({}):
        return told
    with db.glancing() as session:
        before = _ended(session, once.tenant_id, job_id)
        body = _as_written(before)
        order, spec = _as_then(session, before, body)
        signed = _signed(request, once.caller, replace(order, retried_from=before.id))
        return _submit(request, once, session, spec, before.body, signed, asked={})


def _order(session: Session, tenant_id: str, body: OptimizeRequest) -> Order:
    """Return what the body says beside what to compute. Raises Invalid."""
    webhook, search = body.webhook, body.search
    if webhook is not None:
        _require_endpoint(session, tenant_id, webhook.endpoint_id)
    _require("/expires_in", body.expires_in, settings().queue_limit_s)
    limit_s = settings().run_limit_s
    _require("/search/max_runtime_seconds", search.max_runtime_seconds, limit_s)
    return Order(
        priority=body.priority,
        expires_in_s=body.expires_in,
        run_limit_s=search.max_runtime_seconds,
        webhook_endpoint_id=webhook.endpoint_id if webhook else None,
    )


def _submit(
    request: Request,
    once: Once,
    glanced: Session,
    spec: OptimizeSpec,
    written: dict[str, Any],
    order: Order,
    asked: Any = None,
) -> Answer:
    """Write the job and the promise in one transaction, then ring.

    `asked` is what the promise is about; None: `written`.
    """
    made: list[Job] = []

    def act(session: Session) -> Answer:
        made.append(jobs.submit(session, once.tenant_id, spec, written, order))
        view = views.job(made[-1])
        headers = {
            "Location": view.links["self"],
            "Retry-After": str(views.POLL_AFTER_S),
        }
        return idempotency.answer(202, view, headers)

    answer = once.go_on(glanced, written if asked is None else asked, act)
    if not answer.replayed:
        # After the commit: the worker must find the row.
        bells.ring_soon(made[-1].id, spec.hardware)
        request.app.state.metrics.note_job(spec.task, spec.hardware)
    return answer


def _signed(request: Request, caller: auth.Caller, order: Order) -> Order:
    return replace(
        order,
        created_by=caller.actor,
        request_id=request.state.request_id,
        traceparent=orders.traceparent(request.headers.get("traceparent")),
    )


def _ended(session: Session, tenant_id: str, job_id: str) -> Job:
    job = jobs.get(session, tenant_id, job_id)
    if job.status not in FINAL:
        detail = f"the job is {job.status}: only one that has ended is retried"
        raise InvalidState(detail, current_status=job.status)
    return job


def _as_written(before: Job) -> OptimizeRequest:
    try:
        return OptimizeRequest.model_validate(before.body)
    except ValidationError as error:
        where = ".".join(str(step) for step in error.errors()[0]["loc"])
        detail = f"the job's request is not valid any more ({where}); send a new one"
        raise SourceChanged(detail) from None


def _as_then(
    session: Session, before: Job, body: OptimizeRequest
) -> tuple[Order, OptimizeSpec]:
    """Look every name up again. Raises SourceChanged unless they mean the same."""
    try:
        order = _order(session, before.tenant_id, body)
        spec = resolve.to_spec(session, before.tenant_id, body)
    except Invalid as error:
        detail = f"the job cannot be repeated: {error.detail}"
        raise SourceChanged(detail, retried_from=before.id) from None
    was = before.spec
    if was["model_sha256"] != spec.model_sha256:
        detail = f"the model {spec.model!r} has other weights by now"
    elif was.get("dataset_path") != spec.dataset_path:
        detail = f"the dataset {spec.data_distribution!r} is another by now"
    else:
        return order, spec
    raise SourceChanged(f"{detail}; send a new request", retried_from=before.id)


def _require(pointer: str, seconds: float | None, limit_s: float) -> None:
    if seconds is not None and seconds > limit_s:
        raise Invalid(pointer, f"at most {limit_s:.0f} seconds here, not {seconds}")


def _require_endpoint(session: Session, tenant_id: str, endpoint_id: str) -> None:
    try:
        webhooks.get(session, tenant_id, endpoint_id)
    except NotFound as error:
        pointer = "/webhook/endpoint_id"
        code = "unknown_webhook_endpoint"
        raise Invalid(pointer, error.detail, code) from None
