import pytest
import torch
from torch import Tensor

from optimizer.calibrate import amaxes, calibrate
from optimizer.execute import Reference, WeightCodes
from optimizer.model import LoadedModel
from optimizer.sensitivity import sweep
from optimizer.stack import CHOICES, Choice, Site
from optimizer.sums import total
from optimizer.walk import Activations, walk
from tests.optimizer import tiny

SEQUENCES = [tiny.ids(24, seed=s) for s in range(3)]


def candidates(model: LoadedModel) -> dict[Site, list[Choice]]:
    return {s: list(CHOICES[s.component]) for s in model.sites}


# Activations


@pytest.mark.parametrize("budget", [0, 100, 1 << 20])
def test_what_is_kept_comes_back(budget: int) -> None:
    kept = Activations(budget)
    some = {(s, i): torch.randn(2, 3 + s) for s in range(3) for i in range(2)}
    for key, x in some.items():
        kept.put(key, x)
    kept.drop((0, 1))
    kept.put((1, 1), some[1, 0])  # replaced
    assert (0, 1) not in kept
    assert torch.equal(kept.get((1, 1)), some[1, 0])
    for key in ((0, 0), (1, 0), (2, 0), (2, 1)):
        assert torch.equal(kept.get(key), some[key])
    with pytest.raises(KeyError):
        kept.get((0, 1))


def test_room_in_the_file_is_used_again() -> None:
    kept = Activations(budget_bytes=0)
    for n in range(50):
        kept.put((0, 0), torch.full((64,), float(n)))
    kept.put((0, 1), torch.zeros(64))
    assert kept.get((0, 0)).unique().tolist() == [49.0]
    assert kept._file is not None
    assert kept._file.seek(0, 2) == 2 * 64 * 4


# Stages


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "GPT2LMHeadModel"])
def test_stage_by_stage_is_the_whole_pass_bit_for_bit(architecture: str) -> None:
    model = tiny.loaded(architecture)
    found: dict[int, Tensor] = {}

    def after(stage: int, index: int, out: Tensor) -> None:
        if stage == model.stages - 1:
            found[index] = out

    kept = Activations()
    walk(model, SEQUENCES, Reference(), kept=kept, after=after)
    for index, ids in enumerate(SEQUENCES):
        with torch.no_grad():
            assert torch.equal(found[index], model.forward(ids, Reference()))


def test_only_what_is_needed_is_kept() -> None:
    model, kept = tiny.loaded(), Activations()
    walk(model, SEQUENCES, Reference(), kept=kept, keep_all=False)
    assert not any((s, 0) in kept for s in range(model.stages))


# Sweeps in parts


def test_sweeps_of_parts_add_up_to_the_same_bytes() -> None:
    model = tiny.loaded()
    wanted, weights = candidates(model), WeightCodes(model)
    largest = amaxes(calibrate(model, SEQUENCES))
    whole = sweep(model, dict(enumerate(SEQUENCES)), wanted, largest, weights)
    parts = sweep(model, {2: SEQUENCES[2]}, wanted, largest, weights)
    first = {0: SEQUENCES[0], 1: SEQUENCES[1]}
    parts.merge(sweep(model, first, wanted, largest, weights))
    assert {k: v.kl_nats for k, v in total(whole, wanted).items()} == {
        k: v.kl_nats for k, v in total(parts, wanted).items()
    }
    assert {k: v.kl_nats_se for k, v in total(whole, wanted).items()} == {
        k: v.kl_nats_se for k, v in total(parts, wanted).items()
    }


def test_what_calibration_kept_saves_a_pass_and_changes_no_bit() -> None:
    model, kept = tiny.loaded(), Activations(budget_bytes=0)
    largest = amaxes(calibrate(model, SEQUENCES, kept=kept))
    wanted, weights = candidates(model), WeightCodes(model)
    numbered = dict(enumerate(SEQUENCES))
    again = sweep(model, numbered, wanted, largest, weights, kept=kept)
    fresh = sweep(model, numbered, wanted, largest, weights)
    assert again == fresh


def test_the_error_estimate_follows_from_how_much_sequences_differ() -> None:
    model = tiny.loaded()
    wanted, weights = candidates(model), WeightCodes(model)
    largest = amaxes(calibrate(model, SEQUENCES))
    many = {i: tiny.ids(24, seed=i) for i in range(32)}
    every = total(sweep(model, many, wanted, largest, weights), wanted)
    halves = [
        total(sweep(model, part, wanted, largest, weights), wanted)
        for part in (
            {i: many[i] for i in range(16)},
            {i: many[i] for i in range(16, 32)},
        )
    ]
    lossy = [k for k, v in every.items() if v.kl_nats > 0]
    # Two halves differ by √2 · √2 standard errors of the whole, on average over pairs.
    ratios = [
        abs(halves[0][k].kl_nats - halves[1][k].kl_nats) / (2 * every[k].kl_nats_se)
        for k in lossy
    ]
    mean_square = sum(r * r for r in ratios) / len(ratios)
    assert 0.3 < mean_square < 3.0
