"""Greedy continuations: what a model writes when each token is its most likely one.

Keys and values of the tokens so far are kept in a cache, as a server keeps them, so
a step runs one token. A layer's attention sees them all, and rounds them as the
executor says: the tokens are those that whole passes would give.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from optimizer.execute import Reference
from optimizer.model import LoadedModel
from optimizer.walk import Told, silent


@torch.no_grad()
def continued(
    model: LoadedModel,
    prompts: Tensor,
    executor: Reference,
    tokens: int,
    progress: Told = silent,
) -> list[list[int]]:
    """Return the `tokens` ids that follow each prompt of ids (prompts, tokens).

    Of a model that is in memory as a whole: a step of a streamed one reads it all.
    """
    cache = DynamicCache(config=getattr(model.network, "config", None))
    ids, found = prompts, []
    for done in range(tokens):
        ids = model.cached(ids, executor, cache).argmax(-1, keepdim=True)
        found.append(ids)
        progress(done + 1, tokens)
    rows: list[list[int]] = torch.cat(found, 1).tolist()
    return rows


def cut(ids: Sequence[int], ends: frozenset[int]) -> list[int]:
    """Return the ids up to the first that ends a text, which is left out.

    Example: cut([5, 9, 2, 5], frozenset({2})) == [5, 9]
    """
    stop = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    return list(ids[:stop])
