"""`POST /v1/estimate`: what to expect before anything is measured, without a job.

The body is that of `POST /v1/optimize`. A task that trains adds `training`: memory, and
what to train in and why; the body's own `training` says more of it than a task can. A
model is a registered one, a folder, or a published one by its name alone.
"""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from sqlalchemy.orm import Session

from api import catalog, db, estimate_views, hub, resolve, trainings
from api.access import Caller
from api.errors import Invalid
from api.schemas import (
    Body,
    Devices,
    ModelRef,
    OptimizeRequest,
    Tokens,
    Word,
    WorkloadBody,
)
from api.strict import StrictRoute
from optimizer.errors import HardwareError, ModelError
from optimizer.hardware import DEVICES, LOCAL
from optimizer.stack import ModelShape

if TYPE_CHECKING:  # the API starts without numpy
    from optimizer.estimate import Estimate, Priced
    from optimizer.training_memory import Training

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["estimate"])


class EstimateWorkload(WorkloadBody):
    """How the model will be served, with CUDA graphs or not."""

    cuda_graphs: bool | None = None


class TrainingBody(Body):
    """How the model is trained. `batch_size` is one device's micro-batch."""

    scenario: Word = "pretraining"
    arithmetic: Word = "mixed"
    optimizer: Word = "adam"
    checkpointing: Word = "selective"
    zero_stage: Annotated[int, Field(ge=0, le=3)] = 0
    data_parallel: Annotated[int, Field(ge=1, le=65_536)] = 1
    tensor_parallel: Devices = 1
    batch_size: Annotated[int, Field(ge=1, le=1024)] = 1
    sequence_tokens: Tokens = 2048
    lora_rank: Annotated[int, Field(ge=1, le=4096)] | None = None


class EstimateRequest(OptimizeRequest):
    """Body of POST /v1/estimate: that of POST /v1/optimize, and perhaps `training`.

    A task of `pretrain`, `finetune` or `lora` is trained; what `training` says goes
    before what the task says.
    """

    workload: EstimateWorkload = Field(default_factory=EstimateWorkload)
    training: TrainingBody | None = None


@router.post("/estimate")
def estimate(body: EstimateRequest, caller: Caller) -> dict[str, Any]:
    """Estimate memory, latency by format, and what FP8 would buy; no job is made."""
    with db.reading() as session:
        named = resolve.names(session, caller.tenant_id, body)
        if named.hardware == LOCAL:
            raise Invalid(
                "/hardware",
                "what local can do is known to its worker alone: estimate a device of "
                "the catalog, or measure it with a job (POST /v1/optimize)",
                "unknown_hardware",
                list(DEVICES),
            )
        name, source, shape = model_of(session, caller.tenant_id, body.model)
    resolve.require_split(shape, named)
    asked = _asked(body)
    how = _training(asked) if asked else None
    found = _estimate(named, shape, body)
    _refuse_beyond(found)
    if how is None:
        _refuse_too_large(found)
    view = estimate_views.estimate(found, name, source)
    if how is not None and asked is not None:
        view["training"] = estimate_views.training(found.ask, how, asked.scenario)
        serves = [] if trainings.trains(body) else view["warnings"]
        view["warnings"] = [*serves, *estimate_views.too_long(found.ask, how)]
    return view


def _asked(body: EstimateRequest) -> TrainingBody | None:
    """Return how the model is trained: by its task, and by `training` before it."""
    of_task = trainings.estimated(body)
    if not of_task and body.training is None:
        return None
    more = body.training.model_dump(exclude_unset=True) if body.training else {}
    usual = {"lora_rank": trainings.LORA_RANK} if more.get("scenario") == "lora" else {}
    return TrainingBody(**{**usual, **of_task, **more})


def _estimate(
    named: resolve.Named, shape: ModelShape, body: EstimateRequest
) -> "Estimate":
    from optimizer.estimate import Ask, estimate

    try:
        return estimate(
            Ask(
                model=shape,
                device=DEVICES[named.hardware],
                workload=named.workload,
                sla=named.latency_sla,
                engine=named.engine,
                formats=named.formats,
                max_memory_bytes=body.max_memory_bytes,
            )
        )
    except HardwareError as error:
        raise Invalid("/hardware", str(error), error.code) from None


# -- models --------------------------------------------------------------------


