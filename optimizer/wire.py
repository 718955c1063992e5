"""What pieces carry between processes: arrays as text, exactly."""

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from optimizer.validate import TokenValues

FIELDS = ("kl", "nll", "agree", "overflowed", "likely")


def text(values: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    """Return the values as base64 of little-endian float64."""
    return base64.b64encode(values.astype("<f8").tobytes()).decode()


def array(written: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Inverse of `text`."""
    return np.frombuffer(base64.b64decode(written), "<f8").astype(np.float64)


def tensor_text(x: Tensor) -> str:
    """Return the elements of a tensor as base64 of little-endian float32."""
    return base64.b64encode(x.numpy().astype("<f4").tobytes()).decode()


def tensor(written: str, *shape: int) -> Tensor:
    """Inverse of `tensor_text`; one dimension may be -1."""
    values = np.frombuffer(base64.b64decode(written), "<f4").astype(np.float32)
    return torch.from_numpy(values).view(shape)


def texts(values: TokenValues) -> dict[str, str]:
    """Return what a stack does to every token, as JSON."""
    return {k: text(getattr(values, k)) for k in FIELDS}


def token_values(result: Mapping[str, str]) -> TokenValues:
    """Inverse of `texts`."""
    return TokenValues(*(array(result[k]) for k in FIELDS))
