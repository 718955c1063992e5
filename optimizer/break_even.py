"""From which rate of overflowing tokens on FP8 no longer pays: per device and workload.

A token whose FP8 values go beyond the format is computed again in 16 bits at that
site; with more than `MOST_TOKENS` of them the whole batch is (`fallback.py`). With B
tokens in a pass, each of which overflows with probability r and at one site,

    E(r) = T8 + Σ_{k ≤ 3} P(k) · k · t  +  P(k > 3) · T16,    k ~ Binomial(B, r)

is what a pass takes: T8 and T16 are the stack and the same stack in 16 bits, t is the
mean over the FP8 sites of one row in 16 bits. FP8 stops paying where E(r) = T16. A
promoted pass is charged all of T8, though it stops early: the rate is a little too
low, not too high. The check itself rides along in the pass that narrows.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from scipy.optimize import brentq
from scipy.stats import binom

from optimizer.cost import SiteCost, StackCost, site_cost, stack_cost
from optimizer.hardware import Device
from optimizer.spec import Workload
from optimizer.stack import Choice, ModelShape, Site, Stack, choice_named

MOST_TOKENS = 3  # that are computed again one by one; R3 of the requirements


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The rates, 0 to 1; 0: FP8 does not pay at all, 1: it pays whatever overflows."""

    per_token: float  # in a decode step: overflowing tokens among those of a batch
    first_token: float  # in the prefill of the batch
    extra_weight_bytes: int  # the 16-bit copies of FP8 weights that must be held ready


def promoted(stack: Stack, high: str = "bf16") -> Stack:
    """Return the stack with every site that computes in FP8 at `high` instead.

    Weight-only FP8 and FP8 tables stay: their activations are 16 bits wide, so that
    nothing overflows at run time.
    """

    def raised(site: Site, choice: Choice) -> Choice:
        if not choice.input.format.startswith("fp8"):
            return choice
        return choice_named(site.component, high)

    return Stack({s: raised(s, c) for s, c in stack.choices.items()})


def break_even(
    model: ModelShape, stack: Stack, device: Device, workload: Workload
) -> BreakEven:
    """Return the rates at which a pass takes as long as the stack in 16 bits.

    Raises HardwareError where the device cannot run the stack.
    """
    higher = promoted(stack, device.base16 or "fp32")
    narrow, wide = (stack_cost(model, s, device, workload) for s in (stack, higher))
    again = [
        site_cost(
            shape,
            higher.choices[shape.site],
            device,
            replace(workload, batch_size=1),
            model,
        )
        for shape in model.sites
        if higher.choices[shape.site] != stack.choices[shape.site]
    ]

    def rate(tokens: int, seconds: Callable[[SiteCost | StackCost], float]) -> float:
        if not again:
            return 1.0
        # One row again is a decode step of one sequence, in prefill as in decode.
        row = math.fsum(c.per_token_s for c in again) / len(again)
        return _rate(seconds(narrow), seconds(wide), row, tokens)

    return BreakEven(
        per_token=rate(workload.batch_size, lambda c: c.per_token_s),
        first_token=rate(
            workload.batch_size * workload.prompt_tokens, lambda c: c.first_token_s
        ),
        extra_weight_bytes=sum(c.weight_bytes for c in again),
    )


def pass_s(
    rate: float, fp8_s: float, high_s: float, row_s: float, tokens: int
) -> float:
    """Return E(r): the mean seconds of a pass of `tokens` that overflow with `rate`."""
    singly = math.fsum(
        k * float(binom.pmf(k, tokens, rate)) for k in range(1, MOST_TOKENS + 1)
    )
    more = float(binom.sf(MOST_TOKENS, tokens, rate))
    return fp8_s + singly * row_s + more * high_s


def _rate(fp8_s: float, high_s: float, row_s: float, tokens: int) -> float:
    """Return the smallest r with E(r) = `high_s`; 1 where no r takes that long."""
    if fp8_s >= high_s:
        return 0.0

    def excess(rate: float) -> float:
        return pass_s(rate, fp8_s, high_s, row_s, tokens) - high_s

    # E grows up to the rate at which a promotion is near certain, and may fall after
    # it: looking from the left finds the first crossing.
    last = 0.0
    for rate in (2.0**-i for i in range(tokens.bit_length() + 6, -1, -1)):
        if excess(rate) >= 0:
            return float(brentq(excess, last, rate))
        last = rate
    return 1.0
