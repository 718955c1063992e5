"""What each site × choice costs, measured one at a time: the check of the estimates."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from optimizer.batches import batches, heads, together
from optimizer.execute import Amaxes, Reference, Stacked, WeightCodes
from optimizer.metrics import logits_kl_nats
from optimizer.model import LoadedModel
from optimizer.stack import WHOLE_MODEL, Choice, Component, Site, Stack, roundings
from optimizer.sums import Candidates
from optimizer.walk import Activations, Told, silent, walk


@torch.no_grad()
def exact(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    candidates: Candidates,
    amaxes: Amaxes,
    weights: WeightCodes,
    progress: Told = silent,
) -> dict[tuple[Site, Choice], float]:
    """Measure every candidate alone, in nats per token, from cached prefixes.

    Layers before the candidate's own are not run again. fp32 loses nothing and is
    not run at all.
    """
    pairs = [(s, c) for s, some in candidates.items() for c in some]
    lost = dict.fromkeys(pairs, 0.0)
    run = [(s, c) for s, c in pairs if roundings(s.component, c)]
    groups = batches(sequences)
    for index, numbers in enumerate(groups):
        ids, kept = together(sequences, numbers), Activations()
        walk(model, [ids], Reference(), kept=kept, last=False)
        truth = list(_rest(model, ids, kept, model.stages - 1, Reference()))
        for done, (site, choice) in enumerate(run):
            executor = Stacked(Stack({site: choice}), amaxes, weights)
            rows = _rest(model, ids, kept, _stage(model, site), executor)
            for reference, logits in zip(truth, rows, strict=True):
                kl = logits_kl_nats(reference, logits)
                lost[site, choice] += float(kl.sum(dtype=torch.float64))
            progress(index * len(run) + done + 1, len(groups) * len(run))
    tokens = sum(ids.numel() for ids in sequences)
    return {pair: kl / tokens for pair, kl in lost.items()}


def _stage(model: LoadedModel, site: Site) -> int:
    """Return the stage that a site is in."""
    if site.layer != WHOLE_MODEL:
        return site.layer + 1
    return 0 if site.component is Component.EMBEDDINGS else model.stages - 1


def _rest(
    model: LoadedModel, ids: Tensor, kept: Activations, first: int, executor: Reference
) -> Iterator[Tensor]:
    """Return the logits (tokens, vocab) of each row of a batch, from a stage on."""
    hidden = kept.get((first, 0)) if first else None
    for stage in range(first, model.stages - 1):
        with model.residency.holding(stage):
            hidden = model.stage(stage, ids, hidden, executor)
    assert hidden is not None  # the head is never the first stage
    return heads(model, ids, hidden, executor)
