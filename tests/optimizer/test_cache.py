"""The KV cache as a site: what is stored of K and V is what attention reads."""

import pytest
import torch
from torch import Tensor

from optimizer.execute import Operand, Stacked, WeightCodes
from optimizer.model import AttentionStep
from optimizer.stack import (
    CHOICES,
    Component,
    Granularity,
    Role,
    Site,
    Stack,
    choice_named,
)
from tests.optimizer import tiny
from tests.optimizer.steps import attend, codes_by_hand, heads_amax, step

CACHE = Site(0, Component.KV_CACHE)
SCORES = Site(0, Component.ATTN_SCORES)
VALUES = Site(0, Component.ATTN_VALUES)


def run_cache(name: str, some: AttentionStep) -> Tensor:
    largest = {
        (CACHE, Role.INPUT): heads_amax(some.key),
        (CACHE, Role.WEIGHT): heads_amax(some.value),
    }
    stack = Stack({CACHE: choice_named(CACHE.component, name)})
    return Stacked(stack, largest, WeightCodes(tiny.loaded())).attention(some)


NARROW_CACHES = [c.name for c in CHOICES[CACHE.component] if c.name != "fp32"]


@pytest.mark.parametrize("name", NARROW_CACHES)
def test_attention_reads_what_the_cache_gives_back(name: str) -> None:
    some, choice = step(), choice_named(CACHE.component, name)
    assert choice.weight is not None
    held = []
    for x, precision in ((some.key, choice.input), (some.value, choice.weight)):
        largest = heads_amax(x)
        by_head = precision.granularity is Granularity.HEAD
        largest = largest.view(1, -1, 1, 1) if by_head else largest.max()
        codes, scale = codes_by_hand(x, precision, largest)
        held.append(codes * scale)
    assert some.mask is not None
    q = some.query.double()
    want = attend(q, *held, some.mask.double(), some.scaling)
    # exp() of scores near 40 in fp32 has 40 times the rounding of a score.
    torch.testing.assert_close(
        run_cache(name, some).double(), want, rtol=1e-4, atol=1e-4
    )


def test_the_cache_rounds_k_first_and_v_second_before_anyone_reads_them() -> None:
    some = step()
    stack = Stack({CACHE: choice_named(CACHE.component, "bf16")})
    executor = Keeping(stack, {}, WeightCodes(tiny.loaded()))
    executor.attention(some)
    order = [place for place, _ in executor.seen]
    assert order[:2] == [(CACHE, Role.INPUT), (CACHE, Role.WEIGHT)]
    seen = dict(executor.seen)
    assert torch.equal(seen[CACHE, Role.INPUT], some.key)
    assert torch.equal(seen[CACHE, Role.WEIGHT], some.value)
    assert torch.equal(seen[SCORES, Role.WEIGHT], some.key.bfloat16().float())
    assert torch.equal(seen[VALUES, Role.WEIGHT], some.value.bfloat16().float())


class Keeping(Stacked):
    """Keeps what passes, in order."""

    def __init__(
        self,
        stack: Stack,
        largest: dict[tuple[Site, Role], Tensor],
        weights: WeightCodes,
    ) -> None:
        super().__init__(stack, largest, weights)
        self.seen: list[tuple[tuple[Site, Role], Tensor]] = []

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        self.seen.append(((site, role), x))
        return super().tap(site, role, x, mask)


# Case D1
@pytest.mark.parametrize(
    ("key", "unscaled", "scaled"),
    [
        (
            [1000.0, 500.0, -3.0, 0.02],
            [448.0, 448.0, -3.0, 0.01953125],
            [1000.0, 500.0, -3.0691965, 0.0217983],
        ),
        (
            [0.01, 0.001, 0.0001],
            [0.009765625, 0.001953125, 0.0],
            [0.01, 0.00098214, 0.00010045],
        ),
    ],
)
def test_a_cache_without_scales_loses_what_a_scale_keeps(
    key: list[float], unscaled: list[float], scaled: list[float]
) -> None:
    x = torch.tensor(key).view(1, 1, 1, -1)
    place = CACHE, Role.INPUT
    stack = Stack({CACHE: choice_named(CACHE.component, "fp8_e4m3")})
    for largest, want in ((448.0, unscaled), (float(x.abs().max()), scaled)):
        executor = Stacked(
            stack, {place: torch.tensor([largest])}, WeightCodes(tiny.loaded())
        )
        got = executor.elementwise(*place, x).flatten().tolist()
        assert got == pytest.approx(want, rel=1e-4)


# Case D1
@pytest.mark.parametrize(
    ("name", "second"),
    [("fp8_e4m3_head", [0.01, 0.02]), ("fp8_e4m3", [0.0095912, 0.0191825])],
)
def test_a_cache_scale_for_each_head_keeps_the_small_one(
    name: str, second: list[float]
) -> None:
    x = torch.tensor([[100.0, 1.0], [0.01, 0.02]]).view(1, 2, 1, 2)
    stack = Stack({CACHE: choice_named(CACHE.component, name)})
    largest = {(CACHE, Role.INPUT): heads_amax(x)}
    executor = Stacked(stack, largest, WeightCodes(tiny.loaded()))
    got = executor.elementwise(CACHE, Role.INPUT, x)
    assert got[0, 1, 0].tolist() == pytest.approx(second, rel=1e-5)