def model_of(
    session: Session, tenant_id: str, ref: ModelRef
) -> tuple[str, str, ModelShape]:
    """Return name, source and sizes of a model. Raises Invalid.

    The tenant's own models come before shared ones, and those before published ones.
    """
    from optimizer.architectures import architecture

    if ref.path is not None:
        folder = catalog.allowed_folder(ref.path, "/model/path")
        return folder.name, "folder", _shape_at(folder, "/model/path", 0)
    name = ref.id or ref.uri or ""
    if ref.uri is not None:
        weights = hub.weights(session, tenant_id, ref.uri)
    else:
        weights = catalog.weights_named(session, tenant_id, name)
    if weights is not None:
        shape = _shape_at(weights.path, "/model", weights.stored_bytes)
        return name, "registered", shape
    published = architecture(name)
    if published is None:
        raise _unknown(name, catalog.model_names(session, tenant_id))
    return published.id, published.source, published.shape


def _shape_at(folder: Path, pointer: str, stored_bytes: int) -> ModelShape:
    from optimizer.configs import shape_of
    from optimizer.folder import read_json

    try:
        config: Mapping[str, Any] = read_json(
            folder, "config.json", resolve.MAX_CONFIG_BYTES
        )
        return shape_of(config, stored_bytes)
    except ModelError as error:
        raise Invalid(pointer, f"{folder.name}: {error}", error.code) from None


def _unknown(name: str, registered: list[str]) -> Invalid:
    from optimizer.architectures import PUBLISHED

    known = list(dict.fromkeys([*registered, *PUBLISHED]))
    close = difflib.get_close_matches(name.lower().rpartition("/")[2], known, n=3)
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    detail = (
        f"no model {name!r}; {meant}a model is one that was registered "
        f"({', '.join(registered[:20]) or 'none yet'}), a published one "
        f"({', '.join(PUBLISHED)}; owner/name works, too), or a folder, "
        '{"path": "/…"}'
    )
    return Invalid("/model", detail, "unknown_model", known)


def _training(body: TrainingBody) -> "Training":
    from optimizer.advice import Scenario
    from optimizer.training_memory import Arithmetic, Checkpointing, Optimizer, Training

    for field, kind in (
        ("scenario", Scenario),
        ("arithmetic", Arithmetic),
        ("optimizer", Optimizer),
        ("checkpointing", Checkpointing),
    ):
        known = [str(member) for member in kind]
        if getattr(body, field) not in known:
            given = getattr(body, field)
            close = difflib.get_close_matches(given, known, n=1)
            raise resolve.unknown(f"/training/{field}", field, given, known, close)
    return Training(
        arithmetic=Arithmetic(body.arithmetic),
        optimizer=Optimizer(body.optimizer),
        checkpointing=Checkpointing(body.checkpointing),
        **body.model_dump(
            exclude={"scenario", "arithmetic", "optimizer", "checkpointing"}
        ),
    )


# -- what cannot be --------------------------------------------------------------


def _refuse_beyond(found: "Estimate") -> None:
    """Raise Invalid where a target is under the physical limit of every stack."""
    from optimizer.targets import beyond

    out = beyond(found)
    if out is not None:
        raise Invalid(f"/latency_sla/{out.name}", out.said, "sla_below_physical_limit")


def _refuse_too_large(found: "Estimate") -> None:
    """Raise Invalid where no stack fits, saying by how much and what would."""
    if any(p.fits for p in found.priced):
        return
    least = min(found.priced, key=lambda p: p.ledger.total_bytes)
    workload, room = found.ask.workload, found.ask.room_bytes
    weights = least.ledger.bytes_of("weights")
    tokens = workload.prompt_tokens + workload.output_tokens
    needed = least.ledger.total_bytes
    said = (
        f"the smallest stack, {least.name}, needs {needed / 1e9:.1f} GB and a device "
        f"has {room / 1e9:.1f} GB"
    )
    if weights > room:
        more = f"its weights alone take {weights / 1e9:.1f} GB: raise tensor_parallel"
        pointer = "/workload/tensor_parallel"
    else:
        more = _what_fits(least, tokens, workload.batch_size)
        pointer = "/workload/batch_size"
    raise Invalid(pointer, f"{said}; {more}", "does_not_fit_memory")


def _what_fits(least: "Priced", tokens: int, batch: int) -> str:
    """Say the largest batch of as many tokens, and the longest context of the batch."""
    by_batch = (
        f"at most {least.largest_batch} sequences of {tokens} tokens fit"
        if least.largest_batch
        else f"no sequence of {tokens} tokens fits"
    )
    if not least.largest_context:
        return f"{by_batch}, and {batch} at no length"
    return f"{by_batch}; {batch} of at most {least.largest_context} tokens would"
