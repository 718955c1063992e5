"""stack.json: a job's answer for machines, written, read back and held against a model.

    {"schema": "precision.stack/1",
     "model": {"name": "smollm2", "sha256": "4f0c…"},
     "hardware": "h100",
     "rounding": "nearest",
     "stack": {"layers.0.attn_qkv": "fp8_e4m3_token", …, "lm_head": "bf16"},
     "padding": {}}

A person may have edited it, so reading takes nothing for granted and names every fault
at once. `data/schemas/stack-1.json` says the same for programs.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from optimizer import strict_json
from optimizer.errors import SpecError
from optimizer.hardware import Device
from optimizer.padding import PADDING_ENGINES, padded
from optimizer.rules import refusals
from optimizer.spec import ROUNDINGS
from optimizer.stack import Choice, ModelShape, Site, Stack, choice_named

SCHEMA = "precision.stack/1"
MAX_BYTES = 4 << 20  # a model of 20,000 sites needs one
NAMED_FAULTS = 20  # in a message; `faults` has all of them
FIELDS = frozenset({"schema", "model", "hardware", "rounding", "stack", "padding"})
PADDING = ("n", "k", "padded_n", "padded_k")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, and where: a JSON pointer into the file."""

    pointer: str
    message: str


class StackFileError(SpecError):
    """A stack.json that cannot be used; `faults` are all that was found."""

    code = "bad_stack"

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = tuple(faults)
        said = [f"{f.pointer or '/'}: {f.message}" for f in faults[:NAMED_FAULTS]]
        if len(faults) > NAMED_FAULTS:
            said.append(f"and {len(faults) - NAMED_FAULTS} more")
        super().__init__(f"stack.json: {'; '.join(said)}")


@dataclass(frozen=True, slots=True)
class StackFile:
    """What a stack.json says."""

    stack: Stack
    model_sha256: str
    model: str = ""  # the name callers used
    hardware: str = ""  # the device it was chosen for
    rounding: str = "nearest"
    padding: Mapping[str, Mapping[str, int]] = field(
        default_factory=lambda: MappingProxyType({})
    )

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "schema": SCHEMA,
            "model": {"name": self.model, "sha256": self.model_sha256},
            "hardware": self.hardware,
            "rounding": self.rounding,
            "stack": self.stack.to_json(),
            "padding": {site: dict(sizes) for site, sizes in self.padding.items()},
        }


def of_document(document: Mapping[str, Any]) -> StackFile:
    """Return the chosen stack of a report document."""
    rows = document["sites"]
    return StackFile(
        stack=Stack.from_json({row["site"]: row["choice"] for row in rows}),
        model_sha256=document["model"]["sha256"],
        model=document["model"]["name"],
        hardware=document["hardware"]["id"],
        rounding=document["rounding"]["used"],
        padding={row["site"]: row["padding"] for row in rows if row["padding"]},
    )


def read(content: bytes) -> StackFile:
    """Return what a file says. Raises StackFileError with every fault in it."""
    if len(content) > MAX_BYTES:
        raise StackFileError([Fault("", f"over {MAX_BYTES} bytes")])
    try:
        found = strict_json.parse(content)
    except ValueError as error:
        raise StackFileError([Fault("", f"cannot be read: {error}")]) from None
    return from_json(found)


def from_json(found: Mapping[str, Any]) -> StackFile:
    """Return what parsed JSON says. Raises StackFileError with every fault in it."""
    if found.get("schema") != SCHEMA:
        said = str(found.get("schema"))[:80]
        raise StackFileError([Fault("/schema", f"{said!r}, not {SCHEMA!r}")])
    faults = [*_shape_faults(found)]
    choices: dict[Site, Choice] = {}
    if isinstance(found.get("stack"), dict):
        for name, choice in found["stack"].items():
            try:
                site = Site.parse(name)
                choices[site] = choice_named(site.component, choice)
            except SpecError as error:
                faults.append(Fault(f"/stack/{name[:80]}", str(error)))
    if faults:
        raise StackFileError(faults)
    return StackFile(
        stack=Stack(MappingProxyType(choices)),
        model_sha256=found["model"]["sha256"],
        model=found["model"].get("name", ""),
        hardware=found.get("hardware", ""),
        rounding=found.get("rounding", "nearest"),
        padding=found.get("padding", {}),
    )


