"""What calibration learns of each place beyond its amax: who sets it, and how.

For every tensor that may get a scale: a histogram of its magnitudes, its amax by
position in the sequence, its outlier channels and its sink tokens. All of it is of
fixed size and merges; padding is never seen.
"""

import base64
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from optimizer.magnitudes import BINS, LOWEST, PARTS, Magnitudes
from optimizer.stack import Component, Role, Site

KEPT = 8  # outlier channels and sink tokens of one place
SAMPLE = 1 << 14  # elements of one tensor that the histogram counts
BUCKETS = 32  # of positions: 0, 1, 2-3, 4-7, ..., the last from 2^30 on
OUTLIER = 4.0  # times the median: what the report names

_FLOAT_BIAS = 127
_SHIFT = 23 - PARTS.bit_length() + 1  # leaves the exponent and the bits of a part
_FIRST_BIN = (_FLOAT_BIAS + LOWEST) * PARTS


class Layout(StrEnum):
    """What the dimensions of a tensor are."""

    ROWS = "rows"  # (batch, tokens, channels); (tokens, channels): positions unknown
    HEADS = "heads"  # (batch, heads, tokens, channels of the head)
    SCORES = "scores"  # (batch, heads, queries, keys): no channels


def layout_of(site: Site, role: Role) -> Layout:
    """Return what the dimensions of the tensors at a place are."""
    match site.component, role:
        case (Component.ATTN_SOFTMAX, _) | (Component.ATTN_VALUES, Role.INPUT):
            return Layout.SCORES
        case (Component.ATTN_SCORES | Component.ATTN_VALUES, _):
            return Layout.HEADS
    return Layout.ROWS


# Magnitudes


def magnitudes_of(x: Tensor) -> Magnitudes:
    """Return the histogram of every |x|; what is not finite is in the last bin."""
    return _histogram(x.abs().flatten())


def _histogram(a: Tensor) -> Magnitudes:
    """Count the values of `a` ≥ 0 by the upper bits of their float32 codes."""
    bins = (a.float().contiguous().view(torch.int32) >> _SHIFT) - _FIRST_BIN
    counts = torch.bincount(bins.clamp_(0, BINS - 1), minlength=BINS).numpy()
    zeros = a.numel() - int(a.count_nonzero())
    counts[0] -= zeros
    return Magnitudes(counts, zeros)


