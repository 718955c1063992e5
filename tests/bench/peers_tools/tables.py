"""What came out: two tables, the times, and their figures."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from optimizer.metrics import bootstrap_interval
from optimizer.validate import BLOCK_TOKENS, BOOTSTRAP_SAMPLES

OURS, FUSED, APART = "ours", "ours, fused sites", "ours, each matrix"
BASELINES = ("first and last layers kept", "random")
Values = NDArray[np.float64]
Key = tuple[str, float]  # who or what, and at how many bits; 0: everything is narrow


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean in nats per token, with its block bootstrap interval over tokens."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Values) -> "Figure":
        low, high = bootstrap_interval(values, BLOCK_TOKENS, BOOTSTRAP_SAMPLES, seed=0)
        return cls(float(values.mean()), low, high)

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"

    @property
    def plain(self) -> list[float]:
        return [self.value, self.low, self.high]


@dataclass(frozen=True)
class Report:
    """KL of every held-out token and seconds, draw by draw.

    Who answered in some draws only is averaged over those.
    """

    bits: Sequence[float]
    peers: Sequence[str]
    whole: Sequence[str]  # rows of the second table
    kl: Sequence[Mapping[Key, Values]]
    seconds: Sequence[Mapping[str, tuple[float, float]]]  # of the clock, the processor

    @cached_property
    def mean(self) -> dict[Key, Values]:
        """Return the mean over draws of every token."""
        keys = dict.fromkeys(key for draw in self.kl for key in draw)
        return {k: np.mean([d[k] for d in self.kl if k in d], axis=0) for k in keys}

    def best(self, bits: float) -> str:
        """Return the peer with the least KL."""
        return min(self.peers, key=lambda name: float(self.mean[name, bits].mean()))

    def show(self, console: Console) -> None:
        everyone = [FUSED, APART, *self.peers, *BASELINES]
        console.print(self._table("Assignment only", everyone))
        for (name, bits), kl in self.mean.items():
            if not bits:
                console.print(f"{name}: {Figure.of(kl)}")
        console.print(self._table("Whole product", [*self.whole, *self.peers]))
        console.print(self._times())

    def _table(self, title: str, names: Sequence[str]) -> Table:
        made = Table(
            title=f"{title}: KL in nats per token [95 %]; × the best peer's",
            show_lines=False,
        )
        made.add_column("")
        for bits in self.bits:
            made.add_column(f"{bits:g} bits", justify="right")
        for name in names:
            cells = [
                f"{Figure.of(self.mean[name, bits])} ×{self._share(name, bits):.2f}"
                for bits in self.bits
            ]
            made.add_row(self._named(name), *cells)
        return made

    def _named(self, name: str) -> str:
        draws = sum((name, self.bits[0]) in draw for draw in self.kl)
        all_of_them = draws == len(self.kl)
        return name if all_of_them else f"{name} ({draws} of {len(self.kl)} draws)"

    def _share(self, name: str, bits: float) -> float:
        """Return the KL over that of the best peer in the draws that both are in."""
        if not self.peers:
            return float("nan")
        both = [d for d in self.kl if (name, bits) in d]
        both = [d for d in both if (self.best(bits), bits) in d]
        ours = sum(float(d[name, bits].mean()) for d in both)
        return ours / sum(float(d[self.best(bits), bits].mean()) for d in both)

    def _times(self) -> Table:
        made = Table(title="From the loaded model to the first stack, draw by draw")
        for column in ("", "s of the clock", "s of the processor"):
            made.add_column(column, justify="right" if column else "left")
        for name in (OURS, *self.peers):
            took = [draw[name] for draw in self.seconds if name in draw]
            cells = [" / ".join(f"{t[i]:.1f}" for t in took) for i in (0, 1)]
            made.add_row(name, *cells)
        return made

    def figures(self) -> dict[str, Any]:
        """Return everything as plain JSON."""
        made: dict[str, Any] = {
            "draws": len(self.kl),
            "tokens": len(next(iter(self.mean.values()))),
            "kl_nats": {
                f"{name} at {bits:g} bits" if bits else name: Figure.of(kl).plain
                for (name, bits), kl in self.mean.items()
            },
        }
        for bits in self.bits if self.peers else ():
            made[f"best peer at {bits:g} bits"] = self.best(bits)
            for name in (FUSED, APART):
                title = f"{name} at {bits:g} bits: nats more than the best peer"
                made[title] = self._more(name, bits).plain
            for name in self.whole:
                title = f"{name} at {bits:g} bits: times the best peer's KL"
                made[title] = self._share(name, bits)
        for i, clock in enumerate(("clock", "processor") if self.peers else ()):
            made[f"time over the fastest peer's, by the {clock}"] = float(
                np.median([self._time_share(draw, i) for draw in self.seconds])
            )
        return made

    def _more(self, name: str, bits: float) -> Figure:
        best = self.best(bits)
        both = [d for d in self.kl if (name, bits) in d and (best, bits) in d]
        more = [d[name, bits] - d[best, bits] for d in both]
        return Figure.of(np.mean(more, axis=0))

    def _time_share(self, draw: Mapping[str, tuple[float, float]], i: int) -> float:
        return draw[OURS][i] / min(draw[p][i] for p in self.peers if p in draw)
