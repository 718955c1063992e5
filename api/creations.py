"""How a job comes to be: from a request, or again from a job that has ended."""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from fastapi import Request
from pydantic import ValidationError
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool

from api import auth, bells, crew, idempotency, jobs, orders, resolve, views, webhooks
from api.crew import Act
from api.errors import Invalid, InvalidState, NotFound, SourceChanged
from api.idempotency import Answer, Once
from api.models import FINAL, Job
from api.orders import Order
from api.schemas import OptimizeRequest
from api.settings import settings
from optimizer.spec import OptimizeSpec


class Made(NamedTuple):
    """A job that is there now, and what its owner is answered."""

    answer: Answer
    job: Job | None  # None: an earlier request made it


async def create(request: Request, once: Once, body: OptimizeRequest) -> Answer:
    """Queue the job that a request asks for."""
    look = partial(_look, request, once, body)
    if body.model.path is not None:  # a folder, which may take long to look at
        made = await run_in_threadpool(crew.alone, look)
    else:
        made = await request.app.state.crew.do(look)
    return _rung(request, made)


async def retry(request: Request, once: Once, job_id: str) -> Answer:
    """Queue a job like one that has ended; what that one measured is read, not redone.

    Raises InvalidState before its end, and SourceChanged where its model or its data
    are others by now: that would not be a retry.
    """
    look = partial(_look_again, request, once, job_id)
    return _rung(request, await run_in_threadpool(crew.alone, look))


def _look(
    request: Request, once: Once, body: OptimizeRequest, session: Session
) -> Act[Made]:
    written = body.model_dump(mode="json", exclude_unset=True)
    if told := once.told(written):
        return lambda _: Made(told, None)
    order = _order(session, once.tenant_id, body)
    spec = resolve.to_spec(session, once.tenant_id, body)
    signed = _signed(request, once.caller, order)
    return partial(_submit, once, written, spec, written, signed)


def _look_again(
    request: Request, once: Once, job_id: str, session: Session
) -> Act[Made]:
    if told := once.told({}):
        return lambda _: Made(told, None)
    before = _ended(session, once.tenant_id, job_id)
    order, spec = _as_then(session, before, _as_written(before))
    signed = _signed(request, once.caller, replace(order, retried_from=before.id))
    return partial(_submit, once, {}, spec, before.body, signed)


def _submit(
    once: Once,
    asked: Any,
    spec: OptimizeSpec,
    written: dict[str, Any],
    order: Order,
    session: Session,
) -> Made:
    """Write the job and the promise, which is about what was `asked`."""
    made: list[Job] = []

    def act(session: Session) -> Answer:
        made.append(jobs.submit(session, once.tenant_id, spec, written, order))
        view = views.job(made[0])
        headers = {
            "Location": view.links["self"],
            "Retry-After": str(views.POLL_AFTER_S),
        }
        return idempotency.answer(202, view, headers)

    answer = once.act(session, asked, act)
    return Made(answer, made[0] if made else None)


def _rung(request: Request, made: Made) -> Answer:
    """Ring, after the commit: the worker must find the row."""
    if made.job is not None:
        request.state.job_id = made.job.id  # for the request's span
        bells.ring_soon(made.job.id, made.job.hardware)
        request.app.state.metrics.note_job(made.job.spec["task"], made.job.hardware)
    return made.answer


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


def _signed(request: Request, caller: auth.Caller, order: Order) -> Order:
    return replace(
        order,
        created_by=caller.actor,
        request_id=request.state.request_id,
        traceparent=_place(request),
    )


def _place(request: Request) -> str | None:
    """Return where the job goes on in a trace: under the request's span, if it has one."""
    own: str | None = getattr(request.state, "traceparent", None)
    return own or orders.traceparent(request.headers.get("traceparent"))


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
    here = was["model_sha256"] != ""  # else its address says which commit it is
    if here and was["model_sha256"] != spec.model_sha256:
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
