import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from optimizer.calibrate import amaxes, calibrate
from optimizer.errors import NonFiniteError
from optimizer.execute import Reference, Stacked, WeightCodes
from optimizer.model import LoadedModel
from optimizer.stack import CHOICES, Component, Stack, choice_named
from optimizer.validate import (
    Interval,
    Quality,
    Truth,
    Validation,
    reference_states,
    validate,
)
from tests.optimizer import tiny

SEQUENCES = [tiny.ids(40, seed=1), tiny.ids(40, seed=2), tiny.ids(8, seed=3)]


def uniform(model: LoadedModel, name: str) -> Stack:
    """The stack with `name` wherever it exists, bf16 elsewhere."""
    return Stack(
        {
            s: choice_named(s.component, name if name in names(s.component) else "bf16")
            for s in model.sites
        }
    )


def names(component: Component) -> set[str]:
    return {c.name for c in CHOICES[component]}


def validated(
    model: LoadedModel,
    stacks: dict[str, Stack],
    sequences: list[Tensor] = SEQUENCES,
    seed: int = 0,
) -> Validation:
    largest = amaxes(calibrate(model, SEQUENCES))
    return validate(model, sequences, stacks, largest, WeightCodes(model), seed=seed)


def logits(model: LoadedModel, stack: Stack | None, ids: Tensor) -> Tensor:
    """Return float64 logits of a run of its own."""
    largest = amaxes(calibrate(model, SEQUENCES))
    executor = Stacked(stack, largest, WeightCodes(model)) if stack else Reference()
    with torch.no_grad():
        return model.forward(ids, executor)[0].double()


def nll(some: Tensor, ids: Tensor) -> Tensor:
    return functional.cross_entropy(some[:-1], ids[0, 1:], reduction="none")


@pytest.mark.parametrize("name", ["empty", "fp32"])
def test_the_reference_loses_nothing_against_itself(name: str) -> None:
    model = tiny.loaded()
    stack = Stack() if name == "empty" else uniform(model, "fp32")
    found = validated(model, {"same": stack})
    same = found.stacks["same"]
    assert same.kl_nats == Interval(0.0, 0.0, 0.0)
    assert same.top1_agreement == Interval(1.0, 1.0, 1.0)
    assert (same.worst_token_kl_nats, same.p99_token_kl_nats) == (0.0, 0.0)
    assert same.perplexity.value == found.reference_perplexity


@pytest.mark.parametrize("name", ["bf16", "fp8_e4m3", "fp8_e5m2"])
def test_kl_perplexity_and_agreement_are_those_of_float64(name: str) -> None:
    model = tiny.loaded()
    stack = uniform(model, name)
    kl, loss, agree = [], [], []
    for ids in SEQUENCES:
        ours, reference = logits(model, stack, ids), logits(model, None, ids)
        log_p, log_q = reference.log_softmax(-1), ours.log_softmax(-1)
        kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
        loss.append(nll(ours, ids))
        agree.append(reference.argmax(-1) == ours.argmax(-1))
    by_hand = torch.cat(kl)
    quality = validated(model, {"it": stack}).stacks["it"]
    # fp32 logits of about 5 have steps of 5e-7, and their differences are 0.01 or more.
    assert quality.kl_nats.value == pytest.approx(float(by_hand.mean()), rel=1e-3)
    assert quality.worst_token_kl_nats == pytest.approx(float(by_hand.max()), rel=1e-3)
    p99 = float(np.quantile(by_hand.numpy(), 0.99))
    assert quality.p99_token_kl_nats == pytest.approx(p99, rel=1e-3)
    perplexity = math.exp(float(torch.cat(loss).mean()))
    assert quality.perplexity.value == pytest.approx(perplexity, rel=1e-5)
    share = float(torch.cat(agree).double().mean())
    assert quality.top1_agreement.value == pytest.approx(share)


def test_narrower_stacks_lose_more() -> None:
    model = tiny.loaded()
    found = validated(
        model, {n: uniform(model, n) for n in ("fp8_e5m2", "fp8_e4m3", "bf16", "fp32")}
    )
    lost = [q.kl_nats.value for q in found.stacks.values()]
    assert lost == sorted(lost, reverse=True)
    assert list(found.stacks) == ["fp8_e5m2", "fp8_e4m3", "bf16", "fp32"]


