"""The endpoints of the devices: what each can do, and the reason for each "no"."""

from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict

from api import tallies
from api.access import DB, Caller
from api.errors import NotFound
from api.strict import StrictRoute
from api.tallies import Load
from optimizer import abilities
from optimizer.abilities import SHAPE_RULES, Answer, Status
from optimizer.errors import HardwareError
from optimizer.hardware import DEVICES, LOCAL, Device, device
from optimizer.spec import ENGINES
from optimizer.stack import Choice, Component

router = APIRouter(prefix="/v1", route_class=StrictRoute, tags=["catalog"])


class DeviceSummary(BaseModel):
    """A device of the catalogue, in SI units; null: nobody states it.

    `peak_flops` are dense FLOP/s by format, `ridge_flop_per_byte` where compute and
    bandwidth balance, `link_bytes_s` to its peers in one direction. The figures of
    `local`, the worker's own device, are known only to a job that ran there.
    `queue_depth` are jobs for the device that wait, and `running` those that workers
    have, of all tenants together; it is `busy` while there are any.
    """

    id: str
    object: Literal["hardware"] = "hardware"
    name: str
    aliases: list[str] = []
    arch: str | None = None
    compute_capability: str | None = None
    peak_flops: dict[str, float] = {}
    ridge_flop_per_byte: dict[str, float] = {}
    bandwidth_bytes_s: float | None = None
    memory_bytes: int | None = None
    memory_type: str | None = None
    tdp_w: float | None = None
    link: str | None = None
    link_bytes_s: float | None = None
    native_formats: list[str] = []
    status: Literal["idle", "busy"]
    queue_depth: int
    running: int
    links: dict[str, str]


class UnitsView(BaseModel):
    """What multiplies: no dense peak exceeds count × clock × FLOP per clock."""

    model_config = ConfigDict(from_attributes=True)

    count: int
    clock_hz: float
    flop_per_clock: dict[str, float]
    source: str


class AnswerView(BaseModel):
    """`supported`, `weight_only` (narrow in memory, computed in 16 bits),
    `other_kernel` (runs in an engine, on no kernel of the vendor: jobs do not choose
    it) or `refused`; and why.
    """

    model_config = ConfigDict(from_attributes=True)

    status: Status
    reason: str | None


class MatmulView(AnswerView):
    """A pair of narrow operands, and what shares a scale in them."""

    input: str
    weight: str
    scaling: str


class ChoiceView(AnswerView):
    """What a site may get: the answer by device, and by engines that differ."""

    choice: str
    input: str
    weight: str | None
    output: str
    engines: dict[str, AnswerView]


class DeviceView(DeviceSummary):
    """A device with all that it can do, the reason for each "no", and the sources.

    `stored_weights` and `stored_cache` are narrow in memory and widened as they are
    read. `components` answers for sites whose sizes are multiples of everything;
    `shape_rules` says what sizes must be.
    """

    units: UnitsView | None = None
    stored_weights: list[str] = []
    stored_cache: list[str] = []
    matmuls: list[MatmulView] = []
    components: dict[Component, list[ChoiceView]] = {}
    shape_rules: dict[str, str] = SHAPE_RULES
    notes: list[str] = []
    sources: list[str] = []


class DeviceList(BaseModel):
    """All devices, on one page."""

    object: Literal["list"] = "list"
    data: list[DeviceSummary]
    has_more: bool = False
    next_cursor: None = None


@router.get("/hardware")
def list_hardware(caller: Caller, session: DB) -> DeviceList:
    """List the devices that a request may name. `local` is the worker's own."""
    loads = tallies.loads(session)
    every = [
        DeviceSummary(**_facts(found), **_load(loads, found.id))
        for found in DEVICES.values()
    ]
    return DeviceList(data=[*every, DeviceSummary(**_LOCAL, **_load(loads, LOCAL))])


@router.get("/hardware/{name}")
def get_hardware(name: str, caller: Caller, session: DB) -> DeviceView:
    """Return a device by its id or an alias: what it can do, and why not the rest."""
    loads = tallies.loads(session)
    if name == LOCAL:
        return DeviceView(**_LOCAL, **_load(loads, LOCAL), notes=_LOCAL_NOTES)
    try:
        found = device(name)
    except HardwareError as error:
        raise NotFound(str(error)) from None
    return _view(found, _load(loads, found.id))


_LOCAL: dict[str, Any] = {
    "id": LOCAL,
    "name": "the worker's own device, measured when a job runs",
    "links": {"self": f"/v1/hardware/{LOCAL}"},
}
_LOCAL_NOTES = ["what it can do is unknown until a worker has measured it"]


def _facts(found: Device) -> dict[str, Any]:
    peaks = dict(found.peak_flops)
    return {
        "id": found.id,
        "name": found.name,
        "aliases": list(found.aliases),
        "arch": found.arch,
        "compute_capability": found.compute_capability,
        "peak_flops": peaks,
        "ridge_flop_per_byte": {
            fmt: peak / found.bandwidth_bytes_s for fmt, peak in peaks.items()
        },
        "bandwidth_bytes_s": found.bandwidth_bytes_s,
        "memory_bytes": found.memory_bytes,
        "memory_type": found.memory_type,
        "tdp_w": found.tdp_w,
        "link": found.link,
        "link_bytes_s": found.link_bytes_s,
        "native_formats": sorted(found.native),
        "links": {"self": f"/v1/hardware/{found.id}"},
    }


def _load(loads: dict[str, Load], name: str) -> dict[str, Any]:
    there = loads.get(name, Load())
    status = "busy" if there.queued or there.running else "idle"
    return {"status": status, "queue_depth": there.queued, "running": there.running}


def _view(found: Device, load: dict[str, Any]) -> DeviceView:
    units = UnitsView.model_validate(found.units) if found.units else None
    return DeviceView(
        **_facts(found),
        **load,
        units=units,
        stored_weights=sorted(found.support.stored_weights),
        stored_cache=sorted(found.support.stored_cache),
        matmuls=[
            MatmulView(
                input=pair.input,
                weight=pair.weight,
                scaling=pair.scaling,
                status=answer.status,
                reason=answer.reason,
            )
            for pair, answer in abilities.matmuls(found).items()
        ],
        components=_components(found),
        notes=list(found.notes),
        sources=[*found.sources, *found.support.sources],
    )


def _components(found: Device) -> dict[Component, list[ChoiceView]]:
    by_engine = {engine: abilities.choices(found, engine) for engine in ENGINES}
    return {
        component: [
            _choice(choice, {e: by_engine[e][component][choice] for e in ENGINES})
            for choice in answers
        ]
        for component, answers in by_engine["any"].items()
    }


def _choice(choice: Choice, answers: dict[str, Answer]) -> ChoiceView:
    plain = answers["any"]
    return ChoiceView(
        choice=choice.name,
        input=choice.input.format,
        weight=choice.weight.format if choice.weight else None,
        output=choice.output,
        status=plain.status,
        reason=plain.reason,
        engines={
            engine: AnswerView.model_validate(answer)
            for engine, answer in answers.items()
            if answer != plain
        },
    )
