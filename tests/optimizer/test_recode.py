from dataclasses import replace

import pytest
import torch

from optimizer.calibrate import amaxes, calibrate
from optimizer.document import Rounding
from optimizer.document_sites import scale_ratios
from optimizer.execute import Amaxes, WeightCodes
from optimizer.model import LoadedModel, load
from optimizer.recode import Gain, recode, rounded_sites
from optimizer.run import optimize
from optimizer.sensitivity import measure
from optimizer.spec import LatencySla, OptimizeSpec
from optimizer.stack import Component, Precision, Site, Stack, choice_named
from optimizer.stream import stream
from optimizer.validate import Interval
from tests.optimizer import tiny
from tests.optimizer.conftest import chosen, quiet
from tests.service import tiny_model

SEQUENCES = [tiny.ids(48, seed=s) for s in range(4)]
WANTED = Site(1, Component.FFN_OUT)
PLAIN = Site(0, Component.FFN_OUT)


def stack_of(model: LoadedModel) -> Stack:
    """FP8 weights at one matrix, bf16 elsewhere."""
    return Stack(
        {
            site: choice_named(
                site.component, "fp8_e4m3_weight_only" if site == WANTED else "bf16"
            )
            for site in model.sites
        }
    )


def test_the_matrices_of_the_narrow_sites_are_compensated_and_no_other() -> None:
    model = tiny.loaded()
    stack = stack_of(model)
    assert set(rounded_sites(stack)) == {WANTED}
    weights, gain, _ = recode(model, SEQUENCES, stack)
    assert gain.matrices == 1
    assert 0 < gain.loss < gain.nearest_loss
    precision = rounded_sites(stack)[WANTED]
    (part,), (other,) = model.parts[WANTED], model.parts[PLAIN]
    plain = WeightCodes(model)
    codes, scale = weights.get(part, precision)
    nearest, same = plain.get(part, precision)
    assert scale is not None
    assert same is not None
    assert scale.shape == same.shape  # fitted, within one power of two
    assert not torch.equal(codes, nearest)
    bf16 = Precision("bf16")
    assert torch.equal(weights.get(other, bf16)[0], plain.get(other, bf16)[0])


def test_streamed_it_is_the_same_bytes(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    found = []
    for model in (stream(folder), load(folder)):
        weights, gain, _ = recode(model, SEQUENCES, stack_of(model))
        precision = rounded_sites(stack_of(model))[WANTED]
        with model.residency.holding(2):
            codes, _ = weights.get(model.parts[WANTED][0], precision)
        found.append((gain, codes.tolist()))
    assert found[0] == found[1]


def test_static_scales_are_fitted_to_what_errors_cost() -> None:
    model = tiny.loaded()
    names = {
        PLAIN: "fp8_e4m3",
        Site(0, Component.ATTN_SCORES): "fp8_e4m3_head",
        Site(0, Component.ATTN_SOFTMAX): "fp8_e4m3",
    }
    stack = Stack({s: choice_named(s.component, n) for s, n in names.items()})
    largest = amaxes(calibrate(model, SEQUENCES))
    _, gain, fitted = recode(model, SEQUENCES, stack, amaxes=largest)
    changed = {f"{s} {r}" for (s, r), a in fitted.items() if (a != largest[s, r]).any()}
    assert changed == set(gain.static_scales)
    assert changed
    assert {name.split(" ")[0] for name in changed} <= set(map(str, names))
    assert recode(model, SEQUENCES, stack).gain.static_scales == {}  # not calibrated

    def lost(some: Amaxes) -> float:
        candidates = {s: [c] for s, c in stack.choices.items()}
        weights = WeightCodes(model)
        found = measure(model, SEQUENCES, candidates, some, weights)
        return sum(one.kl_nats for one in found.values())

    assert lost(fitted) < lost(largest)


def test_fitted_scales_are_said_at_their_site_where_they_are_used() -> None:
    gain = Gain(1, 0.5, 1.0, {f"{PLAIN} input": 1.5, f"{PLAIN} output": [1.0, 0.5]})
    kl = Interval(0.1, 0.1, 0.1)
    used = Rounding("compensated", "compensated", kl, kl, gain)
    assert scale_ratios(used, PLAIN) == {"input": 1.5, "output": [1.0, 0.5]}
    assert scale_ratios(used, WANTED) == {}
    assert scale_ratios(replace(used, used="nearest"), PLAIN) == {}


def test_a_job_keeps_it_only_where_it_measures_better(spec: OptimizeSpec) -> None:
    tight = LatencySla(per_token_s=1e-9)  # the fastest stack: FP8 wherever it pays
    asked = replace(spec, hardware="l4", latency_sla=tight, rounding="compensated")
    found = optimize(asked, quiet)["rounding"]
    assert found["asked"] == "compensated"
    assert found["gain"]["loss"] < found["gain"]["nearest_loss"]
    better = found["compensated_kl_nats"]["value"] < found["nearest_kl_nats"]["value"]
    assert found["used"] == ("compensated" if better else "nearest")
    plain = optimize(replace(asked, rounding="nearest"), quiet)
    assert plain["rounding"]["used"] == "nearest"
    kl = chosen(plain)["kl_nats"]
    assert found["nearest_kl_nats"] == kl
