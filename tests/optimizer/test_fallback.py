from collections import Counter

import pytest
import torch
from torch import Tensor

from optimizer.break_even import MOST_TOKENS, promoted
from optimizer.calibrate import amaxes, calibrate
from optimizer.execute import Amaxes, Reference, Stacked, WeightCodes
from optimizer.fallback import FallbackRunner
from optimizer.formats import E4M3, E5M2
from optimizer.model import AttentionStep, LoadedModel
from optimizer.overflow import (
    Cause,
    Noting,
    Overflows,
    expected_fallback,
    overflow_limit,
    overflowing,
)
from optimizer.sites import LinearPart
from optimizer.stack import (
    CHOICES,
    WHOLE_MODEL,
    Component,
    Granularity,
    Precision,
    Role,
    Site,
    Stack,
    choice_named,
)
from tests.optimizer import tiny
from tests.optimizer.numbers import assert_same_bits, normal

DOWN = Site(0, Component.FFN_OUT)
QKV = Site(0, Component.ATTN_QKV)
ACT = Site(0, Component.FFN_ACT)
SCORES = Site(0, Component.ATTN_SCORES)
SATURATED, NON_FINITE = Cause.SATURATED, Cause.NON_FINITE


# What counts


@pytest.mark.parametrize(("fmt", "limit"), [(E4M3, 464.0), (E5M2, 61440.0)])
def test_up_to_half_an_ulp_beyond_its_largest_number_nothing_is_lost(
    fmt: object, limit: float
) -> None:
    # The ties of case A3 and A4: from there on other libraries say NaN or inf.
    assert overflow_limit(fmt) == limit  # type: ignore[arg-type]


def rows_of(x: Tensor, name: str = "fp8_e4m3", **kwargs: Tensor) -> dict[Cause, list]:
    found = overflowing(x, Precision(name), torch.tensor(0.5), **kwargs)
    return {cause: rows.tolist() for cause, rows in found.items()}


def test_a_token_overflows_beyond_scale_times_the_limit() -> None:
    x = torch.zeros(1, 3, 4)
    x[0, 1, 2] = -232.0  # 0.5 · 464: it still rounds to 448
    assert rows_of(x) == {}
    x[0, 1, 2] = -232.1
    assert rows_of(x) == {SATURATED: [[False, True, False]]}


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite_is_a_cause_of_its_own(value: float) -> None:
    x = torch.zeros(2, 3)
    x[1, 0] = value
    assert rows_of(x) == {NON_FINITE: [False, True]}


def test_a_dynamic_scale_is_never_too_small() -> None:
    x = normal(1, 4, 8) * 1e6
    precision = Precision("fp8_e4m3", Granularity.TOKEN)
    assert overflowing(x, precision, torch.full((1, 4, 1), 1e-6)) == {}
    x[0, 2, 3] = float("nan")
    found = overflowing(x, precision, torch.ones(1, 4, 1))
    assert found[NON_FINITE].tolist() == [[False, False, True, False]]
    assert SATURATED not in found


def test_each_head_has_a_limit_of_its_own_and_tokens_are_rows_of_any_head() -> None:
    x = torch.zeros(1, 2, 3, 4)
    x[0, 0, 1, 0] = 50.0
    x[0, 1, 2, 0] = 50.0
    scale = torch.tensor([1.0, 0.1]).view(1, 2, 1, 1)  # limits 464 and 46.4
    found = overflowing(x, Precision("fp8_e4m3", Granularity.HEAD), scale)
    assert found[SATURATED].tolist() == [[False, False, True]]


def test_what_a_mask_removes_does_not_count_and_what_it_lowers_does() -> None:
    x = torch.full((1, 1, 2, 2), 300.0)
    hidden = torch.finfo(torch.float32).min
    mask = torch.tensor([[[[0.0, hidden], [hidden, hidden]]]])
    assert rows_of(x, mask=mask) == {SATURATED: [[True, False]]}
    lowered = torch.tensor([[[[-8.0, hidden], [hidden, -8.0]]]])  # a distance (ALiBi)
    assert rows_of(x, mask=lowered) == {SATURATED: [[True, True]]}


# Serving


class Observing(Reference):
    """Keeps what one place of a model sees."""

    def __init__(self, site: Site, role: Role) -> None:
        self._place = site, role
        self.seen: Tensor | None = None

    def tap(self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None):  # type: ignore[no-untyped-def]
        if (site, role) == self._place and self.seen is None:
            self.seen = x.clone()
        return x, None


def stack_of(model: LoadedModel, narrow: dict[Site, str]) -> Stack:
    return Stack(
        {
            site: choice_named(site.component, narrow.get(site, "bf16"))
            for site in model.sites
        }
    )


