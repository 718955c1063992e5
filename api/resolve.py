"""From what a caller wrote to what the optimizer reads: every name is looked up here."""

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from sqlalchemy.orm import Session

from api import catalog, datasets, hub, stack_requests, trainings
from api.errors import Invalid
from api.schemas import DataRef, ModelRef, OptimizeRequest, WorkloadBody
from optimizer.abilities import FORMATS, unusable
from optimizer.datasets import DISTRIBUTIONS
from optimizer.errors import HardwareError, ModelError
from optimizer.hardware import DEVICES, LOCAL, closest, device
from optimizer.spec import (
    ENGINES,
    EXPORTS,
    ROUNDINGS,
    SWEPT_FORMATS,
    TASKS,
    WORKLOADS,
    LatencySla,
    OptimizeSpec,
    Workload,
)
from optimizer.stack import ModelShape
from optimizer.stack_file import StackFile
from optimizer.training.spec import TASKS as TRAINED, TrainingSpec

MAX_CONFIG_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Named:
    """A request with every name looked up but the model's, which may mean reading it."""

    task: str
    hardware: str  # an id of the catalog, or `local`
    formats: tuple[str, ...]
    engine: str
    workload: Workload
    latency_sla: LatencySla
    rounding: str
    exports: tuple[str, ...]
    stack: StackFile | None
    stack_use: str
    data_distribution: str
    dataset_path: str | None  # None: built in


def names(session: Session, tenant_id: str, request: OptimizeRequest) -> Named:
    """Return the request with every name but the model's. Raises Invalid."""
    task = _known("/task", "task", request.task.type, (*TASKS, *TRAINED))
    hardware = hardware_id(request.hardware.id)
    formats, engine = _search(request, hardware)
    name, data_path = _data(session, tenant_id, request.data_distribution)
    sla, file = request.latency_sla, stack_requests.read(request.stack)
    return Named(
        task=task,
        hardware=hardware,
        formats=formats,
        engine=engine,
        workload=_workload(request.workload, task),
        latency_sla=LatencySla.at(**sla.model_dump()) if sla else LatencySla(),
        rounding=_rounding(request, file),
        exports=_exports(request.exports),
        stack=file,
        stack_use=stack_requests.use(request.stack),
        data_distribution=name,
        dataset_path=data_path,
    )


def to_spec(session: Session, tenant_id: str, request: OptimizeRequest) -> OptimizeSpec:
    """Return the request with every name resolved. Raises Invalid naming the field."""
    named = names(session, tenant_id, request)
    training = trainings.training(request)
    model = _model(session, tenant_id, request.model)  # last: it may read files
    data, file = request.data_distribution, named.stack
    if model is not None:
        _require_fits(model, named, request, training)
    elif file is not None:
        detail = "a stack is for a model that is here: fetch it with a job without one"
        raise Invalid("/stack", detail)
    return OptimizeSpec(
        model=model.name if model else request.model.uri or "",
        model_path=str(model.path) if model else "",  # "": a worker fetches it
        model_sha256=model.sha256 if model else "",
        hardware=named.hardware,
        latency_sla=named.latency_sla,
        workload=named.workload,
        task=named.task,
        data_distribution=named.data_distribution,
        dataset_path=named.dataset_path,
        formats=stack_requests.formats(named.formats, file),
        engine=named.engine,
        rounding=named.rounding,
        calibration_tokens=data.calibration_tokens,
        validation_tokens=data.validation_tokens,
        sequence_tokens=data.sequence_tokens,
        max_memory_bytes=request.max_memory_bytes,
        seed=data.seed,
        exports=() if training else named.exports,
        stack=file.stack.to_json() if file else None,
        stack_use=named.stack_use,
        training=training,
    )


def _require_fits(
    model: catalog.Weights,
    named: Named,
    request: OptimizeRequest,
    training: TrainingSpec | None,
) -> None:
    """Raise Invalid where a model does not take what is asked of it."""
    if training is not None:
        longest, place = training.sequence_tokens, "/task/sequence_tokens"
        catalog.require_sequences(model, longest, place)
    else:
        longest = request.data_distribution.sequence_tokens
        catalog.require_sequences(model, longest, "/data_distribution")
    _require_served(model, named)
    if named.stack is not None:
        stack_requests.require(named.stack, model, named.hardware, named.engine)


def hardware_id(name: str) -> str:
    """Return the catalog's id for an id or an alias. Raises Invalid."""
    if name == LOCAL:
        return LOCAL
    try:
        return device(name).id
    except HardwareError:
        known = [*DEVICES, LOCAL]
        raise unknown("/hardware", "hardware", name, known, closest(name)) from None


def _known(pointer: str, what: str, name: str, known: Collection[str]) -> str:
    if name in known:
        return name
    close = difflib.get_close_matches(name, known, n=3)
    raise unknown(pointer, what, name, known, close)


