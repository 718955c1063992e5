"""Times in 16 bits: four decimal digits between 100 ns and 3.5 s.

A time of `d.ddd · 10^e` seconds is `9000 · (e + 7) + dddd - 1000`: a larger time has a
larger code, and neighbors in a table have near ones, which compresses well.
For instance 15.05 µs is 1.505e-5, so 9000 · 2 + 505 = 18505.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

MISSING = 65535  # no time: this crossing was not measured, or is not believed

_SMALLEST = -7  # the exponent of the smallest time, 1.000e-7 s


def encode(seconds: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Return the codes of times in seconds; NaN is missing.

    Raises ValueError for a time outside the range.
    """
    known = ~np.isnan(seconds)
    times = seconds[known]
    # From the decimal text, which is rounded rightly at any size.
    texts = [f"{t:.3e}".split("e") for t in times.tolist()]
    digits = np.array([int(d.replace(".", "")) for d, _ in texts], dtype=np.int64)
    exponents = np.array([int(e) for _, e in texts], dtype=np.int64)
    values = 9000 * (exponents - _SMALLEST) + digits - 1000
    if np.any((values < 0) | (values >= MISSING)):
        raise ValueError("a time is outside 1e-7 to 3.5 seconds")
    codes = np.full(seconds.shape, MISSING, dtype=np.uint16)
    codes[known] = values
    return codes


def decode(codes: NDArray[np.uint16]) -> NDArray[np.float64]:
    """Return the times in seconds; NaN where none is known."""
    return _times()[codes]


@cache
def _times() -> NDArray[np.float64]:
    """Return the time of every code: looking one up is quicker than a power."""
    codes = np.arange(MISSING + 1)
    times = (1000 + codes % 9000) / 10.0 ** (3 - _SMALLEST - codes // 9000)
    times[MISSING] = np.nan
    return times
