"""Times in 16 bits."""

import math

import numpy as np
import pytest

from optimizer.four_digits import MISSING, decode, encode


@pytest.mark.parametrize(
    ("seconds", "code"),
    [(1.505e-5, 18505), (1e-7, 0), (9.999e-7, 8999), (1e-6, 9000), (3.534, 65534)],
)
def test_a_time_of_four_digits_comes_back_as_it_was(seconds, code):
    codes = encode(np.array([seconds]))
    assert codes.tolist() == [code]
    assert decode(codes).tolist() == [seconds]


def test_more_digits_are_rounded():
    assert decode(encode(np.array([1.50549e-5]))).tolist() == [1.505e-5]
    assert decode(encode(np.array([9.9996e-6]))).tolist() == [1e-5]


def test_a_missing_time_stays_missing():
    codes = encode(np.array([math.nan, 1e-3]))
    assert codes[0] == MISSING
    assert np.isnan(decode(codes)).tolist() == [True, False]


@pytest.mark.parametrize("seconds", [9e-8, 3.535, 100.0])
def test_a_time_that_no_code_stands_for_is_refused(seconds):
    with pytest.raises(ValueError, match="outside"):
        encode(np.array([seconds]))