def with_outliers(
    model: LoadedModel, ids: Tensor, site: Site, role: Role, tokens: int
) -> tuple[Amaxes, list[int]]:
    """Return calibrated amaxes under which just so many tokens overflow, and which.

    The site's amax is set between the largest rows that `ids` bring there.
    """
    found = amaxes(calibrate(model, [ids]))
    narrow = Stacked(stack_of(model, {}), found, WeightCodes(model))
    watching = Observing(site, role)
    model.forward(ids, _Both(narrow, watching))
    assert watching.seen is not None
    seen = watching.seen
    rows = seen.abs().amax((1, 3) if seen.ndim == 4 else -1)[0]
    order = rows.argsort(descending=True)
    high, low = rows[order[tokens - 1]], rows[order[tokens]]
    limit = (high + low) / 2
    amax = limit * (E4M3.max / overflow_limit(E4M3))
    shape = found[site, role]
    return (
        {**found, (site, role): amax.expand_as(shape).clone()},
        sorted(order[:tokens].tolist()),
    )


class _Both(Reference):
    """One executor runs, another watches its inputs."""

    def __init__(self, runs: Stacked, watches: Observing) -> None:
        self._runs, self._watches = runs, watches

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        self._watches.tap(part.site, Role.INPUT, x)
        return self._runs.linear(part, x)

    def elementwise(self, site, role, x, mask=None):  # type: ignore[no-untyped-def]
        self._watches.tap(site, role, x)
        return self._runs.elementwise(site, role, x, mask)

    def attention(self, step: AttentionStep) -> Tensor:
        self._watches.tap(
            Site(step.layer, Component.ATTN_SCORES), Role.INPUT, step.query
        )
        return self._runs.attention(step)


class Recorded(Reference):
    """Runs as another executor does, and keeps the output of one site."""

    def __init__(self, inner: Stacked, site: Site) -> None:
        self._inner, self._site = inner, site
        self.outputs: list[Tensor] = []

    def _keep(self, site: Site, y: Tensor) -> Tensor:
        if site == self._site:
            self.outputs.append(y.clone())
        return y

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        return self._keep(part.site, self._inner.linear(part, x))

    def elementwise(self, site, role, x, mask=None):  # type: ignore[no-untyped-def]
        return self._keep(site, self._inner.elementwise(site, role, x, mask))

    def attention(self, step: AttentionStep) -> Tensor:
        site = Site(step.layer, Component.ATTN_SCORES)
        return self._keep(site, self._inner.attention(step))


def outputs(model: LoadedModel, ids: Tensor, run: Stacked, site: Site) -> list[Tensor]:
    """Return what a site of the first layer hands on, which sees 16 bits before it."""
    recorded = Recorded(run, site)
    model.forward(ids, recorded)
    return recorded.outputs


SITES = [  # a site, what overflows there, and its narrow choice
    pytest.param(QKV, "fp8_e4m3", id="three siblings that share an input"),
    pytest.param(DOWN, "fp8_e4m3", id="one matrix"),
    pytest.param(ACT, "fp8_e4m3", id="an activation function"),
    pytest.param(SCORES, "fp8_e4m3", id="attention per tensor"),
    pytest.param(SCORES, "fp8_e4m3_head", id="attention per head"),
]


@pytest.mark.parametrize(("site", "narrow"), SITES)
@pytest.mark.parametrize("tokens", [1, MOST_TOKENS])
def test_an_outlier_is_computed_again_and_nothing_else_is_touched(
    site: Site, narrow: str, tokens: int
) -> None:
    model, ids = tiny.loaded("Qwen2ForCausalLM"), tiny.ids(12)
    stack = stack_of(model, {site: narrow})
    largest, outliers = with_outliers(model, ids, site, Role.INPUT, tokens)
    weights = WeightCodes(model)
    runner = FallbackRunner(model, stack, largest, weights)
    runner.forward(ids)
    assert runner.counts.by_site == {(site, SATURATED): tokens}
    # Before this site all three runs are one, so each row is there to compare.
    fell = outputs(model, ids, runner.executor, site)
    narrow_run = outputs(model, ids, Stacked(stack, largest, weights), site)
    wide_run = outputs(model, ids, Stacked(promoted(stack), largest, weights), site)
    assert len(fell) == len(narrow_run) > 0
    if site == ACT:  # what the function makes of another input is another output
        fell = fell[:1]
    changed = False
    for mine, low, high in zip(fell, narrow_run, wide_run, strict=False):
        at = 2 if mine.ndim == 4 else 1
        rows = torch.arange(mine.shape[at])
        for row in rows.tolist():
            wanted = high if row in outliers else low
            assert_same_bits(mine.select(at, row), wanted.select(at, row))
            changed |= row in outliers and not torch.equal(
                low.select(at, row), high.select(at, row)
            )
    assert changed  # the two runs differ where it matters


