"""How many different inputs end on one value: by hand, and in each format."""

import pytest
import torch
from torch import Tensor

from optimizer.collapse import (
    COLLAPSE_ROWS,
    Collapse,
    SampledRows,
    collapsed_share,
)
from optimizer.formats import BF16, E4M3, E5M2, FORMATS
from optimizer.quantize import (
    amax,
    dequantize,
    quantize,
    round_to_format,
    scale_from_amax,
)
from optimizer.stack import Granularity
from tests.optimizer.numbers import normal


def counted(x: Tensor, rounded: Tensor) -> Collapse:
    found = Collapse()
    found.add(SampledRows.of(x), rounded)
    return found


def through(x: Tensor, name: str, granularity: Granularity) -> Tensor:
    fmt = FORMATS[name]
    scale = scale_from_amax(amax(x, granularity), fmt)
    return dequantize(quantize(x, scale, fmt), scale)


def test_by_hand() -> None:
    # Three different inputs, two codes; of the three pairs of different inputs, one
    # (1 and 1.01) got one code. The two 2s were one input before.
    x = torch.tensor([[1.0, 1.01, 2.0, 2.0]])
    codes = torch.tensor([[1.0, 1.0, 2.0, 2.0]])
    assert collapsed_share(x, codes) == pytest.approx(1 / 3)
    found = counted(x, codes)
    assert (found.inputs, found.values, found.pairs, found.joined) == (3, 2, 5, 1)


def test_pairs_are_counted_among_elements_and_equal_inputs_are_none() -> None:
    # 1, 1 and 1.01 on one code: the pairs (1, 1.01) and (1', 1.01), not (1, 1').
    found = counted(torch.tensor([[1.0, 1.0, 1.01]]), torch.ones(1, 3))
    assert (found.pairs, found.joined, found.pair_share) == (2, 2, 1.0)


def test_values_of_two_rows_are_not_compared() -> None:
    x = torch.tensor([[1.0, 2.0], [1.01, 2.02]])
    codes = torch.tensor([[1.0, 2.0], [1.0, 2.0]])
    assert collapsed_share(x, codes) == 0.0


def test_the_two_zeros_are_one_value() -> None:
    x = torch.tensor([[-1e-9, 1e-9, 0.0, -0.0]])
    found = counted(x, torch.tensor([[-0.0, 0.0, 0.0, -0.0]]))
    assert (found.inputs, found.values) == (3, 1)


def test_what_keeps_every_input_apart_collapses_nothing() -> None:
    x = normal(4, 100)
    assert collapsed_share(x, x.clone()) == 0.0
    assert collapsed_share(torch.zeros(3, 5), torch.zeros(3, 5)) == 0.0
    assert collapsed_share(torch.empty(0, 5), torch.empty(0, 5)) == 0.0


def test_less_fraction_collapses_more() -> None:
    # R6 of the source documents: how many outputs fall onto the same value.
    x = normal(16, 1536)
    scale = {f.name: scale_from_amax(x.abs().amax(), f) for f in (E4M3, E5M2)}
    found = {
        name: counted(x, quantize(x, s, FORMATS[name])) for name, s in scale.items()
    }
    found["bf16"] = counted(x, round_to_format(x, BF16))
    assert found["bf16"].share < found["fp8_e4m3"].share < found["fp8_e5m2"].share
    assert found["bf16"].share < 0.6  # 1,536 inputs, about 1,000 numbers of bf16
    # A format of m fraction bits puts about as many pairs on one code as its steps
    # are wide: each bit less doubles it, and bf16 has four more than e4m3.
    pairs = {name: c.pair_share for name, c in found.items()}
    assert pairs["fp8_e5m2"] == pytest.approx(2 * pairs["fp8_e4m3"], rel=0.1)
    assert pairs["bf16"] == pytest.approx(pairs["fp8_e4m3"] / 16, rel=0.1)


def test_an_outlier_collapses_the_rest() -> None:
    # Case B4: with A = 300,000 about half of the values share the code 0.
    x = normal(512, 256)
    x[0, 7] = 300_000.0
    tensor = counted(x, through(x, "fp8_e4m3", Granularity.TENSOR))
    token = counted(x, through(x, "fp8_e4m3", Granularity.TOKEN))
    assert tensor.pair_share > 0.2 > 10 * token.pair_share


def test_pair_share_does_not_depend_on_the_length_of_the_row() -> None:
    short, long = (
        counted(x, through(x, "fp8_e4m3", Granularity.TOKEN))
        for x in (normal(4, 512), normal(4, 4096))
    )
    assert long.share > short.share + 0.1
    assert long.pair_share == pytest.approx(short.pair_share, rel=0.2)


def test_rows_are_few_and_the_same_each_time() -> None:
    x = normal(2, 500, 64)
    found = counted(x, round_to_format(x, E4M3))
    assert 1 <= found.rows <= COLLAPSE_ROWS
    assert found == counted(x, round_to_format(x, E4M3))


def test_equal_codes_of_different_blocks_are_different_values() -> None:
    x = torch.tensor([[1.0, 2.0, 4.0]])
    codes, scale = torch.tensor([[1.0, 1.0, 2.0]]), torch.tensor([[1.0, 2.0, 2.0]])
    found = Collapse()
    found.add(SampledRows.of(x), codes, scale)
    assert found.share == 0.0
    shared = Collapse()
    shared.add(
        SampledRows.of(x), codes, torch.tensor([[2.0]])
    )  # one scale for the row says nothing
    assert shared == counted(x, codes)


def test_merging_adds_up() -> None:
    parts = [counted(x, round_to_format(x, E4M3)) for x in (normal(3, 9), normal(2, 7))]
    assert parts[0].merge(parts[1]) == parts[1].merge(parts[0])
    both = parts[0].merge(parts[1])
    assert both.inputs == 3 * 9 + 2 * 7
    assert both.rows == 5


def test_rows_are_compared_with_themselves_however_many_there_are() -> None:
    # Of 24 rows every seventh is taken, which are three and not four.
    x = torch.arange(24 * 8, dtype=torch.float32).view(24, 8)
    codes = x.clone()
    codes[[3, 10, 17]] = 0.0
    assert collapsed_share(x, codes) == pytest.approx(1 - 3 / 24)
    codes = torch.zeros_like(x)
    codes[[3, 10, 17]] = x[[3, 10, 17]]
    assert collapsed_share(x, codes) == 0.0
