"""A real model on an L4: what a loose, a tight and an impossible target get."""

from dataclasses import replace
from functools import cache
from itertools import combinations
from pathlib import Path

import pytest

from optimizer.pieces import Memory
from optimizer.plan import SAME_TIME
from optimizer.run import optimize
from optimizer.spec import LatencySla, OptimizeSpec, Workload
from tests.optimizer.conftest import Document, quiet

pytestmark = pytest.mark.slow

LOOSE_S = 10.0
TOKENS = 512  # in each half: enough to tell stacks apart, at a minute a run on one core


class Runs:
    """One run for each target, whichever test asks first."""

    def __init__(self, folder: Path) -> None:
        self.spec = OptimizeSpec(
            model="demo",
            model_path=str(folder),
            model_sha256="0" * 64,
            hardware="l4",
            # Sixteen rows against weights that 300 GB/s bring in: halving them pays.
            workload=Workload(batch_size=16, prompt_tokens=512, output_tokens=128),
            calibration_tokens=TOKENS,
            validation_tokens=TOKENS,
        )
        self.kept = Memory()  # the target changes: the sweep does not
        self.within = cache(self._within)

    def _within(self, per_token_s: float, tokens: int = TOKENS) -> Document:
        sla = LatencySla(per_token_s=per_token_s)
        halves = {"calibration_tokens": tokens, "validation_tokens": tokens}
        return optimize(replace(self.spec, latency_sla=sla, **halves), quiet, self.kept)

    @property
    def loose(self) -> Document:
        return self.within(LOOSE_S)

    @property
    def tight_s(self) -> float:
        """Five percent more than the fastest stack takes."""
        return 1.05 * float(self.loose["front"][0]["per_token_s"])


@pytest.fixture(scope="module")
def runs(demo_model: Path) -> Runs:
    return Runs(demo_model)


def validated(document: Document, name: str) -> Document:
    return next(s for s in document["validation"]["stacks"] if s["id"] == name)


def kl(stack: Document) -> float:
    return float(stack["kl_nats"]["value"])


def test_a_loose_target_loses_no_more_than_16_bits(runs: Runs) -> None:
    chosen = validated(runs.loose, "chosen")
    base = validated(runs.loose, "all_bf16")
    assert kl(chosen) <= 1.05 * kl(base)
    assert chosen["per_token_s"] <= SAME_TIME * base["per_token_s"]
    assert runs.loose["verdict"]["outcome"] in ("sla_met", "no_improvement")


def test_within_the_time_of_uniform_fp8_less_is_lost(runs: Runs) -> None:
    e4m3 = validated(runs.loose, "all_e4m3")
    found = runs.within(1.05 * float(e4m3["per_token_s"]))
    chosen = validated(found, "chosen")
    assert found["verdict"]["outcome"] == "sla_met"
    assert chosen["per_token_s"] <= 1.05 * e4m3["per_token_s"]
    assert kl(chosen) < kl(e4m3)


def test_a_tight_target_narrows_most_weights_and_loses_less_than_uniform_fp8(
    runs: Runs,
) -> None:
    found = runs.within(runs.tight_s)
    assert found["verdict"]["outcome"] == "sla_met"
    chosen = validated(found, "chosen")
    assert chosen["per_token_s"] <= runs.tight_s
    assert chosen["per_token_s"] < 0.95 * validated(found, "all_bf16")["per_token_s"]
    assert chosen["fp8_share"] > 0.5
    assert kl(chosen) < kl(validated(found, "all_e4m3"))
    assert kl(chosen) < kl(validated(found, "p0"))  # the fastest: 5 % buy quality


def test_predictions_rank_stacks_as_measurements_do(runs: Runs) -> None:
    for found in (runs.loose, runs.within(runs.tight_s)):
        stacks = found["validation"]["stacks"]
        by_prediction = sorted(stacks, key=lambda s: s["predicted_kl_nats"])
        for less, more in combinations(by_prediction, 2):
            # Stacks a twentieth apart are in either order on so few tokens.
            assert less["kl_nats"]["low"] <= more["kl_nats"]["high"]
        for stack in stacks:
            # Added up over sites, each alone: within a factor of two of the whole.
            if kl(stack) > 0:
                assert 0.5 < kl(stack) / stack["predicted_kl_nats"] < 2.0


def test_an_impossible_target_gets_the_fastest_stack_and_advice(runs: Runs) -> None:
    found = runs.within(1e-9, tokens=128)
    assert found["verdict"]["outcome"] == "sla_not_met"
    chosen = validated(found, "chosen")
    assert chosen["per_token_s"] == min(p["per_token_s"] for p in found["front"])
    # What costs time is the shape, not the data: the fastest is as fast as before.
    fastest = runs.loose["front"][0]["per_token_s"]
    assert chosen["per_token_s"] == pytest.approx(fastest, rel=1e-9)
    assert found["verdict"]["would_meet"]
