"""Serving a stack: tokens whose values go beyond FP8 are computed again in 16 bits.

`overflow.py` says what counts. What is computed again is always the token's own row
at that site, and nothing else:

* matrices and activation functions: the row of the output;
* the attention of a layer (cache, scores, softmax, values), which is one kernel: the
  token's row of its output, everything it reads in 16 bits too. Others that read
  its saturated K or V keep what they have, unless they overflow themselves.

That row is, bit for bit, the one of the run in which the site has 16 bits, and all
other rows are, bit for bit, those of the FP8 run. For the first the emulation runs the
site for all rows and keeps the one (kernels sum in an order that depends on how many
rows there are); a device gathers the rows, and may differ in the last bit.

With more than `MOST_TOKENS` distinct tokens in a batch the pass stops, and the whole
batch runs again with all FP8 sites in 16 bits.
"""

from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optimizer.break_even import MOST_TOKENS, promoted
from optimizer.execute import Amaxes, Operand, Stacked, WeightCodes
from optimizer.model import AttentionStep, LoadedModel
from optimizer.overflow import Cause, Noting, Place
from optimizer.sites import LinearPart
from optimizer.stack import Component, Role, Site, Stack

ATTENTION = frozenset(
    {
        Component.KV_CACHE,
        Component.ATTN_SCORES,
        Component.ATTN_SOFTMAX,
        Component.ATTN_VALUES,
    }
)


@dataclass(slots=True)
class Fallbacks:
    """What was served, and what of it fell back: running counts, to be read any time."""

    batches: int = 0
    promoted_batches: int = 0
    tokens: int = 0  # without padding
    promoted_tokens: int = 0  # all tokens of promoted batches
    overflowed_tokens: int = 0  # in a promoted batch: those seen before it was
    by_site: Counter[Place] = field(default_factory=Counter)  # tokens

    @property
    def overflow_rate(self) -> float:
        """Share of the tokens that overflowed: what `break_even` is to be held against."""
        return self.overflowed_tokens / max(self.tokens, 1)


class _TooMany(Exception):
    """More tokens of a batch overflow than are computed again one by one."""


class _Recomputing(Noting):
    """Computes overflowing tokens again where they overflow.

    Raises _TooMany out of the pass once more of them do than that is done for.
    """

    def __init__(
        self, stack: Stack, high: Stacked, amaxes: Amaxes, weights: WeightCodes
    ) -> None:
        super().__init__(stack, amaxes, weights)
        self._high = high
        self._input_rows: Tensor | None = None  # of an input that siblings share
        self._attention_rows: list[Tensor] = []

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Multiply codes; overflowing rows once more in 16 bits."""
        y = super().linear(part, x)
        rows = self._input_rows if self._is_last(part.site, x) else None  # else: fp32
        return y if rows is None else _instead(y, self._high.linear(part, x), rows)

    def _input(self, site: Site, x: Tensor) -> Operand:
        shared = self._is_last(site, x)
        operand = super()._input(site, x)
        if not shared:
            self._input_rows = self._rows
        return operand

    def _is_last(self, site: Site, x: Tensor) -> bool:
        last = self._last
        return last is not None and last[0] == site and last[1] is x

    def elementwise(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Round; overflowing rows to 16 bits. Attention is done over as a whole."""
        y = super().elementwise(site, role, x, mask)
        if self._rows is None or site.component in ATTENTION:
            return y
        return _instead(y, self._high.elementwise(site, role, x, mask), self._rows)

    def attention(self, step: AttentionStep) -> Tensor:
        """Run the four steps; all of them once more for tokens that overflow in one."""
        self._attention_rows.clear()
        y = super().attention(step)
        if not self._attention_rows:
            return y
        rows = torch.stack(self._attention_rows).any(dim=0)
        return torch.where(rows[:, None, :, None], self._high.attention(step), y)

    def _note(self, site: Site, cause: Cause, rows: Tensor) -> None:
        super()._note(site, cause, rows)
        if self.overflowed > MOST_TOKENS:
            raise _TooMany
        if site.component in ATTENTION and self._rows is not None:
            self._attention_rows.append(self._rows)


def _instead(y: Tensor, again: Tensor, rows: Tensor) -> Tensor:
    """Return y (..., features) with `rows` (...) taken from `again`."""
    return torch.where(rows[..., None], again, y)


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """What a batch came to."""

    logits: Tensor  # (batch, tokens, vocab), fp32
    overflowed: int  # tokens; of a promoted batch those seen before it was
    promoted: bool  # the whole batch ran in 16 bits


class FallbackRunner:
    """Serves a stack, batch by batch, and counts what falls back."""

    def __init__(
        self,
        model: LoadedModel,
        stack: Stack,
        amaxes: Amaxes,
        weights: WeightCodes | None = None,
        high: str = "bf16",
    ) -> None:
        """`high`: what an overflowing token is computed in, bf16, fp16 or fp32."""
        weights = weights or WeightCodes(model)
        self.counts = Fallbacks()
        self._model = model
        self._high = Stacked(promoted(stack, high), amaxes, weights)
        self.executor = _Recomputing(stack, self._high, amaxes, weights)

    @torch.no_grad()
    def forward(self, ids: Tensor, attention_mask: Tensor | None = None) -> Served:
        """Run ids (batch, tokens); `attention_mask` is 0 where a token is padding."""
        self.executor.begin(None if attention_mask is None else attention_mask.bool())
        is_promoted = False
        try:
            logits = self._model.forward(ids, self.executor, attention_mask)
        except _TooMany:
            is_promoted = True
            logits = self._model.forward(ids, self._high, attention_mask)
        tokens = ids.numel() if attention_mask is None else int(attention_mask.sum())
        self._count(tokens, is_promoted)
        return Served(logits, self.executor.overflowed, is_promoted)

    def _count(self, tokens: int, is_promoted: bool) -> None:
        counts = self.counts
        counts.batches += 1
        counts.tokens += tokens
        counts.overflowed_tokens += self.executor.overflowed
        counts.by_site.update(self.executor.by_site)
        if is_promoted:
            counts.promoted_batches += 1
            counts.promoted_tokens += tokens