def sampled_rows(x: Tensor, elements: int) -> Tensor:
    """Return evenly spaced rows of x: (..., n) -> (rows, n), about `elements` in all."""
    rows = x.reshape(-1, x.shape[-1])
    step = max(1, min(rows.numel() // max(elements, 1), len(rows)))
    step |= step > 1  # odd: powers of two meet one position in every head
    return rows[step // 2 :: step]  # from the middle: the first token is no example


# Places


class Sink(NamedTuple):
    """A token with a large amax."""

    amax: float
    position: int  # from the first token of its sequence that is not padding
    token: int  # id; -1: unknown


@dataclass(slots=True, eq=False)
class SiteStats:
    """Running statistics of one place. `add` costs about three reads of the tensor."""

    layout: Layout = Layout.ROWS
    count: int = 0  # elements seen
    magnitudes: Magnitudes = field(default_factory=Magnitudes)  # of a sample
    token_amax: Magnitudes = field(default_factory=Magnitudes)  # of every token
    positions: Tensor = field(default_factory=lambda: torch.zeros(BUCKETS))  # amax
    seen: Tensor = field(  # tokens in each bucket
        default_factory=lambda: torch.zeros(BUCKETS, dtype=torch.int64)
    )
    channels: Tensor | None = None  # amax of each channel; heads one after the other
    head_width: int = 0  # channels of a head; 0: no heads
    sinks: tuple[Sink, ...] = ()  # one for each position, largest first

    @property
    def amax(self) -> float:
        """The largest |x|."""
        of_positions = float(self.positions.max())
        of_channels = 0.0 if self.channels is None else float(self.channels.max())
        return max(of_positions, of_channels)

    @property
    def median_token(self) -> float:
        """The median amax of a token, to an eighth."""
        return min(self.token_amax.quantile(0.5), self.amax)

    def add(
        self, x: Tensor, keep: Tensor | None = None, ids: Tensor | None = None
    ) -> None:
        """See one tensor in the place's layout.

        `keep` and `ids` are (batch, tokens): False is padding; token ids name sinks.
        """
        x = x.detach()
        if self.layout is Layout.ROWS and x.ndim > 3:  # norms of single heads
            x = x.flatten(2)
        if keep is not None and bool(keep.all()):
            keep = None
        a = x.abs() if keep is None else _without_padding(x, keep, self.layout).abs()
        self.count += _count(x, keep)
        self._add_magnitudes(a, keep)
        self._add_channels(a)
        self._add_tokens(_token_amax(a, self.layout), keep, ids)

    def _add_magnitudes(self, a: Tensor, keep: Tensor | None) -> None:
        rows = a
        if keep is not None:
            by_token = a if self.layout is Layout.ROWS else a.transpose(1, 2)
            rows = by_token[keep]
        if rows.numel():
            found = _histogram(sampled_rows(rows, SAMPLE).flatten())
            self.magnitudes = self.magnitudes.merge(found)

    def _add_channels(self, a: Tensor) -> None:
        if self.layout is Layout.SCORES or a.numel() == 0:
            return
        if self.layout is Layout.HEADS:
            self.head_width = a.shape[-1]
            largest = a.amax(2).amax(0).flatten()
        else:
            largest = a.flatten(0, -2).amax(0)
        self._merge_channels(largest.float())

    def _merge_channels(self, largest: Tensor) -> None:
        if self.channels is None:
            self.channels = largest
        elif self.channels.shape == largest.shape:  # norms of heads beside those of
            self.channels = torch.maximum(self.channels, largest)  # layers: the first

    def _add_tokens(
        self, largest: Tensor, keep: Tensor | None, ids: Tensor | None
    ) -> None:
        """Add the amax of each token, (batch, tokens) or (tokens,)."""
        real = largest if keep is None else largest[keep]
        self.token_amax = self.token_amax.merge(_histogram(real.flatten()))
        if largest.ndim == 1:  # routed to an expert: who stood where is not known
            return
        at = torch.arange(largest.shape[1]).expand(largest.shape)
        if keep is not None:
            at = (keep.cumsum(1) - 1).clamp(min=0)
        where = bucket_of(at).flatten()
        self.positions.scatter_reduce_(0, where, largest.flatten().float(), "amax")
        weight = torch.ones_like(where) if keep is None else keep.flatten().long()
        self.seen.scatter_add_(0, where, weight)
        self._add_sinks(largest.flatten(), at.flatten(), ids)

    def _add_sinks(self, largest: Tensor, at: Tensor, ids: Tensor | None) -> None:
        # Sequences repeat a position: enough candidates for `KEPT` different ones.
        count = min(len(largest), KEPT * max(1, int((at == at[0]).sum())))
        top = largest.topk(count)
        tokens = None if ids is None else ids.flatten()
        found = [
            Sink(float(v), int(at[i]), -1 if tokens is None else int(tokens[i]))
            for v, i in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]
        self.sinks = _largest_sinks([*self.sinks, *found])

    def merge(self, other: "SiteStats") -> "SiteStats":
        """Return the statistics of both streams together, in either order."""
        both = SiteStats(
            layout=self.layout,
            count=self.count + other.count,
            magnitudes=self.magnitudes.merge(other.magnitudes),
            token_amax=self.token_amax.merge(other.token_amax),
            positions=torch.maximum(self.positions, other.positions),
            seen=self.seen + other.seen,
            channels=self.channels,
            head_width=self.head_width or other.head_width,
            sinks=_largest_sinks([*self.sinks, *other.sinks]),
        )
        if other.channels is not None:
            both._merge_channels(other.channels)
        return both

    def state(self) -> dict[str, Any]:
        """Return everything as JSON, exactly: what another process merges."""
        return {
            "layout": str(self.layout),
            "count": self.count,
            "magnitudes": self.magnitudes.state(),
            "token_amax": self.token_amax.state(),
            "positions": self.positions.tolist(),
            "seen": self.seen.tolist(),
            "channels": None if self.channels is None else _packed(self.channels),
            "head_width": self.head_width,
            "sinks": [list(sink) for sink in self.sinks],
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "SiteStats":
        """Inverse of `state`."""
        packed = state["channels"]
        return cls(
            layout=Layout(state["layout"]),
            count=state["count"],
            magnitudes=Magnitudes.from_state(state["magnitudes"]),
            token_amax=Magnitudes.from_state(state["token_amax"]),
            positions=torch.tensor(state["positions"]),
            seen=torch.tensor(state["seen"], dtype=torch.int64),
            channels=None if packed is None else _unpacked(packed),
            head_width=state["head_width"],
            sinks=tuple(Sink(*sink) for sink in state["sinks"]),
        )

    def outlier_channels(self) -> list[tuple[int, float, float]]:
        """Return (channel, amax, times the median channel), largest first, `KEPT`."""
        if self.channels is None:
            return []
        median = float(self.channels.median()) or float("inf")
        order = torch.argsort(self.channels, descending=True, stable=True)[:KEPT]
        amaxes = self.channels[order].tolist()
        return [(i, v, v / median) for i, v in zip(order.tolist(), amaxes, strict=True)]

    def sink_tokens(self) -> list[tuple[Sink, float]]:
        """Return the sinks and how many times the median token's amax they have."""
        median = self.median_token or float("inf")
        return [(s, s.amax / median) for s in self.sinks]

    def position_amaxes(self) -> list[float | None]:
        """Return the amax of positions 0, 1, 2-3, 4-7, ...; None: none was seen."""
        last = int(self.seen.nonzero().max()) if int(self.seen.sum()) else -1
        return [
            float(self.positions[b]) if int(self.seen[b]) else None
            for b in range(last + 1)
        ]

    def growth(self) -> float | None:
        """Return the amax of the last bucket over that of the one before.

        None: fewer than 16 positions, or values that are all zero. A bucket holds
        twice as many tokens as the one before: steady values give little over 1.
        """
        amaxes = self.position_amaxes()
        if len(amaxes) < 6 or not amaxes[-1] or not amaxes[-2]:
            return None
        return amaxes[-1] / amaxes[-2]

    def to_json(self, text_of: Callable[[int], str] | None = None) -> dict[str, Any]:
        """Return what the report keeps; `text_of` turns a token's id into its text."""
        return {
            "amax": _short(self.amax),
            "median_token_amax": _short(self.median_token),
            "elements": self.count,
            "exponents": self.magnitudes.to_json(),
            "positions": [
                None if a is None else _short(a) for a in self.position_amaxes()
            ],
            "channels": [
                self._channel_json(*found)
                for found in self.outlier_channels()
                if found[2] >= OUTLIER
            ],
            "tokens": [
                _token_json(sink, times, text_of)
                for sink, times in self.sink_tokens()
                if times >= OUTLIER
            ],
        }

    def _channel_json(self, index: int, amax: float, times: float) -> dict[str, Any]:
        head, channel = (
            divmod(index, self.head_width) if self.head_width else (None, index)
        )
        return {
            "head": head,
            "channel": channel,
            "amax": _short(amax),
            "times_median": _short(times),
        }


def _token_json(
    sink: Sink, times: float, text_of: Callable[[int], str] | None
) -> dict[str, Any]:
    known = sink.token >= 0
    return {
        "position": sink.position,
        "token": sink.token if known else None,
        "text": text_of(sink.token) if known and text_of is not None else None,
        "amax": _short(sink.amax),
        "times_median": _short(times),
    }


def _packed(x: Tensor) -> str:
    """Return float32 values as text, a third longer than their bytes."""
    return base64.b64encode(x.numpy().astype("<f4").tobytes()).decode("ascii")


def _unpacked(text: str) -> Tensor:
    data = bytearray(base64.b64decode(text))
    return torch.frombuffer(data, dtype=torch.float32) if data else torch.empty(0)


def _short(value: float) -> float:
    """Six digits: what a document needs, in a third of the bytes."""
    return float(f"{value:.6g}")


def bucket_of(position: Tensor) -> Tensor:
    """Return the bucket of each position: 0 -> 0, 1 -> 1, 2 and 3 -> 2, 4 to 7 -> 3."""
    exponent = torch.frexp(position.double()).exponent.long()  # 2^(e-1) ≤ p < 2^e
    return exponent.clamp_(max=BUCKETS - 1)


def _largest_sinks(sinks: list[Sink]) -> tuple[Sink, ...]:
    """Return the largest sink of each position, largest first, `KEPT` at most."""
    best: dict[int, Sink] = {}
    for sink in sorted(sinks, key=lambda s: (-s.amax, s.position, s.token)):
        if sink.amax > 0:
            best.setdefault(sink.position, sink)
    return tuple(list(best.values())[:KEPT])


def _without_padding(x: Tensor, keep: Tensor, layout: Layout) -> Tensor:
    shape = (*keep.shape, 1) if layout is Layout.ROWS else (keep.shape[0], 1, -1, 1)
    return x.masked_fill(~keep.view(shape), 0.0)


def _count(x: Tensor, keep: Tensor | None) -> int:
    if keep is None:
        return x.numel()
    return int(keep.sum()) * (x.numel() // keep.numel())


def _token_amax(a: Tensor, layout: Layout) -> Tensor:
    largest = a.amax(-1) if a.shape[-1] else a.sum(-1)
    return largest if layout is Layout.ROWS else largest.amax(1)
