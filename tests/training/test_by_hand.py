"""A two-layer model, its figures computed a second time: by hand, in float64.

Inputs and weights are small multiples of 1/8 and the learning rate is a power of two,
so float32 rounds nothing on the way, and both must agree to the last count.
"""

import math
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from optimizer.formats import FORMATS
from optimizer.training.candidates import BASELINE
from optimizer.training.document_figures import gemms, update_rows
from optimizer.training.exponents import LOWEST, Seen, look
from optimizer.training.spec import TrainingSpec
from optimizer.training.train_data import FIRST, batches
from optimizer.training.trainer import Problem, Run

Array = NDArray[np.float64]
SAMPLES, WIDTHS = 8, (6, 5, 2)
RATE = 2.0**-6
HOW = TrainingSpec(
    optimizer="sgd",
    learning_rate=RATE,
    warmup_steps=0,
    clip=None,
    batch_size=SAMPLES,
    sequence_tokens=WIDTHS[0],
    steps=4,
)
DTYPES = {
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}


@dataclass
class Squares:
    """Half the squared distance of y from 1."""

    def __call__(self, network: nn.Module, samples: Tensor) -> Tensor:
        return (network(samples) - 1).square().sum() / 2

    def predictions(self, samples: Tensor) -> int:
        return len(samples)


def eighths(rng: np.random.Generator, *shape: int) -> Array:
    return rng.integers(-12, 13, shape) / 8.0


class Hand:
    """x ▸ W₁ ▸ relu ▸ W₂ ▸ y, forth and back, once."""

    def __init__(self, x: Array, first: Array, second: Array) -> None:
        before = x @ first.T
        hidden = np.maximum(before, 0)
        y = hidden @ second.T
        gy = (y - 1) / len(x)
        gh = gy @ second
        gb = gh * (before > 0)
        self.tensors = {
            "0": {
                "input": x,
                "weight": first,
                "output": before,
                "gradient": gb,
                "weight_gradient": gb.T @ x,
            },
            "2": {
                "input": hidden,
                "weight": second,
                "output": y,
                "gradient": gy,
                "input_gradient": gh,
                "weight_gradient": gy.T @ hidden,
            },
        }


@pytest.fixture(scope="module")
def data() -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(3)
    a, b, c = WIDTHS
    x = eighths(rng, SAMPLES, a)
    x[0, :3] = 0.0
    return x, eighths(rng, b, a) / 4, eighths(rng, c, b) / 4


@pytest.fixture(scope="module")
def run(data: tuple[Array, Array, Array]) -> Run:
    x, first, second = data
    network = nn.Sequential(
        nn.Linear(WIDTHS[0], WIDTHS[1], bias=False),
        nn.ReLU(),
        nn.Linear(WIDTHS[1], WIDTHS[2], bias=False),
    )
    with torch.no_grad():
        network[0].weight.copy_(torch.from_numpy(first))
        network[2].weight.copy_(torch.from_numpy(second))
    dealt = batches(torch.from_numpy(x).float(), SAMPLES, HOW.steps, 0, FIRST)
    dealt.steps[:] = np.arange(SAMPLES)  # by hand there is one order
    found = Run(Problem(network, Squares(), dealt), HOW, BASELINE)
    found.step()
    return found


@pytest.fixture(scope="module")
def hand(data: tuple[Array, Array, Array]) -> Hand:
    return Hand(*data)


CASES = [(m, r) for m, roles in Hand(*[np.ones(s) for s in ((1, 6), (5, 6), (2, 5))]).tensors.items() for r in roles]  # fmt: skip


@pytest.mark.parametrize(("matrix", "role"), CASES)
def test_histogram_and_zero_rate(run: Run, hand: Hand, matrix: str, role: str) -> None:
    found, values = run.recorder.seen[matrix][role], hand.tensors[matrix][role]
    counted: dict[int, int] = {}
    for value in values.ravel():
        if value:
            exponent = math.frexp(value)[1] - 1
            counted[exponent] = counted.get(exponent, 0) + 1
    assert {i + LOWEST: n for i, n in enumerate(found.counts) if n} == counted
    assert found.zero_rate == float(np.mean(values == 0))
    assert found.amax == np.abs(values).max()
    assert found.squares == pytest.approx(float(np.sum(values**2)), rel=1e-12)


@pytest.mark.parametrize(("matrix", "role"), CASES)
def test_what_each_format_makes_of_it(
    run: Run, hand: Hand, matrix: str, role: str
) -> None:
    found, values = run.recorder.seen[matrix][role], hand.tensors[matrix][role]
    narrow = "fp8_e5m2" if role == "gradient" else "fp8_e4m3"
    assert found.taken.keys() == {"bf16", "fp16", narrow}
    for name in found.taken:
        check(found, values, name)


