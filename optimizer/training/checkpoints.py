"""A run in the middle, as bytes: continued from them it gives the same bytes.

Tensors lie in safetensors, everything else in its metadata as JSON. Nothing is pickled.
"""

import json
import math
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

from optimizer.errors import SpecError
from optimizer.training.exponents import Seen, SeenBy
from optimizer.training.trainer import Figures, Run
from optimizer.training.updates import Update

VERSION = 1
STATE = "state"  # the name of the tensor that holds the JSON


def to_bytes(run: Run) -> bytes:
    """Return everything that the rest of a run depends on."""
    tensors = {f"w.{n}": p.detach() for n, p in run.trained.items()}
    for index, state in run.optimizer.state_dict()["state"].items():
        tensors |= {f"o.{index}.{k}": v for k, v in state.items() if v is not None}
    plain = {
        "version": VERSION,
        "done": run.done,
        "scaler": run.scaler.state_dict() if run.scaler else None,
        "scales": {
            name: {"history": s.history, "now": s.now}
            for name, s in run.routed.scales.items()
        },
        "seen": _seen_json(run.recorder.seen),
        "figures": figures_json(run.figures),
    }
    return save({**_distinct(tensors), STATE: _text(plain)})


def resume(run: Run, written: bytes) -> None:
    """Put a run that has not begun where another one was.

    Raises SpecError where the bytes are of another version or another network.
    """
    tensors = load(written)
    plain = json.loads(bytes(tensors.pop(STATE).tolist()))
    if plain["version"] != VERSION:
        raise SpecError(f"a checkpoint of version {plain['version']}, not {VERSION}")
    _fill_weights(run, tensors)
    _fill_optimizer(run, tensors)
    if run.scaler:
        run.scaler.load_state_dict(plain["scaler"])
    for name, scales in run.routed.scales.items():
        scales.history = plain["scales"][name]["history"]
        scales.now = plain["scales"][name]["now"]
    run.done = plain["done"]
    run.recorder.seen = _seen(plain["seen"])
    run.figures = figures(plain["figures"])


def _fill_weights(run: Run, tensors: dict[str, Tensor]) -> None:
    names = {n.removeprefix("w.") for n in tensors if n.startswith("w.")}
    if names != run.trained.keys():
        other = min(names ^ run.trained.keys())
        raise SpecError(f"a checkpoint of another network: {other} is in one alone")
    for name, parameter in run.trained.items():
        parameter.detach().copy_(tensors[f"w.{name}"])


def _fill_optimizer(run: Run, tensors: dict[str, Tensor]) -> None:
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("o."):
            _, index, key = name.split(".", 2)
            state.setdefault(int(index), {})[key] = tensor
    groups = run.optimizer.state_dict()["param_groups"]
    run.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _distinct(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors refuses tensors that share memory."""
    return {name: t.detach().clone().contiguous() for name, t in tensors.items()}


def _text(plain: dict[str, Any]) -> Tensor:
    from torch import frombuffer, uint8

    written = json.dumps(plain, sort_keys=True, allow_nan=False).encode()
    return frombuffer(bytearray(written), dtype=uint8)


# -- figures as JSON --------------------------------------------------------------


def figures_json(found: Figures) -> dict[str, Any]:
    """Return figures as JSON; inf and NaN, which it has not, are null."""
    return {
        "losses": _finite(found.losses),
        "scales": _finite(found.scales),
        "skipped": [list(each) for each in found.skipped],
        "norms": {name: _finite(norms) for name, norms in found.norms.items()},
        "seen": _seen_json(found.seen),
        "updates": {name: _update(u) for name, u in found.updates.items()},
        "moved": {name: _or_none(value) for name, value in found.moved.items()},
        "held_out": _finite(found.held_out),
        "stopped": found.stopped,
    }


def figures(data: dict[str, Any]) -> Figures:
    """Inverse of `figures_json`; null is NaN."""
    return Figures(
        losses=_numbers(data["losses"]),
        scales=_numbers(data["scales"]),
        skipped=[(step, scale) for step, scale in data["skipped"]],
        norms={name: _numbers(norms) for name, norms in data["norms"].items()},
        seen=_seen(data["seen"]),
        updates={name: _updated(u) for name, u in data["updates"].items()},
        moved={n: math.nan if v is None else v for n, v in data["moved"].items()},
        held_out=_numbers(data["held_out"]),
        stopped=data["stopped"],
    )


def _update(update: Update) -> dict[str, Any]:
    return {
        k: _or_none(v) if isinstance(v, float) else v
        for k, v in update.to_json().items()
    }


def _updated(data: dict[str, Any]) -> Update:
    known: dict[str, Any] = {k: math.nan if v is None else v for k, v in data.items()}
    return Update(**known)


def _finite(values: list[float]) -> list[float | None]:
    return [_or_none(value) for value in values]


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _numbers(values: list[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def _seen_json(seen: SeenBy) -> dict[str, Any]:
    return {m: {r: s.to_json() for r, s in roles.items()} for m, roles in seen.items()}


def _seen(data: dict[str, Any]) -> SeenBy:
    return {
        m: {r: Seen.from_json(s) for r, s in roles.items()} for m, roles in data.items()
    }
