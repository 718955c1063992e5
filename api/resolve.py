"""From what a caller wrote to what the optimizer reads: every name is looked up here."""

from collections.abc import Collection
from dataclasses import replace

from sqlalchemy.orm import Session

from api import catalog
from api.errors import Invalid
from api.schemas import DataRef, ModelRef, OptimizeRequest, WorkloadBody
from optimizer.errors import HardwareError
from optimizer.hardware import DEVICES, LOCAL, device
from optimizer.spec import (
    ENGINES,
    ROUNDINGS,
    SWEPT_FORMATS,
    TASKS,
    WORKLOADS,
    LatencySla,
    OptimizeSpec,
    Workload,
)
from optimizer.stack import CHOICES

FORMATS_IN_USE = tuple(
    sorted(
        {
            operand.format
            for choices in CHOICES.values()
            for choice in choices
            for operand in (choice.input, choice.weight)
            if operand is not None
        }
    )
)


def to_spec(session: Session, tenant_id: str, request: OptimizeRequest) -> OptimizeSpec:
    """Return the request with every name resolved. Raises Invalid naming the field."""
    task = _known("/task", "task", request.task.type, TASKS)
    hardware = hardware_id(request.hardware.id)
    formats, engine = _search(request)
    name, data_path = _data(session, tenant_id, request.data_distribution)
    model = _model(session, tenant_id, request.model)  # last: it may read files
    sequence_tokens = request.data_distribution.sequence_tokens
    catalog.require_sequences(model, sequence_tokens, "/data_distribution")
    sla = request.latency_sla
    return OptimizeSpec(
        model=model.name,
        model_path=str(model.path),
        model_sha256=model.sha256,
        hardware=hardware,
        latency_sla=LatencySla(**sla.model_dump()) if sla else LatencySla(),
        workload=_workload(request.workload, task),
        task=task,
        data_distribution=name,
        dataset_path=data_path,
        formats=formats,
        engine=engine,
        rounding=_known(
            "/search/rounding", "rounding", request.search.rounding, ROUNDINGS
        ),
        calibration_tokens=request.data_distribution.calibration_tokens,
        validation_tokens=request.data_distribution.validation_tokens,
        sequence_tokens=sequence_tokens,
        max_memory_bytes=request.max_memory_bytes,
        seed=request.data_distribution.seed,
    )


def hardware_id(name: str) -> str:
    """Return the catalog's id for an id or an alias. Raises Invalid."""
    if name == LOCAL:
        return LOCAL
    try:
        return device(name).id
    except HardwareError:
        return _known("/hardware", "hardware", name, (*DEVICES, LOCAL))


def _known(pointer: str, what: str, name: str, known: Collection[str]) -> str:
    if name in known:
        return name
    raise unknown(pointer, what, name, known)


def unknown(pointer: str, what: str, name: str, known: Collection[str]) -> Invalid:
    """Return the refusal of a name, with the names that there are."""
    listed = ", ".join(list(known)[:100]) or "none yet"
    label = what.replace("_", " ")
    detail = f"no {label} {name!r}; there are: {listed}"
    return Invalid(pointer, detail, f"unknown_{what}", list(known))


def _search(request: OptimizeRequest) -> tuple[tuple[str, ...], str]:
    formats = request.search.formats or SWEPT_FORMATS
    for index, name in enumerate(formats):
        _known(f"/search/formats/{index}", "format", name, FORMATS_IN_USE)
    inner, outer = request.search.engine, request.engine
    if inner and outer and inner != outer:
        raise Invalid("/engine", "engine and search.engine differ: give one")
    pointer = "/engine" if outer else "/search/engine"
    engine = _known(pointer, "engine", outer or inner or "any", ENGINES)
    return tuple(dict.fromkeys(formats)), engine


def _workload(body: WorkloadBody, task: str) -> Workload:
    return replace(WORKLOADS[task], **body.model_dump(exclude_none=True))


def _data(session: Session, tenant_id: str, ref: DataRef) -> tuple[str, str | None]:
    name = ref.name or ref.dataset_id or ""
    if name in catalog.DISTRIBUTIONS:
        return name, None
    dataset = catalog.dataset(session, tenant_id, name)
    if dataset is None:
        known = [*catalog.DISTRIBUTIONS, *catalog.dataset_names(session, tenant_id)]
        raise unknown("/data_distribution", "data_distribution", name, known)
    return dataset.name, dataset.path


def _model(session: Session, tenant_id: str, ref: ModelRef) -> catalog.Weights:
    if ref.path is not None:
        folder = catalog.allowed_folder(ref.path, "/model/path")
        return catalog.weights_at(folder, "/model/path")
    name = ref.id or ""
    found = catalog.weights_named(session, tenant_id, name)
    if found is None:
        known = catalog.model_names(session, tenant_id)
        raise unknown("/model", "model", name, known)
    return found