def test_an_injected_outlier_is_served_as_in_the_higher_precision_run() -> None:
    # The last matrix of the network: what it hands on are the logits themselves.
    head = Site(WHOLE_MODEL, Component.LM_HEAD)
    model, ids = tiny.loaded(), tiny.ids(9)
    stack = stack_of(model, {head: "fp8_e4m3"})
    largest, (outlier,) = with_outliers(model, ids, head, Role.INPUT, 1)
    weights = WeightCodes(model)
    served = FallbackRunner(model, stack, largest, weights).forward(ids)
    low, high = (
        model.forward(ids, Stacked(s, largest, weights))
        for s in (stack, promoted(stack))
    )
    for token in range(9):
        wanted = high if token == outlier else low
        assert_same_bits(served.logits[0, token], wanted[0, token])
    assert not torch.equal(low[0, outlier], high[0, outlier])
    assert (served.overflowed, served.promoted) == (1, False)


def test_in_fp32_too() -> None:
    head = Site(WHOLE_MODEL, Component.LM_HEAD)
    model, ids = tiny.loaded(), tiny.ids(9)
    stack = stack_of(model, {head: "fp8_e4m3"})
    largest, (outlier,) = with_outliers(model, ids, head, Role.INPUT, 1)
    served = FallbackRunner(model, stack, largest, high="fp32").forward(ids)
    wide = Stacked(promoted(stack, "fp32"), largest, WeightCodes(model))
    assert_same_bits(served.logits[0, outlier], model.forward(ids, wide)[0, outlier])


def test_a_fourth_token_promotes_the_batch() -> None:
    model, ids = tiny.loaded(), tiny.ids(12)
    stack = stack_of(model, {DOWN: "fp8_e4m3"})
    largest, _ = with_outliers(model, ids, DOWN, Role.INPUT, MOST_TOKENS + 1)
    weights = WeightCodes(model)
    runner = FallbackRunner(model, stack, largest, weights)
    served = runner.forward(ids)
    assert (served.overflowed, served.promoted) == (4, True)
    whole = model.forward(ids, Stacked(promoted(stack), largest, weights))
    assert_same_bits(served.logits, whole)


def test_everything_is_counted() -> None:
    model, ids = tiny.loaded(), tiny.ids(12)
    stack = stack_of(model, {DOWN: "fp8_e4m3"})
    one, _ = with_outliers(model, ids, DOWN, Role.INPUT, 1)
    runner = FallbackRunner(model, stack, one)
    for _ in range(2):
        runner.forward(ids)
    counts = runner.counts
    assert (counts.batches, counts.tokens) == (2, 24)
    assert (counts.overflowed_tokens, counts.overflow_rate) == (2, 2 / 24)
    assert (counts.promoted_batches, counts.promoted_tokens) == (0, 0)
    four, _ = with_outliers(model, ids, DOWN, Role.INPUT, 4)
    runner = FallbackRunner(model, stack, four)
    runner.forward(ids)
    assert (runner.counts.promoted_batches, runner.counts.promoted_tokens) == (1, 12)
    assert runner.counts.by_site == {(DOWN, SATURATED): 4}


def test_tokens_of_all_sequences_of_a_batch_count_together() -> None:
    model = tiny.loaded()
    ids = torch.cat([tiny.ids(8), tiny.ids(8)])  # the same twice: 2 outliers each
    stack = stack_of(model, {DOWN: "fp8_e4m3"})
    largest, _ = with_outliers(model, ids[:1], DOWN, Role.INPUT, 2)
    runner = FallbackRunner(model, stack, largest)
    assert not runner.forward(ids[:1]).promoted
    assert runner.forward(ids).promoted


def test_padding_never_falls_back() -> None:
    model, ids = tiny.loaded(), tiny.ids(8)
    stack = stack_of(model, {DOWN: "fp8_e4m3"})
    largest, (outlier,) = with_outliers(model, ids, DOWN, Role.INPUT, 1)
    mask = torch.ones_like(ids)
    mask[0, : outlier + 1] = 0  # left padding: what it changes are later tokens
    runner = FallbackRunner(
        model, stack, {**largest, (DOWN, Role.INPUT): torch.tensor(1e9)}
    )
    assert runner.forward(ids, mask).overflowed == 0
    assert runner.counts.tokens == 8 - (outlier + 1)
    noting = Noting(stack, largest, WeightCodes(model))
    noting.begin(torch.zeros_like(ids).bool())
    model.forward(ids, noting)
    assert (noting.overflowed, noting.by_site) == (0, Counter())


