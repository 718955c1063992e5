"""What sampled steps show of the layers' outputs and FP8 values, by hooks.

Hooks are there in sampled steps alone. A module that multiplies in FP8 tells its scales
by a method `fp8_scales() -> {"input": (scale, format), "gradient": …}`, where a value is
q · scale: from that follows how many values lie beyond the format, and how many become
zero. Of Transformer Engine's modules the scales are read where they keep them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from optimizer.formats import Format
from optimizer.training.health import LayerReading
from optimizer.training.metrics import output_look, plain_name
from optimizer.training.te_scales import keeps_scales, reads_its_input, te_scales

Scales = Mapping[str, tuple[float, Format]]


@runtime_checkable
class ScaledModule(Protocol):
    """A module that multiplies in FP8, with one scale for each tensor."""

    def fp8_scales(self) -> Scales:
        """Return (scale, format) of "input", "weight" and "gradient": x ≈ q · scale."""


@dataclass(slots=True)
class _Seen:
    """Counts of one layer over the batches of a step, on its device until it ends."""

    outputs: list[Tensor] = field(default_factory=list)  # (largest, nonfinite)
    values: dict[str, list[Tensor]] = field(default_factory=dict)
    scales: Scales = field(default_factory=dict)


class OutputWatch:
    """Looks at the outputs of every layer with weights while it is armed."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {
            plain_name(name): module
            for name, module in model.named_modules()
            if next(module.parameters(recurse=False), None) is not None
        }
        self._seen: dict[str, _Seen] = {}
        self._handles: list[RemovableHandle] = []

    def arm(self) -> None:
        """Hook every layer."""
        self.disarm()
        for name, module in self._modules.items():
            seen = self._seen[name] = _Seen()
            hooks = [_output_hook(seen)]
            if isinstance(module, ScaledModule):
                hooks.append(_scaled_hook(module.fp8_scales, seen))
            elif keeps_scales(module):
                counts = reads_its_input(module)
                scales = partial(te_scales, module)
                hooks.append((_scaled_hook if counts else _noted_hook)(scales, seen))
            self._handles += [module.register_forward_hook(hook) for hook in hooks]

    def disarm(self) -> dict[str, LayerReading]:
        """Take the hooks away; return what was seen since `arm`."""
        for handle in self._handles:
            handle.remove()
        seen, self._seen, self._handles = self._seen, {}, []
        return {name: _reading(s) for name, s in seen.items() if s.outputs}


def _output_hook(seen: _Seen) -> Any:
    def hook(module: nn.Module, args: object, y: object) -> None:
        first = y[0] if isinstance(y, tuple) else y
        if not torch.is_grad_enabled():  # an evaluation
            return
        if isinstance(first, Tensor) and first.is_floating_point():
            seen.outputs.append(output_look(first))

    return hook


def _noted_hook(scales: Callable[[], Scales], seen: _Seen) -> Any:
    """Note the scales alone: what they are of is not seen from outside."""

    def hook(module: nn.Module, args: tuple[Tensor, ...], y: object) -> None:
        if torch.is_grad_enabled():
            seen.scales = dict(scales())

    return hook


def _scaled_hook(scales: Callable[[], Scales], seen: _Seen) -> Any:
    """Count what lies beyond the scales that the module multiplies with."""

    def count(tensor: str, x: Tensor | None) -> None:
        seen.scales = dict(scales())  # after the product: those that it used
        if x is not None and tensor in seen.scales:
            scale, fmt = seen.scales[tensor]
            seen.values.setdefault(tensor, []).append(_beyond(x, scale, fmt))

    def hook(module: nn.Module, args: tuple[Tensor, ...], y: Any) -> None:
        if not torch.is_grad_enabled():
            return
        count("input", args[0])
        count("weight", getattr(module, "weight", None))
        first: Tensor = y[0] if isinstance(y, tuple) else y
        if first.requires_grad:
            first.register_hook(lambda gradient: count("gradient", gradient))

    return hook


def _beyond(x: Tensor, scale: float, fmt: Format) -> Tensor:
    """Return (values beyond the format, values that become zero, values not zero)."""
    a = x.detach().float().abs() / scale
    half = fmt.smallest_subnormal / 2  # a tie, and zero is even
    counts = ((a > fmt.max), (a > 0) & (a <= half), a > 0)
    return torch.stack([c.count_nonzero() for c in counts])


def _reading(seen: _Seen) -> LayerReading:
    largest, nonfinite = torch.stack(seen.outputs).T.tolist()
    counts = {t: torch.stack(rows).sum(0).tolist() for t, rows in seen.values.items()}
    return LayerReading(
        output_amax=max(largest),
        output_nonfinite=int(sum(nonfinite)),
        scales={tensor: scale for tensor, (scale, _) in seen.scales.items()},
        overflowed={tensor: over for tensor, (over, _, _) in counts.items()},
        flushed={t: zero / max(alive, 1) for t, (_, zero, alive) in counts.items()},
    )