def check(found: Seen, values: Array, name: str) -> None:
    amax = np.abs(values).max()
    scale = amax / LARGEST[name] if name in LARGEST and amax else 1.0
    codes = values.astype(np.float32) / np.float32(scale)  # scales are float32
    near = codes.astype(DTYPES[name]).astype(float)
    nonzero = values != 0
    flushed = float(np.mean(near[nonzero] == 0)) if nonzero.any() else 0.0
    assert found.underflow_share(name) == flushed
    over = float(np.mean(np.isinf(near))) if name not in LARGEST else 0.0
    assert found.overflow_share(name) == over
    assert found.zero_rate_in(name) == float(np.mean(near == 0))


def test_what_formats_make_of_extremes() -> None:
    # Zero in fp16 and not in bf16, just above, the smallest and the largest numbers.
    tiny = [0.0, 2.0**-27, 2.0**-25, 1.5 * 2.0**-25, 2.0**-24, -(2.0**-126)]
    large = [1.0, 65504.0, 65519.0, -65520.0, 2.0**100, 3.0e38]
    values = np.array([*tiny, *large])
    formats = {name: (FORMATS[name], torch.ones(())) for name in ("fp16", "bf16")}
    found = look(torch.from_numpy(values).float(), formats)
    with np.errstate(over="ignore"):
        for name in formats:
            check(found, values, name)
    assert found.taken["fp16"].over == 3
    assert found.taken["bf16"].flushed == 0


def test_inf_and_nan_are_counted_apart() -> None:
    found = look(torch.tensor([1.0, torch.inf, -torch.inf, torch.nan, 0.0]), {})
    assert (found.elements, found.zeros, found.infinite, found.nan) == (5, 1, 2, 1)
    assert found.amax == 1.0


def test_parts_add_up_to_the_whole() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0)) ** 9
    formats = {name: (FORMATS[name], torch.ones(())) for name in ("fp16", "bf16")}
    whole, parts = look(x, formats), Seen()
    for part in x.split(300):
        parts.merge(Seen.from_json(look(part, formats).to_json()))
    assert parts.counts == whole.counts
    assert parts.taken["fp16"].flushed == whole.taken["fp16"].flushed > 0
    assert parts.squares == pytest.approx(whole.squares, rel=1e-12)


def test_norms_and_update_ratios(run: Run, hand: Hand) -> None:
    for matrix, tensors in hand.tensors.items():
        name, gradient, weight = (
            f"{matrix}.weight",
            tensors["weight_gradient"],
            tensors["weight"],
        )
        norm = float(np.sqrt(np.sum(gradient**2)))
        assert run.figures.norms[name] == [pytest.approx(norm, rel=1e-6)]
        size = float(np.sqrt(np.sum(weight**2)))
        update = run.figures.updates[name]
        assert update.mean_ratio == pytest.approx(RATE * norm / size, rel=1e-6)
        assert update.mean_step_ratio == pytest.approx(RATE * norm / size, rel=1e-6)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_updates_that_round_away(run: Run, hand: Hand, name: str) -> None:
    for matrix, tensors in hand.tensors.items():
        weight, change = tensors["weight"], -RATE * tensors["weight_gradient"]
        stored = weight.astype(DTYPES[name])
        after = (stored.astype(float) + change).astype(DTYPES[name])
        moved = change != 0
        lost = float(np.sum((after == stored) & moved) / max(moved.sum(), 1))
        assert run.figures.updates[f"{matrix}.weight"].lost_share(name) == lost


def test_some_updates_do_round_away(run: Run) -> None:
    shares = [u.lost_share("bf16") for u in run.figures.updates.values()]
    assert 0 < max(shares) < 1


def test_norms_of_each_product_and_steps_of_each_format(run: Run, hand: Hand) -> None:
    for row in gemms(run.figures.seen):
        for role, tensor in row["operands"].items():
            by_hand = np.sqrt((hand.tensors[row["matrix"]][role] ** 2).sum())
            assert tensor["norm"] == pytest.approx(by_hand, rel=1e-12)
    for layer, row in update_rows(run.figures).items():
        tensors = hand.tensors[layer]
        moved = RATE * np.linalg.norm(tensors["weight_gradient"])
        ratio = moved / np.linalg.norm(tensors["weight"])
        assert row["least_in_steps"]["bf16"] == pytest.approx(ratio * 2**7, rel=1e-6)
        assert row["least_in_steps"]["fp16"] == pytest.approx(ratio * 2**10, rel=1e-6)
