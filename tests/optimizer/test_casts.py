"""What neighbors of different precision pay, by hand and in the search."""

import itertools
from dataclasses import replace

import pytest

from optimizer import casts, kernels
from optimizer.casts import NO_CASTS, cast_s, neighbors
from optimizer.choose import Chooser
from optimizer.cost import HOST_S
from optimizer.fits import fit
from optimizer.hardware import device
from optimizer.search import totals
from optimizer.spec import LatencySla, Workload
from optimizer.stack import (
    WHOLE_MODEL,
    Component,
    Granularity,
    ModelShape,
    Precision,
    Site,
    SiteShape,
    Stack,
    choice_named,
)
from optimizer.timing import pass_s
from tests.optimizer.toy import (
    BATCH,
    DOWN,
    FFN,
    NORMS,
    SPEC,
    chooser,
    toy,
)

H100 = device("h100")
FIT = fit(H100)
REACHED = H100.bandwidth_bytes_s * FIT.stream.bandwidth_share  # bytes/s
ACT = Site(0, Component.FFN_ACT)
DOWN_SHAPE = SiteShape(DOWN, 4096, 8192, 4096 * 8192)
ACT_SHAPE = SiteShape(ACT, elements=8192)
BF16, FP16, FP32 = (Precision(f) for f in ("bf16", "fp16", "fp32"))
E4M3 = Precision("fp8_e4m3")


# One cast


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
def test_formats_that_agree_cost_nothing(fmt: str) -> None:
    for shape in (DOWN_SHAPE, ACT_SHAPE):
        assert cast_s(Precision(fmt), Precision(fmt), shape, 16, H100) == 0.0


@pytest.mark.parametrize(
    ("given", "wanted", "moved"), [(FP32, BF16, 6), (BF16, FP32, 6), (FP16, BF16, 4)]
)
def test_a_matrix_pays_a_pass_for_another_format(
    given: Precision, wanted: Precision, moved: int
) -> None:
    # 16 tokens of 8192 elements are read in one format and written in the other.
    by_hand = moved * 16 * 8192 / REACHED + FIT.stream.fixed_s
    assert cast_s(given, wanted, DOWN_SHAPE, 16, H100) == pytest.approx(by_hand)


def test_16_bits_to_fp8_are_in_the_price_of_the_site_already() -> None:
    assert cast_s(BF16, E4M3, DOWN_SHAPE, 16, H100) == 0.0
    # From fp32 the pass reads 2 bytes more.
    more = 2 * 16 * 8192 / REACHED
    assert cast_s(FP32, E4M3, DOWN_SHAPE, 16, H100) == pytest.approx(more)


def test_fp8_that_is_handed_on_as_it_is_wanted_gives_the_pass_back() -> None:
    back = pass_s(16, 8192, E4M3, H100, None)
    assert cast_s(E4M3, E4M3, DOWN_SHAPE, 16, H100) == -back
    token = Precision("fp8_e4m3", Granularity.TOKEN)
    assert cast_s(E4M3, token, DOWN_SHAPE, 16, H100) > -back / 2
    assert cast_s(E4M3, BF16, DOWN_SHAPE, 16, H100) > 0.0  # widened in a pass


def test_an_elementwise_kernel_casts_as_it_reads() -> None:
    elements = 16 * 8192
    assert cast_s(FP32, BF16, ACT_SHAPE, 16, H100) == pytest.approx(
        2 * elements / REACHED
    )
    assert cast_s(BF16, FP32, ACT_SHAPE, 16, H100) == pytest.approx(
        -2 * elements / REACHED
    )
    assert cast_s(FP16, BF16, ACT_SHAPE, 16, H100) == 0.0


def test_the_pass_that_is_given_back_is_the_one_that_was_measured() -> None:
    known = kernels.tables("h100")
    assert known is not None
    for granularity, dynamic in (
        (Granularity.TENSOR, False),
        (Granularity.TOKEN, True),
    ):
        wanted = Precision("fp8_e4m3", granularity)
        timed = known.quantize(16, 8192, dynamic=dynamic)
        assert timed is not None
        back = cast_s(wanted, wanted, DOWN_SHAPE, 16, H100, known)
        assert back == -timed.seconds
    # Groups were not timed, nor rows beyond the tables.
    group = Precision("fp8_e4m3", Granularity.GROUP)
    modelled = pass_s(16, 8192, group, H100, None)
    assert pass_s(16, 8192, group, H100, known) == modelled
    assert pass_s(1 << 20, 8192, E4M3, H100, known) > 0


def test_without_graphs_a_pass_takes_the_host_as_long_as_any_kernel() -> None:
    some = casts.modelled(toy(), H100, replace(BATCH, cuda_graphs=False))
    norm = choice_named(Component.NORMS, "fp32")
    wide = choice_named(Component.FFN_IN, "bf16")
    assert some.cost_of((NORMS, FFN), norm, wide).per_token_s == HOST_S
    assert cast_s(E4M3, E4M3, DOWN_SHAPE, 1, H100, None, HOST_S) == -HOST_S


# Neighbors


