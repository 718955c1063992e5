"""A sum is one number, however many threads add it up."""

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from optimizer.totals import sum_of, sum_of_squares, sums_of_squares

SHAPES = [
    (7,),
    (1023,),
    (256, 1536),
    (3, 5, 64),
    (2, 4, 128, 128),
    (40_000, 3),
    (1, 50_000),
    (0,),
]
FUNCTIONS: dict[str, tuple[Callable[[Tensor], float], Callable[[float], float]]] = {
    "total": (sum_of, lambda v: v),
    "squares": (sum_of_squares, lambda v: v * v),
}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def values(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_sum_is_the_sum(name: str, shape: tuple[int, ...]) -> None:
    function, of = FUNCTIONS[name]
    x = values(shape)
    every = [of(v) for v in x.flatten().double().tolist()]
    # A row of n float32 loses at most n half ulps of the sum of its magnitudes.
    limit = 2**-24 * max(x.shape[-1], 1024) * math.fsum(map(abs, every))
    assert function(x) == pytest.approx(math.fsum(every), abs=limit, rel=0)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(
    "shape", [(256, 1536), (2, 4, 128, 128), (400_000,), (1, 400_000)], ids=str
)
def test_the_bits_do_not_depend_on_threads(name: str, shape: tuple[int, ...]) -> None:
    function, _ = FUNCTIONS[name]
    x = values(shape)
    found = set()
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        found.add(function(x))
    assert len(found) == 1


def test_a_view_is_summed_as_what_it_shows() -> None:
    x = values((64, 2048))
    assert sum_of(x.T) == pytest.approx(sum_of(x), rel=1e-3, abs=1e-2)
    assert sum_of_squares(x.T) == pytest.approx(sum_of_squares(x), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_matrices_have_the_sums_that_they_have_alone(dtype: torch.dtype) -> None:
    x = values((3, 64, 96)).to(dtype)
    expected = [math.fsum((v * v).flatten().tolist()) for v in x.double()]
    rounding = torch.finfo(dtype).eps  # of a row's norm; a sum of rows has less
    assert sums_of_squares(x) == pytest.approx(expected, rel=rounding)
    assert sums_of_squares(x) == [sums_of_squares(v[None])[0] for v in x]
