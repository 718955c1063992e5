"""The tokens that a stack changes most, as text, with what stands before them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from optimizer.validate import TokenValues, Values

SHOWN = 8
BEFORE = 24  # tokens of context
APART = 4  # positions: neighbors say the same thing twice


def worst_tokens(
    values: TokenValues,
    likely: Values,
    sequences: Sequence[Tensor],
    decode: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Return the predictions of the largest KL, worst first, in context.

    `likely` is the reference's most likely next token at each position. A last
    position predicts what the text does not have: `next` None.
    """
    ids = np.concatenate([s[0].numpy() for s in sequences])
    starts = np.concatenate([np.full(s.numel(), n) for n, s in enumerate(sequences)])
    first = np.cumsum([0, *(s.numel() for s in sequences)])
    return [
        {
            "sequence": int(starts[at]),
            "position": int(at - first[starts[at]]),
            "kl_nats": float(values.kl[at]),
            "before": decode(
                ids[max(first[starts[at]], at + 1 - BEFORE) : at + 1].tolist()
            ),
            "next": decode([ids[at + 1]]) if at + 1 < first[starts[at] + 1] else None,
            "reference": decode([int(likely[at])]),
            "stack": decode([int(values.likely[at])]),
        }
        for at in _spread(values.kl)
    ]


def _spread(kl: Values) -> list[int]:
    """Return the places of the largest values, no two of them neighbors."""
    found: list[int] = []
    for at in np.argsort(-kl, kind="stable"):
        if all(abs(int(at) - other) >= APART for other in found):
            found.append(int(at))
        if len(found) == SHOWN:
            break
    return found
