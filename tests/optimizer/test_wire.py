"""Arrays as text: every float64 comes back as it was."""

import json
import math

import numpy as np
import torch

from optimizer.validate import TokenValues
from optimizer.wire import array, tensor, tensor_text, text, texts, token_values

VALUES = np.array([0.1, -0.0, 5e-324, 1.7976931348623157e308, math.pi, 1 / 3])


def test_every_bit_comes_back() -> None:
    assert array(text(VALUES)).tobytes() == VALUES.tobytes()
    assert array(text(VALUES[:0])).shape == (0,)


def test_what_a_stack_does_survives_json() -> None:
    values = TokenValues(VALUES, VALUES[1:], VALUES[::-1], VALUES[:2], VALUES[2:])
    again = token_values(json.loads(json.dumps(texts(values))))
    for name in ("kl", "nll", "agree", "overflowed", "likely"):
        assert np.array_equal(getattr(again, name), getattr(values, name))


def test_every_bit_of_a_tensor_comes_back() -> None:
    x = torch.tensor([[0.1, -0.0], [1e-45, 3.4028235e38]])
    again = tensor(tensor_text(x), 1, 2, -1)
    assert again.shape == (1, 2, 2)
    assert again[0].view(torch.int32).equal(x.view(torch.int32))
