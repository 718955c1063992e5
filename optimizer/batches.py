"""Sequences of one length run together: kernels are slow on few rows.

On two cores, products of 256 rows with a matrix of 576 × 576 reach 32 GFLOP/s of a
core, and with 2,048 rows 77 (oneDNN, float32): each call arranges the matrix anew.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from optimizer.execute import Reference
from optimizer.model import LoadedModel
from optimizer.stack import WHOLE_MODEL
from optimizer.walk import Activations, Told, walk

BATCH_TOKENS = 2048  # that run together; a multiple of it is no faster

GRAPH_TOKENS = 1024  # that run together with a graph for the way back
GRAPH_ELEMENTS = 1 << 21  # of the widest activation in such a graph: 8 MiB of each


def batches(
    sequences: Sequence[Tensor], most_tokens: int = BATCH_TOKENS
) -> list[list[int]]:
    """Return the numbers of neighbors of equal length, up to `most_tokens` together."""
    found: list[list[int]] = []
    for number, ids in enumerate(sequences):
        mine = found[-1] if found else []
        alike = bool(mine) and sequences[mine[0]].shape == ids.shape
        if alike and (len(mine) + 1) * ids.numel() <= most_tokens:
            mine.append(number)
        else:
            found.append([number])
    return found


def graph_tokens(model: LoadedModel) -> int:
    """Return how many tokens may run together with a graph for the way back.

    1, so every sequence alone, where there are experts: their rows come from all
    sequences of a batch, and a sensitivity is counted by sequence.
    """
    if any(site.active_share < 1.0 for site in model.shape.sites):
        return 1
    widths = [s.n for s in model.shape.sites if s.site.layer != WHOLE_MODEL]
    return min(GRAPH_TOKENS, GRAPH_ELEMENTS // max(widths, default=1))


def together(sequences: Sequence[Tensor], numbers: Sequence[int]) -> Tensor:
    """Return the ids (batch, tokens) of some sequences of ids (1, tokens)."""
    if len(numbers) == 1:
        return sequences[numbers[0]]
    return torch.cat([sequences[n] for n in numbers])


def layers(
    model: LoadedModel,
    every: Sequence[Tensor],
    executor: Reference,
    after: Callable[[int, int, Tensor], None],
    progress: Told,
) -> Iterator[Tensor]:
    """Run all stages but the last over batches of ids; return its input of each.

    `after` hears of the output (batch, tokens, hidden) of every stage of every batch.
    """
    kept = Activations()
    walk(
        model,
        every,
        executor,
        kept=kept,
        after=after,
        keep_all=False,
        last=False,
        progress=progress,
    )
    return (kept.get((model.stages - 1, batch)) for batch in range(len(every)))


def heads(
    model: LoadedModel, ids: Tensor, hidden: Tensor, executor: Reference
) -> Iterator[Tensor]:
    """Yield the logits (tokens, vocab) of each row of the last stage's input.

    One row after the other: with a large vocabulary they take the most memory.
    """
    last = model.stages - 1
    with model.residency.holding(last):
        for row in range(len(ids)):
            mine = slice(row, row + 1)
            yield model.stage(last, ids[mine], hidden[mine], executor)[0]
