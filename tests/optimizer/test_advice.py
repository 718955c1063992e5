"""Advice follows from what a device multiplies; what has no source is called folklore."""

import pytest

from optimizer.advice import Scenario, Tier, tier, training_advice
from optimizer.hardware import DEVICES, device

TIERS = {
    "p100": Tier.FP32,
    "v100": Tier.FP16,
    "t4": Tier.FP16,
    "a10": Tier.BF16,
    "a100": Tier.BF16,
    "l4": Tier.FP8,
    "h100": Tier.FP8,
    "h200": Tier.FP8,
    "mi300x": Tier.FP8,
    "gaudi3": Tier.FP8,
    "b200": Tier.FP4,
}


@pytest.mark.parametrize(("name", "wanted"), TIERS.items())
def test_a_generation_is_what_its_units_multiply(name: str, wanted: Tier) -> None:
    assert tier(device(name)) is wanted


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("p100", "fp32"),
        ("v100", "fp16 with loss scaling"),
        ("t4", "fp16 with loss scaling"),
        ("a100", "bf16"),
        ("h100", "bf16 with FP8 matrices"),
        ("b200", "bf16 with FP8 matrices"),
    ],
)
def test_pretraining_by_generation(name: str, precision: str) -> None:
    assert training_advice(device(name), Scenario.PRETRAINING).precision == precision


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("scenario", Scenario)
def test_every_advice_has_reasons_with_sources(name: str, scenario: Scenario) -> None:
    found = training_advice(device(name), scenario)
    assert found.precision
    assert found.reasons
    for reason in (*found.reasons, *found.kept_fp32):
        assert reason.claim
        assert reason.source
        assert reason.folklore == (reason.source == "no source")


@pytest.mark.parametrize("name", DEVICES)
def test_losses_are_scaled_in_fp16_and_nowhere_else(name: str) -> None:
    found = training_advice(device(name), Scenario.LORA)
    assert (found.loss_scaling is not None) == (found.tier is Tier.FP16)


def test_the_scaler_starts_at_2_to_the_16() -> None:
    scaling = training_advice(device("t4"), Scenario.PRETRAINING).loss_scaling
    assert scaling is not None
    assert (scaling.initial, scaling.growth, scaling.growth_interval) == (
        65536,
        2,
        2000,
    )
    assert scaling.backoff == 0.5


def test_the_root_of_two_is_folklore() -> None:
    for name in ("a100", "h100", "b200"):
        said = training_advice(device(name), Scenario.PRETRAINING).reasons
        assert [r.folklore for r in said if "√2" in r.claim] == [True]


def test_fp4_is_named_where_there_is_fp4() -> None:
    def named(name: str) -> bool:
        said = training_advice(device(name), Scenario.PRETRAINING).reasons
        return any("NVFP4" in r.claim for r in said)

    assert named("b200")
    assert not named("h100")


def test_a_small_model_stays_in_fp32_by_folklore() -> None:
    found = training_advice(device("h100"), Scenario.SMALL_MODEL)
    assert found.precision == "fp32"
    assert [r.folklore for r in found.reasons] == [True, False]


def test_bf16_loses_a_change_under_a_512th() -> None:
    # Seven bits behind the point: from 1 the next number is 1 + 1/128, from just under
    # 2 the relative spacing is 1/256, and half of that rounds away.
    assert 2**-7 / 2 / 2 == 1 / 512
