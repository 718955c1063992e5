"""What pieces carry between processes: arrays as text, exactly."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np

from optimizer.validate import TokenValues

FIELDS = ("kl", "nll", "agree", "overflowed")


def text(values: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    """Return the values as base64 of little-endian float64."""
    return base64.b64encode(values.astype("<f8").tobytes()).decode()


def array(written: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Inverse of `text`."""
    return np.frombuffer(base64.b64decode(written), "<f8").astype(np.float64)


def texts(values: TokenValues) -> dict[str, str]:
    """Return what a stack does to every token, as JSON."""
    return {k: text(getattr(values, k)) for k in FIELDS}


def token_values(result: Mapping[str, str]) -> TokenValues:
    """Inverse of `texts`."""
    return TokenValues(*(array(result[k]) for k in FIELDS))
