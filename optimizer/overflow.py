"""Which tokens go beyond FP8 while a stack runs, and how often that is to be expected.

A value overflows where |x| > scale · (max + half an ulp of max): up to there it rounds
to `max` as it would if the format went on, so nothing is lost that rounding does not
lose anyway. (464 of e4m3 and 61440 of e5m2, times the scale.) Only static scales can
be too small; an inf or a NaN counts at every FP8 site. Padding and what attention
masks never count. Rows that reach an expert carry no token's number there: each
counts as a token.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from optimizer.break_even import MOST_TOKENS
from optimizer.execute import Amaxes, Operand, Stacked, WeightCodes
from optimizer.formats import FORMATS, Format
from optimizer.model import LoadedModel
from optimizer.quantize import amax
from optimizer.stack import Granularity, Precision, Role, Site, Stack
from optimizer.walk import Activations, Told, silent, walk

Place = tuple[Site, "Cause"]
HIDDEN = torch.finfo(torch.float32).min / 2  # an additive mask at or below this removes
_STATIC = frozenset({Granularity.TENSOR, Granularity.HEAD})


class Cause(StrEnum):
    """Why a token fell back."""

    SATURATED = "saturated"
    NON_FINITE = "non_finite"


def overflow_limit(fmt: Format) -> float:
    """Return the largest number that rounds to `fmt.max` if the exponents went on."""
    ulp = 2.0 ** (math.frexp(fmt.max)[1] - 1 - fmt.mantissa_bits)
    return fmt.max + ulp / 2


def overflowing(
    x: Tensor, precision: Precision, scale: Tensor, mask: Tensor | None = None
) -> dict[Cause, Tensor]:
    """Return which rows of `x` go beyond an FP8 precision, by cause; {}: none.

    (batch, tokens, features) and (batch, heads, tokens, features) -> (batch, tokens),
    (rows, features) -> (rows,). `mask` is additive: what it removes does not count.
    """
    static = precision.granularity in _STATIC
    limit = scale * overflow_limit(FORMATS[precision.format])
    largest = amax(x, Granularity.TENSOR)
    if largest.isfinite() and (not static or largest <= limit.min()):
        return {}
    beyond = {Cause.NON_FINITE: ~x.isfinite()}
    if static:
        beyond[Cause.SATURATED] = (x.abs() > limit) & x.isfinite()
    if mask is not None:
        seen = mask > HIDDEN
        beyond = {cause: some & seen for cause, some in beyond.items()}
    across = (1, 3) if x.ndim == 4 else (-1,)
    rows = {cause: some.any(dim=across) for cause, some in beyond.items()}
    return {cause: some for cause, some in rows.items() if some.any()}


class Noting(Stacked):
    """A stack that is run as it is, while tokens that overflow are noted."""

    def __init__(self, stack: Stack, amaxes: Amaxes, weights: WeightCodes) -> None:
        super().__init__(stack, amaxes, weights)
        self.begin()

    def begin(self, visible: Tensor | None = None) -> None:
        """Forget what was noted. `visible` (batch, tokens): False is padding."""
        self._visible = visible
        self._rows: Tensor | None = None  # of what was tapped last
        self._seen: dict[Place, Tensor] = {}  # (batch, tokens)
        self._experts: Counter[Place] = Counter()
        self.tokens: Tensor | None = None  # (batch, tokens): that overflowed anywhere

    @property
    def overflowed(self) -> int:
        """How many tokens overflowed since `begin`."""
        tokens = 0 if self.tokens is None else int(self.tokens.sum())
        return tokens + self.expert_rows

    @property
    def expert_rows(self) -> int:
        """How many rows overflowed at experts since `begin`."""
        return self._experts.total()

    @property
    def by_site(self) -> Counter[Place]:
        """How many tokens overflowed at each site since `begin`, by cause."""
        tokens = {place: int(rows.sum()) for place, rows in self._seen.items()}
        return Counter(tokens) + self._experts

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        """Round the tensor as the stack says, and note who does not fit."""
        codes, scale = super().tap(site, role, x, mask)
        self._rows = None
        precision = self._precisions.get((site, role))
        if precision is None or not precision.format.startswith("fp8"):
            return codes, scale
        assert scale is not None
        for cause, rows in overflowing(x, precision, scale, mask).items():
            self._note(site, cause, rows)
        return codes, scale

    def _note(self, site: Site, cause: Cause, rows: Tensor) -> None:
        if rows.ndim == 1:  # of an expert
            self._experts[site, cause] += int(rows.sum())
        else:
            rows = rows if self._visible is None else rows & self._visible
            self._seen[site, cause] = either(self._seen.get((site, cause)), rows)
            self.tokens = either(self.tokens, rows)
        self._rows = either(self._rows, rows)


@dataclass(frozen=True, slots=True)
class Expected:
    """How often tokens of some data overflow in a stack that is run as it is."""

    tokens: int
    rate: float  # share of the tokens that overflow at any site
    promoted: float  # share of the sequences that are promoted, each its own batch
    by_site: Mapping[Site, float]  # share of the tokens, where there are any


class Overflows:
    """Adds up what a `Noting` run sees of sequences that pass stage by stage."""

    def __init__(self, sequences: Sequence[Tensor]) -> None:
        self._sizes = [ids.numel() for ids in sequences]
        self._tokens: dict[int, Tensor] = {}
        self._expert_rows: Counter[int] = Counter()
        self._by_site: Counter[Place] = Counter()

    def take(self, index: int, run: Noting) -> None:
        """Take what was noted of one stage of a sequence."""
        if run.tokens is not None:
            self._tokens[index] = either(self._tokens.get(index), run.tokens)
        self._expert_rows[index] += run.expert_rows
        self._by_site.update(run.by_site)
        run.begin()

    @property
    def counts(self) -> list[int]:
        """How many tokens of each sequence overflow: at most all of them."""
        return [
            min(size, self._of(index) + self._expert_rows[index])
            for index, size in enumerate(self._sizes)
        ]

    def _of(self, index: int) -> int:
        return int(self._tokens[index].sum()) if index in self._tokens else 0

    def expected(self) -> Expected:
        """Return the shares."""
        counts, total = self.counts, sum(self._sizes)
        by_site: Counter[Site] = Counter()
        for (site, _), count in self._by_site.items():
            by_site[site] += count
        return Expected(
            tokens=total,
            rate=sum(counts) / total,
            promoted=sum(n > MOST_TOKENS for n in counts) / len(counts),
            by_site={site: n / total for site, n in sorted(by_site.items())},
        )


def expected_fallback(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    stack: Stack,
    amaxes: Amaxes,
    weights: WeightCodes,
    progress: Told = silent,
) -> Expected:
    """Run a stack over sequences of ids (1, tokens), and say how often it falls back."""
    run, seen = Noting(stack, amaxes, weights), Overflows(sequences)
    walk(
        model,
        sequences,
        run,
        kept=Activations(),
        after=lambda stage, index, out: seen.take(index, run),
        keep_all=False,
        progress=progress,
    )
    return seen.expected()


def either(a: Tensor | None, b: Tensor) -> Tensor:
    """Return the rows of both; `a` None: none."""
    return b if a is None else a | b