def unknown(
    pointer: str,
    what: str,
    name: str,
    known: Collection[str],
    close: Sequence[str] = (),
) -> Invalid:
    """Return the refusal of a name, with the closest and all that there are."""
    listed = ", ".join(list(known)[:100]) or "none yet"
    label = what.replace("_", " ")
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    detail = f"no {label} {name!r}; {meant}there are: {listed}"
    return Invalid(pointer, detail, f"unknown_{what}", list(known))


def _search(request: OptimizeRequest, hardware: str) -> tuple[tuple[str, ...], str]:
    formats = request.search.formats or SWEPT_FORMATS
    for index, name in enumerate(formats):
        _known(f"/search/formats/{index}", "format", name, FORMATS)
    inner, outer = request.search.engine, request.engine
    if inner and outer and inner != outer:
        raise Invalid("/engine", "engine and search.engine differ: give one")
    pointer = "/engine" if outer else "/search/engine"
    engine = _known(pointer, "engine", outer or inner or "any", ENGINES)
    _require_some(formats, hardware, engine)
    return tuple(dict.fromkeys(formats)), engine


def _require_some(formats: Sequence[str], hardware: str, engine: str) -> None:
    """Raise Invalid where a device has none of the formats; `local` is not known yet."""
    if hardware == LOCAL:
        return
    reasons = {f: unusable(device(hardware), engine, f) for f in formats}
    if None in reasons.values():
        return
    usable = [f for f in FORMATS if unusable(device(hardware), engine, f) is None]
    said = "; ".join(f"{fmt}: {reason}" for fmt, reason in reasons.items())
    detail = (
        f"{hardware} has none of the formats asked for (engine {engine}): {said}; "
        f"it has {', '.join(usable)}"
    )
    raise Invalid("/search/formats", detail, "unsupported_precision", usable)


def _rounding(request: OptimizeRequest, file: StackFile | None) -> str:
    """Return the rounding that is asked for, or else that of the stack."""
    if file is not None and "rounding" not in request.search.model_fields_set:
        return file.rounding
    asked = request.search.rounding
    return _known("/search/rounding", "rounding", asked, ROUNDINGS)


def _exports(names: Sequence[str] | None) -> tuple[str, ...]:
    for index, name in enumerate(names or ()):
        _known(f"/exports/{index}", "export", name, EXPORTS)
    return EXPORTS if names is None else tuple(dict.fromkeys(names))


def _workload(body: WorkloadBody, task: str) -> Workload:
    usual = WORKLOADS.get(task, Workload())  # a training serves nothing
    return replace(usual, **body.model_dump(exclude_none=True))


def _require_served(model: catalog.Weights, named: Named) -> None:
    """Raise Invalid where the config says that an engine, or devices, do not serve it."""
    from optimizer.as_exported import require_class
    from optimizer.configs import shape_of
    from optimizer.folder import read_json

    if named.workload.tensor_parallel == 1 and named.engine != "vllm":
        return
    try:
        shape = shape_of(read_json(model.path, "config.json", MAX_CONFIG_BYTES))
    except ModelError:
        return  # the worker reads the network itself, and refuses by the same rule
    require_split(shape, named)
    try:
        require_class(shape.architecture, named.engine, named.exports)
    except HardwareError as error:
        raise Invalid("/engine", str(error), error.code) from None


def require_split(shape: ModelShape, named: Named) -> None:
    """Raise Invalid where devices do not serve a model together."""
    ways = named.workload.tensor_parallel
    if ways == 1:
        return
    from optimizer.parallel import ALONE, refusal  # loads the kernel tables

    local = named.hardware == LOCAL
    no = ALONE if local else refusal(shape, device(named.hardware), ways)
    if no is not None:
        raise Invalid("/workload/tensor_parallel", no, "unsupported_hardware")


def _data(session: Session, tenant_id: str, ref: DataRef) -> tuple[str, str | None]:
    name = ref.name or ref.dataset_id or ""
    if name in DISTRIBUTIONS:
        return name, None
    dataset = datasets.find(session, tenant_id, name)
    if dataset is None:
        known = [*DISTRIBUTIONS, *datasets.names(session, tenant_id)]
        raise unknown("/data_distribution", "data_distribution", name, known)
    return dataset.name, dataset.path


def _model(session: Session, tenant_id: str, ref: ModelRef) -> catalog.Weights | None:
    """Return a model that is here. None: a worker fetches it. Raises Invalid."""
    if ref.uri is not None:
        return hub.weights(session, tenant_id, ref.uri)
    if ref.path is not None:
        folder = catalog.allowed_folder(ref.path, "/model/path")
        return catalog.weights_at(folder, "/model/path")
    name = ref.id or ""
    found = catalog.weights_named(session, tenant_id, name)
    if found is None:
        known = catalog.model_names(session, tenant_id)
        raise unknown("/model", "model", name, known)
    return found
