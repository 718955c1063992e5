"""Which sequences run together, and that it changes nothing but the time."""

import pytest
import torch

from optimizer.batches import batches, heads, layers, together
from optimizer.execute import Reference
from optimizer.walk import silent
from tests.optimizer import tiny


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([], []),
        ([4, 4, 4], [[0, 1], [2]]),  # 8 tokens at most
        ([4, 3, 3, 4], [[0], [1, 2], [3]]),  # neighbors of one length only
        ([9, 9], [[0], [1]]),  # longer than a batch: alone
    ],
)
def test_neighbors_of_one_length_run_together(
    lengths: list[int], found: list[list[int]]
) -> None:
    sequences = [torch.zeros(1, n, dtype=torch.long) for n in lengths]
    assert batches(sequences, most_tokens=8) == found


def test_a_row_of_a_batch_has_the_logits_of_its_sequence() -> None:
    model = tiny.loaded()
    sequences = [tiny.ids(12, seed=s) for s in (1, 2)]
    ids = together(sequences, [0, 1])
    assert ids.shape == (2, 12)
    seen: list[tuple[int, int]] = []
    run = Reference()
    with torch.no_grad():
        (hidden,) = layers(
            model, [ids], run, lambda s, b, out: seen.append((s, b)), silent
        )
        for alone, logits in zip(
            sequences, heads(model, ids, hidden, run), strict=True
        ):
            # float32 sums in another order: logits of about 1 differ by 1e-6
            assert torch.allclose(logits, model.forward(alone, run)[0], atol=1e-5)
    assert seen == [(stage, 0) for stage in range(model.stages - 1)]