def test_a_nan_is_counted_and_handed_to_the_higher_precision() -> None:
    model = tiny.loaded()
    (part,) = model.parts[DOWN]
    for name in ("fp8_e4m3", "fp8_e4m3_token"):
        runner = FallbackRunner(
            model,
            Stack({DOWN: choice_named(DOWN.component, name)}),
            {(DOWN, Role.INPUT): torch.tensor(4.0)},
        )
        x = normal(1, 3, part.weight.shape[1])
        x[0, 1, 0] = float("nan")
        y = runner.executor.linear(part, x)
        assert y[0, 1].isnan().all()
        assert y[0, [0, 2]].isfinite().all()
        assert runner.executor.by_site == {(DOWN, NON_FINITE): 1}


def test_rows_of_experts_are_computed_again_and_each_counts() -> None:
    model, ids = tiny.loaded("MixtralForCausalLM"), tiny.ids(6)
    inner = Site(0, Component.FFN_IN)
    stack = stack_of(model, {inner: "fp8_e4m3"})
    found = amaxes(calibrate(model, [ids]))
    largest = {**found, (inner, Role.INPUT): found[inner, Role.INPUT] * 0.9}
    weights = WeightCodes(model)
    noting = Noting(stack, largest, weights)
    model.forward(ids, noting)
    # The one token with the largest value passes two experts.
    assert (noting.tokens, noting.overflowed) == (None, 2)
    runner = FallbackRunner(model, stack, largest, weights)
    assert runner.forward(ids).overflowed == 2
    part = model.parts[inner][0]
    rows = normal(3, part.weight.shape[1])
    rows[1] *= 1e3
    runner.executor.begin()
    y = runner.executor.linear(part, rows)
    wide = Stacked(promoted(stack), largest, weights).linear(part, rows)
    low = Stacked(stack, largest, weights).linear(part, rows)
    assert_same_bits(y, torch.stack([low[0], wide[1], low[2]]))


def test_a_stack_without_fp8_is_served_as_it_is() -> None:
    model, ids = tiny.loaded(), tiny.ids(8)
    for name in ("bf16", "fp32", "fp8_e4m3_weight_only"):
        stack = stack_of(model, {DOWN: name})
        served = FallbackRunner(model, stack, {}).forward(ids)
        plain = model.forward(ids, Stacked(stack, {}, WeightCodes(model)))
        assert_same_bits(served.logits, plain)
        assert served.overflowed == 0


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "FalconForCausalLM"])
def test_every_architecture_is_served_in_every_static_choice(architecture: str) -> None:
    model, ids = tiny.loaded(architecture), tiny.ids(8)
    narrow = {
        s: next(c.name for c in CHOICES[s.component] if c.input.format == "fp8_e4m3")
        for s in model.sites
        if any(c.input.format == "fp8_e4m3" for c in CHOICES[s.component])
    }
    stack = stack_of(model, narrow)
    largest = amaxes(calibrate(model, [ids]))
    served = FallbackRunner(model, stack, largest).forward(ids)
    # In the FP8 run later layers see other values than calibration did.
    assert served.logits.isfinite().all()


# What is to be expected


def test_the_expected_rate_is_the_share_of_tokens_that_overflow_somewhere() -> None:
    model = tiny.loaded()
    ids, other = tiny.ids(12), tiny.ids(8, seed=3)
    stack = stack_of(model, {DOWN: "fp8_e4m3"})
    largest, _ = with_outliers(model, ids, DOWN, Role.INPUT, 5)
    weights = WeightCodes(model)
    found = expected_fallback(model, [ids], stack, largest, weights)
    assert (found.tokens, found.rate, found.promoted) == (12, 5 / 12, 1.0)
    assert found.by_site == {DOWN: 5 / 12}
    none = {**largest, (DOWN, Role.INPUT): torch.tensor(1e9)}
    found = expected_fallback(model, [ids, other], stack, none, weights)
    assert (found.tokens, found.rate, found.promoted) == (20, 0.0, 0.0)
    assert found.by_site == {}


def test_a_token_that_overflows_in_two_layers_is_one_token() -> None:
    model, ids = tiny.loaded(), tiny.ids(4)
    both = {Site(i, Component.FFN_OUT): "fp8_e4m3" for i in (0, 1)}
    tiny_amax = {(s, Role.INPUT): torch.tensor(1e-6) for s in both}
    found = expected_fallback(
        model, [ids], stack_of(model, both), tiny_amax, WeightCodes(model)
    )
    assert found.rate == 1.0
    assert found.by_site == dict.fromkeys(both, 1.0)


def test_no_more_tokens_overflow_than_there_are() -> None:
    model, ids = tiny.loaded("MixtralForCausalLM"), tiny.ids(6)
    inner = Site(0, Component.FFN_IN)
    tiny_amax = {(inner, Role.INPUT): torch.tensor(1e-6)}
    stack = stack_of(model, {inner: "fp8_e4m3"})
    run, seen = Noting(stack, tiny_amax, WeightCodes(model)), Overflows([ids])
    model.forward(ids, run)
    seen.take(0, run)
    assert seen.counts == [6]  # of 12 rows
    assert run.overflowed == 0  # taken
