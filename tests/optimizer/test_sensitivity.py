import math

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr

from optimizer import matmul, sensitivity
from optimizer.calibrate import amaxes, calibrate
from optimizer.exact import exact
from optimizer.execute import Reference, Stacked, WeightCodes
from optimizer.metrics import logits_kl_nats
from optimizer.model import LoadedModel
from optimizer.stack import (
    CHOICES,
    WHOLE_MODEL,
    Choice,
    Component,
    Site,
    Stack,
    choice_named,
    roundings,
)
from tests.optimizer import tiny

HEAD = Site(WHOLE_MODEL, Component.LM_HEAD)


def everything(model: LoadedModel) -> dict[Site, list[Choice]]:
    return {s: list(CHOICES[s.component]) for s in model.sites}


def test_fp32_loses_nothing() -> None:
    model, ids = tiny.loaded(), tiny.ids()
    fp32 = {s: [choice_named(s.component, "fp32")] for s in model.sites}
    weights, largest = WeightCodes(model), amaxes(calibrate(model, [ids]))
    losses = sensitivity.measure(model, [ids], fp32, largest, weights)
    assert {v.kl_nats for v in losses.values()} == {0.0}
    assert {v.sqnr_db for v in losses.values()} == {math.inf}


def test_the_head_in_bf16_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "MATMUL_PRECISION", "ieee")  # the same logits
    # Rounding the logits z by δ loses ½ Var_p(δ) nats: what labels drawn from p
    # estimate, since E[g gᵀ] = diag(p) - p pᵀ and independent δ leave Σ p(1-p)δ².
    model, ids = tiny.loaded(), tiny.ids(48)
    choice = choice_named(Component.LM_HEAD, "bf16")
    candidates = {HEAD: [choice]}
    weights = WeightCodes(model)
    samples = 400
    sums = sensitivity.sweep(
        model, {0: ids}, candidates, {}, weights, label_samples=samples
    )
    (output,) = (r for (_, role, _), r in sums.roundings.items() if role == "output")
    with torch.no_grad():
        logits = model.forward(ids, Reference())[0]
    p = logits.softmax(-1)
    delta = logits.bfloat16().float() - logits
    by_hand = 0.5 * float((p * (1 - p) * delta.square()).sum())
    # 48 tokens × 400 draws: a standard error of about 2 %, three of them.
    assert output.kl[0] / samples == pytest.approx(by_hand, rel=0.06)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_the_estimate_follows_the_measurement(architecture: str) -> None:
    model = tiny.loaded(architecture)
    sequences = [tiny.ids(32, seed=s) for s in range(8)]
    largest, weights = amaxes(calibrate(model, sequences)), WeightCodes(model)
    candidates = everything(model)
    fast = sensitivity.measure(
        model, sequences, candidates, largest, weights, label_samples=4
    )
    measured = exact(model, sequences, candidates, largest, weights)
    pairs = [k for k, v in measured.items() if v > 0]
    logs = np.log([[measured[k], fast[k].kl_nats] for k in pairs])
    # A model this small has few elements to average over; see tests/bench/sweep.py.
    assert pearsonr(logs[:, 0], logs[:, 1]).statistic > 0.9
    assert abs(np.median(logs[:, 1] - logs[:, 0])) < math.log(1.5)


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_a_cached_prefix_changes_no_bit(architecture: str) -> None:
    model, ids = tiny.loaded(architecture), tiny.ids()
    largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
    measured = exact(model, [ids], everything(model), largest, weights)
    with torch.no_grad():
        reference = model.forward(ids, Reference())[0]
        for (site, choice), kl in measured.items():
            executor = Stacked(Stack({site: choice}), largest, weights)
            logits = model.forward(ids, executor)[0]
            whole = logits_kl_nats(reference, logits).sum(dtype=torch.float64)
            assert kl == float(whole) / ids.numel(), (str(site), choice.name)


def test_the_same_seed_gives_the_same_bytes() -> None:
    def run() -> list[float]:
        model, ids = tiny.loaded(), tiny.ids()
        largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
        found = sensitivity.measure(model, [ids], everything(model), largest, weights)
        return [v.kl_nats for v in found.values()]

    assert run() == run()


def test_what_a_choice_rounds() -> None:
    def places(component: Component, name: str) -> list[str]:
        choice = choice_named(component, name)
        return [f"{role}:{p.format}" for role, p in roundings(component, choice)]

    assert places(Component.FFN_IN, "fp8_e5m2") == [
        "input:fp8_e5m2",
        "weight:fp8_e4m3",
        "output:bf16",
    ]
    assert places(Component.FFN_IN, "fp8_e4m3_weight_only") == [
        "input:bf16",
        "weight:fp8_e4m3",
        "output:bf16",
    ]
    assert places(Component.ATTN_SOFTMAX, "bf16") == ["input:bf16", "output:bf16"]
    assert places(Component.ATTN_SCORES, "bf16") == ["input:bf16", "weight:bf16"]
    assert places(Component.NORMS, "fp32") == []


def test_shares_are_of_what_was_rounded() -> None:
    model, ids = tiny.loaded(), tiny.ids()
    site = Site(0, Component.FFN_OUT)
    choice = choice_named(site.component, "fp8_e4m3")
    largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
    found = sensitivity.measure(model, [ids], {site: [choice]}, largest, weights)
    assert found[site, choice].saturated == 0.0  # the same data set the scale
    clipped = {k: v / 4 for k, v in largest.items()}
    found = sensitivity.measure(model, [ids], {site: [choice]}, clipped, weights)
    assert 0.0 < found[site, choice].saturated < 0.5


@pytest.mark.parametrize(
    ("name", "saturates"),
    [("fp4_e2m1_mx", True), ("fp4_e2m1_nv", True), ("fp8_e4m3_token", False)],
)
def test_scales_that_are_rounded_down_saturate_and_others_cannot(
    name: str, saturates: bool
) -> None:
    # MX: a group with an amax in [1.5, 2) of its power of two lies beyond fp4's 6.
    model, ids = tiny.loaded(), tiny.ids()
    site = Site(0, Component.FFN_OUT)
    choice = choice_named(site.component, name)
    largest, weights = amaxes(calibrate(model, [ids])), WeightCodes(model)
    found = sensitivity.measure(model, [ids], {site: [choice]}, largest, weights)
    share = found[site, choice].saturated
    assert share < 1 / 16
    assert (share > 0) == saturates
