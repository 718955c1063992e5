"""Seconds of a stack by its kinds of sites: `cost.stack_cost`'s, layers priced once."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from optimizer import kernels
from optimizer.cost import cost_within, decoded
from optimizer.hardware import Device
from optimizer.kernels import Basis, Tables
from optimizer.ledger import Kinds
from optimizer.roofline import frame
from optimizer.spec import Workload
from optimizer.stack import ModelShape


@dataclass(frozen=True, slots=True)
class Seconds:
    """A sum over sites, and where it comes from."""

    seconds: float
    basis: Basis  # of most of it
    error: float  # relative; the sites' own, weighted by their seconds; NaN: unknown
    shares: Mapping[Basis, float] = field(hash=False)  # 1 in all


@dataclass(frozen=True, slots=True)
class Latency:
    """Of one decode step, and of the prefill of the whole batch."""

    per_token: Seconds
    first_token: Seconds

    @property
    def per_token_s(self) -> float:
        """Seconds in which every sequence gets one token."""
        return self.per_token.seconds

    @property
    def first_token_s(self) -> float:
        """Seconds until every sequence has its first token."""
        return self.first_token.seconds


def latency(
    alike: Kinds,
    model: ModelShape,
    device: Device,
    workload: Workload,
    tables: Tables | None = None,
) -> Latency:
    """Return what `stack_cost` returns. Raises HardwareError as `site_cost` does."""
    asked = device, workload, frame(model), tables or kernels.tables(device.id)
    found = [
        (count, cost_within(shape, choice, *asked))
        for (shape, choice), count in alike.items()
    ]
    return Latency(
        _sum([(n * c.per_token_s, c.basis, c.error) for n, c in found]),
        _sum([(n * c.first_token_s, c.first_basis, c.first_error) for n, c in found]),
    )


def per_token_s(
    alike: Kinds,
    model: ModelShape,
    device: Device,
    workload: Workload,
    tables: Tables | None = None,
) -> float:
    """Return the seconds of a decode step alone: half of the work of `latency`."""
    asked = device, workload, frame(model), tables or kernels.tables(device.id)
    return math.fsum(
        count * decoded(shape, choice, *asked).seconds
        for (shape, choice), count in alike.items()
    )


def _sum(parts: Sequence[tuple[float, Basis, float]]) -> Seconds:
    total = math.fsum(seconds for seconds, _, _ in parts)
    by_basis = {b: math.fsum(s for s, basis, _ in parts if basis is b) for b in Basis}
    shares = {basis: s / total for basis, s in by_basis.items() if s}
    return Seconds(
        total,
        max(shares, key=lambda basis: shares[basis]),
        math.fsum(s * error for s, _, error in parts) / total,
        MappingProxyType(shares),
    )