def _shape_faults(found: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield what is wrong before any site is looked at."""
    for name in sorted(found.keys() - FIELDS):
        yield Fault(
            f"/{name[:80]}", f"unknown; it may have {', '.join(sorted(FIELDS))}"
        )
    yield from _model_faults(found.get("model"))
    if not isinstance(found.get("hardware", ""), str):
        yield Fault("/hardware", "not the id of a device")
    if found.get("rounding", "nearest") not in ROUNDINGS:
        yield Fault("/rounding", f"not one of {', '.join(ROUNDINGS)}")
    stack = found.get("stack")
    if not isinstance(stack, dict) or not stack:
        yield Fault("/stack", "not an object with a choice for every site")
    elif not all(isinstance(choice, str) for choice in stack.values()):
        wrong = next(k for k, v in stack.items() if not isinstance(v, str))
        yield Fault(f"/stack/{wrong[:80]}", "not the name of a choice")
    yield from _padding_faults(found.get("padding", {}))


def _model_faults(model: object) -> Iterator[Fault]:
    if not isinstance(model, dict):
        yield Fault("/model", "not an object with the sha256 of a model")
        return
    for name in sorted(model.keys() - {"name", "sha256"}):
        yield Fault(f"/model/{name[:80]}", "unknown; it may have name and sha256")
    if not isinstance(model.get("name", ""), str):
        yield Fault("/model/name", "not a name")
    sha256 = model.get("sha256")
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        yield Fault("/model/sha256", "not 64 hexadecimal digits")


def _padding_faults(padding: object) -> Iterator[Fault]:
    if not isinstance(padding, dict):
        yield Fault("/padding", "not an object of sizes by site")
        return
    for site, sizes in padding.items():
        right = isinstance(sizes, dict) and set(sizes) == {*PADDING}
        if not right or not all(type(n) is int and n > 0 for n in sizes.values()):
            yield Fault(f"/padding/{site[:80]}", f"not {', '.join(PADDING)} above 0")


# Against a model


def check(
    file: StackFile,
    shape: ModelShape | None,
    model_sha256: str,
    device: Device | None = None,
    engine: str = "any",
) -> None:
    """Raise StackFileError naming all that keeps a stack from being this model's.

    Another model; sites that it does not have, or has and the stack has not; and with
    a device what cannot run there, with the reason. Without a shape, the model alone.
    """
    faults = [*_model_mismatch(file, model_sha256)]
    if shape is not None:
        faults += site_faults(file.stack, shape)
    if shape is not None and device is not None:
        faults += _unsupported(file.stack, shape, device, engine)
    if faults:
        raise StackFileError(faults)


def _model_mismatch(file: StackFile, model_sha256: str) -> Iterator[Fault]:
    if file.model_sha256 != model_sha256:
        named = f" ({file.model[:80]})" if file.model else ""
        yield Fault(
            "/model/sha256",
            f"made for the model {file.model_sha256[:12]}…{named}, and this is "
            f"{model_sha256[:12]}…: optimize this one, and use its stack",
        )


def site_faults(stack: Stack, shape: ModelShape) -> Iterator[Fault]:
    """Yield the sites that a model has not, and those that the stack lacks."""
    sites = {s.site for s in shape.sites}
    for site in sorted(stack.choices.keys() - sites):
        yield Fault(f"/stack/{site}", f"no such site in {shape.architecture}")
    for site in sorted(sites - stack.choices.keys()):
        yield Fault(f"/stack/{site}", "missing: every site has a choice")


def _unsupported(
    stack: Stack, shape: ModelShape, device: Device, engine: str
) -> Iterator[Fault]:
    """Yield the choices that the device or the engine refuses, padded as it would be."""
    for one in shape.sites:
        choice = stack.choices.get(one.site)
        if choice is None:
            continue
        named = tuple({p.format for p in (choice.input, choice.weight) if p})
        run = padded(one, choice) if engine in PADDING_ENGINES else one
        reason = refusals(device, engine, run, named)[choice]
        if reason is not None:
            yield Fault(f"/stack/{one.site}", f"{choice.name}: {reason}")
