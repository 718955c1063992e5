"""The share of the top attention weight, before and after a choice (R5)."""

import pytest
import torch
from torch import Tensor

from optimizer.calibrate import amaxes, calibrate
from optimizer.execute import Amaxes, Operand, Reference, Stacked, WeightCodes
from optimizer.formats import E4M3
from optimizer.model import LoadedModel
from optimizer.quantize import fake_quantize
from optimizer.stack import CHOICES, Choice, Component, Role, Site, Stack, choice_named
from optimizer.top_weight import (
    Alternatives,
    TopWeight,
    WatchedReference,
    WatchedStack,
    to_json,
)
from tests.optimizer import tiny
from tests.optimizer.numbers import normal
from tests.optimizer.test_calibrate import padded

SCORES, SOFTMAX = (Site(1, c) for c in (Component.ATTN_SCORES, Component.ATTN_SOFTMAX))
CANDIDATES = {s: CHOICES[s.component] for s in (SCORES, SOFTMAX)}


class Keep(Reference):
    """Runs the reference and keeps its probabilities."""

    def __init__(self) -> None:
        self.p: dict[int, Tensor] = {}
        self.scores: dict[int, Tensor] = {}

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        if site.component is Component.ATTN_SOFTMAX:
            (self.p if role is Role.OUTPUT else self.scores)[site.layer] = x.clone()
        return x, None


@pytest.fixture(scope="module")
def calibrated() -> tuple[LoadedModel, Amaxes, WeightCodes]:
    model = tiny.loaded()
    return model, amaxes(calibrate(model, [tiny.ids()])), WeightCodes(model)


def run(model: LoadedModel, executor: Reference) -> None:
    with torch.no_grad():
        model.forward(tiny.ids(), executor)


def test_by_hand() -> None:
    p = torch.tensor([[[[1.0, 0.0], [0.3, 0.7]], [[1.0, 0.0], [0.6, 0.4]]]])
    seen = TopWeight()
    seen.add(p)
    assert seen.mean == pytest.approx((1 + 0.7 + 1 + 0.6) / 4)
    assert TopWeight().mean == 0.0
    assert seen.merge(seen).mean == pytest.approx(seen.mean)


@pytest.mark.parametrize("left", [False, True])
def test_queries_that_are_padding_are_not_seen(left: bool) -> None:
    # Case B3.
    rows = [
        normal(n, 2, 7, seed=n).softmax(-1) for n in (3, 7)
    ]  # (queries, heads, keys)
    batch, keep = padded(rows, 1.0, left)
    together, alone = TopWeight(), TopWeight()
    together.add(batch.transpose(1, 2), keep)
    for row in rows:
        alone.add(row[None].transpose(1, 2))
    assert together.count == alone.count
    assert together.mean == pytest.approx(alone.mean, rel=1e-6)


def test_before_is_that_of_the_reference(
    calibrated: tuple[LoadedModel, Amaxes, WeightCodes],
) -> None:
    model, _, _ = calibrated
    watched, keep = WatchedReference(), Keep()
    run(model, watched)
    run(model, keep)
    assert watched.top.keys() == {0, 1}
    for layer, p in keep.p.items():
        assert watched.top[layer].mean == pytest.approx(float(p.amax(-1).mean()))


def test_watching_changes_no_output(
    calibrated: tuple[LoadedModel, Amaxes, WeightCodes],
) -> None:
    model, largest, weights = calibrated
    stack = Stack({s: choice_named(s.component, "fp8_e4m3") for s in CANDIDATES})
    with torch.no_grad():
        for plain, watched in (
            (Reference(), WatchedReference()),
            (Reference(), Alternatives(CANDIDATES, largest, weights)),
            (
                Stacked(stack, largest, weights),
                WatchedStack(stack, largest, weights),
            ),
        ):
            want = model.forward(tiny.ids(), plain)
            assert torch.equal(model.forward(tiny.ids(), watched), want)


def test_after_is_that_of_the_rounded_probabilities(
    calibrated: tuple[LoadedModel, Amaxes, WeightCodes],
) -> None:
    model, largest, weights = calibrated
    keep, executor = Keep(), Alternatives(CANDIDATES, largest, weights)
    run(model, keep)
    run(model, executor)
    assert executor.after.keys() == {(s, c) for s, cs in CANDIDATES.items() for c in cs}
    e4m3 = choice_named(Component.ATTN_SOFTMAX, "fp8_e4m3")
    scores, mask = keep.scores[1], torch.ones(24, 24).triu(1).bool()
    rounded = fake_quantize(scores, largest[SOFTMAX, Role.INPUT] / E4M3.max, E4M3)
    p = rounded.masked_fill(mask, -torch.inf).softmax(-1)
    p = fake_quantize(p, largest[SOFTMAX, Role.OUTPUT] / E4M3.max, E4M3)
    got = executor.after[SOFTMAX, e4m3]
    assert got.mean == pytest.approx(float(p.amax(-1).mean()), rel=1e-5)


def test_fp32_moves_nothing_and_fewer_bits_move_more(
    calibrated: tuple[LoadedModel, Amaxes, WeightCodes],
) -> None:
    model, largest, weights = calibrated
    executor = Alternatives(CANDIDATES, largest, weights)
    run(model, executor)
    before = executor.top[1].mean

    def moved(site: Site, name: str) -> float:
        choice: Choice = choice_named(site.component, name)
        return abs(executor.after[site, choice].mean - before)

    for site in CANDIDATES:
        assert moved(site, "fp32") == 0.0
        assert moved(site, "bf16") < moved(site, "fp8_e5m2")
    assert 0 not in executor._runs  # layers without candidates are not run again


def test_json_holds_every_layer_and_choice(
    calibrated: tuple[LoadedModel, Amaxes, WeightCodes],
) -> None:
    model, largest, weights = calibrated
    executor = Alternatives(CANDIDATES, largest, weights)
    run(model, executor)
    rows = to_json(executor.top, {1: TopWeight(3.0, 4)}, executor.after)
    assert [(r["layer"], r["after"]) for r in rows] == [(0, None), (1, 0.75)]
    assert rows[0]["choices"] == {}
    names = {c.name for c in CHOICES[Component.ATTN_SOFTMAX]}
    assert rows[1]["choices"]["attn_softmax"].keys() == names  # type: ignore[index]