def test_every_token_weighs_the_same_whatever_sequence_it_is_in() -> None:
    # Case A18: sequences of 40 and 8 tokens make 39 and 7 predictions.
    model = tiny.loaded()
    long, short = SEQUENCES[0], SEQUENCES[2]
    losses = [nll(logits(model, None, ids), ids) for ids in (long, short)]
    assert [len(some) for some in losses] == [39, 7]
    by_hand = math.exp(float(sum(some.sum() for some in losses)) / (39 + 7))
    found = validated(model, {}, [long, short])
    assert found.reference_perplexity == pytest.approx(by_hand, rel=1e-5)
    assert found.tokens == 48
    of_means = math.exp(sum(float(some.mean()) for some in losses) / 2)
    assert of_means != pytest.approx(by_hand, rel=1e-3)  # or the case shows nothing


def intervals(quality: Quality) -> list[Interval]:
    return [quality.kl_nats, quality.perplexity, quality.top1_agreement]


def test_intervals_hold_their_value_and_repeat_by_seed() -> None:
    model = tiny.loaded()
    stack = {"it": uniform(model, "fp8_e4m3")}
    first = validated(model, stack).stacks["it"]
    for interval in intervals(first):
        assert interval.low < interval.value < interval.high
    assert validated(model, stack).stacks["it"] == first
    assert validated(model, stack, seed=1).stacks["it"] != first


def test_the_share_of_tokens_that_go_beyond_fp8_is_measured() -> None:
    model = tiny.loaded()
    stack = uniform(model, "fp8_e4m3")
    rest = ([SEQUENCES[0]], {"it": stack, "bf16": uniform(model, "bf16")})
    largest = amaxes(calibrate(model, SEQUENCES))
    tiny_range = {place: amax * 1e-6 for place, amax in largest.items()}
    shares = []
    for scales in ({k: v * 1e6 for k, v in largest.items()}, tiny_range):
        found = validate(model, *rest, scales, WeightCodes(model)).stacks
        assert found["bf16"].fallback == 0.0
        shares.append(found["it"].fallback)
    assert shares == [0.0, 1.0]


def test_a_head_that_runs_on_kept_states_gives_the_same_bits() -> None:
    model = tiny.loaded()
    states = reference_states(model, SEQUENCES)
    assert [s.shape[:2] for s in states] == [ids.shape for ids in SEQUENCES]
    whole, kept = (Truth.of(model, SEQUENCES, states=s) for s in (None, states))
    for index in range(len(SEQUENCES)):
        assert kept.logits.get((0, index)).equal(whole.logits.get((0, index)))
    assert kept.nll.tolist() == whole.nll.tolist()


def test_tokens_beyond_fp8_are_counted_in_every_row_of_a_batch() -> None:
    model = tiny.loaded()
    largest = amaxes(calibrate(model, SEQUENCES))
    small = {place: amax * 1e-6 for place, amax in largest.items()}
    stack = {"it": uniform(model, "fp8_e4m3")}
    found = validate(model, SEQUENCES, stack, small, WeightCodes(model))
    assert found.stacks["it"].fallback == 1.0  # 40, 40 and 8 tokens in two batches


def test_other_stacks_beside_it_change_nothing() -> None:
    model = tiny.loaded()
    wide, narrow = uniform(model, "bf16"), uniform(model, "fp8_e4m3")
    alone = validated(model, {"wide": wide})
    both = validated(model, {"narrow": narrow, "wide": wide})
    assert both.stacks["wide"] == alone.stacks["wide"]
    assert both.reference_perplexity == alone.reference_perplexity


def test_progress_counts_every_run() -> None:
    model, told = tiny.loaded(), []
    validate(
        model,
        SEQUENCES,
        {"a": Stack(), "b": Stack()},
        {},
        WeightCodes(model),
        progress=lambda done, planned: told.append((done, planned)),
    )
    assert told == [(i, 3) for i in range(4)]  # 2 stacks and the reference


def test_what_is_not_finite_on_held_out_text_only_is_named_with_its_sample() -> None:
    model = tiny.loaded()
    with torch.no_grad():
        model.network.get_input_embeddings().weight[50, 3] = math.inf  # type: ignore[operator]
    held_out = [torch.tensor([[3, 4, 5]]), torch.tensor([[6, 50, 7]])]
    with pytest.raises(NonFiniteError, match="embeddings, held-out sample 1"):
        Truth.of(model, held_out)


def test_the_layer_whose_output_overflows_is_named() -> None:
    model = tiny.loaded()
    mlp = model.layers[1].mlp
    with torch.no_grad():  # silu(gate) · up overflows float32
        for part in (mlp.gate_proj, mlp.up_proj):  # type: ignore[union-attr]
            part.weight.abs_().mul_(1e20)  # type: ignore[operator, union-attr]
    with pytest.raises(NonFiniteError, match=r"output of layers\.1, held-out sample 0"):
        Truth.of(model, SEQUENCES)