def test_neighbors_are_those_that_exist() -> None:
    final = SiteShape(Site(WHOLE_MODEL, Component.NORMS), elements=4096)
    shape = replace(toy(), sites=(*toy().sites, final))
    assert [tuple(map(str, pair)) for pair in neighbors(shape)] == [
        ("layers.0.norms", "layers.0.ffn_in"),
        ("norms", "lm_head"),
    ]


@pytest.mark.parametrize(("inner", "gated"), [(8192, False), (16384, True)])
def test_a_gated_activation_hands_on_16_bits(inner: int, gated: bool) -> None:
    # act(gate) · up is multiplied in 16 bits, whatever the activation was rounded to.
    sites = (SiteShape(FFN, inner, 4096), ACT_SHAPE, DOWN_SHAPE)
    some = casts.modelled(replace(toy(), sites=sites), H100, BATCH)
    act = choice_named(Component.FFN_ACT, "fp8_e4m3")
    down = choice_named(Component.FFN_OUT, "fp8_e4m3")
    cost = some.cost_of((ACT, DOWN), act, down)
    back = -pass_s(BATCH.batch_size, 8192, E4M3, H100, kernels.tables("h100"))
    assert cost.per_token_s == (0.0 if gated else back)
    assert cost.first_token_s <= cost.per_token_s


def test_lm_head_reads_one_row_of_each_sequence() -> None:
    final = Site(WHOLE_MODEL, Component.NORMS)
    head = SiteShape(Site(WHOLE_MODEL, Component.LM_HEAD), 1600, 4096)
    shape = replace(toy(), sites=(SiteShape(final, elements=4096), head))
    some = casts.modelled(shape, H100, BATCH)
    norm = choice_named(Component.NORMS, "fp32")
    cost = some.cost_of(
        (final, head.site), norm, choice_named(Component.LM_HEAD, "bf16")
    )
    assert cost.first_token_s == cost.per_token_s > 0


# In the search


def with_casts(some: Chooser, shape: ModelShape, workload: Workload = BATCH) -> Chooser:
    priced = casts.modelled(shape, device(SPEC.hardware), workload)
    return Chooser(some.model, some.table, some.max_bytes, priced)


def test_a_chooser_counts_casts_as_the_search_does() -> None:
    shape = ungated()
    some = with_casts(chooser(shape=shape), shape)
    assert some.edges
    for stack in some.front():
        picks = tuple(
            group.choices.index(tuple(stack.choices[s] for s in group.sites))
            for group in some.groups
        )
        sums = totals([g.options for g in some.groups], picks, some.edges)
        mine = some.totals(stack)
        assert mine.per_token_s == pytest.approx(sums["per_token_s"], rel=1e-12)
        assert mine.first_token_s == pytest.approx(sums["first_token_s"], rel=1e-12)
        apart = Chooser(some.model, some.table, some.max_bytes).totals(stack)
        paid = some.casts.total(stack.choices)
        assert mine.per_token_s == pytest.approx(apart.per_token_s + paid.per_token_s)
    assert NO_CASTS.total(stack.choices).per_token_s == 0.0


def ungated() -> ModelShape:
    """The toy with its activation, and an ffn_in that is no wider than it."""
    sites = [SiteShape(FFN, 8192, 4096, 8192 * 4096, parts=(8192,))]
    sites += [s for s in toy().sites if s.site not in (FFN, NORMS)]
    norms = SiteShape(NORMS, elements=2 * 4096)
    return replace(toy(), sites=(*sites, ACT_SHAPE, norms))


def test_norms_in_fp32_pay_for_the_matrix_behind_them() -> None:
    # fp32 norms lose nothing. Their own time is a little more; the cast to ffn_in's
    # 16 bits is a whole pass beside it, so a target between the two tells.
    some = chooser()
    priced = with_casts(some, toy())
    base = some.base()[1]
    lone = Stack({**base.choices, NORMS: choice_named(Component.NORMS, "fp32")})
    between = (some.totals(lone).per_token_s + priced.totals(lone).per_token_s) / 2
    memory = some.totals(base).memory_bytes

    def norms(one: Chooser) -> str:
        stack = one.least_loss(LatencySla(per_token_s=between), memory)
        assert stack is not None
        return stack.choices[NORMS].name

    assert norms(some) == "fp32"
    assert norms(priced) != "fp32"


def test_with_casts_the_choice_is_the_best_of_all_stacks() -> None:
    shape = ungated()
    some = with_casts(chooser(shape=shape), shape)
    usable = {
        site: [r.choice for r in rows if r.refused is None]
        for site, rows in some.table.items()
    }
    base = some.totals(some.base()[1])
    sla = LatencySla(per_token_s=0.75 * base.per_token_s)
    found = some.least_loss(sla, base.memory_bytes)
    assert found is not None
    lost = some.totals(found).kl_nats
    # Every stack that differs in two neighboring sites at most.
    for pair in some.casts.pairs:
        for two in itertools.product(*(usable[s] for s in pair)):
            other = Stack({**found.choices, **dict(zip(pair, two, strict=True))})
            sums = some.totals(other)
            within = sums.meets(sla) and sums.memory_bytes <= base.memory_bytes
            assert not within or sums.kl_nats >= lost * (1 - 1e-9)
