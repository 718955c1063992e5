"""What each site × choice costs, measured one at a time: the check of the estimates."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

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
    tokens = 0
    for index, ids in enumerate(sequences):
        kept = Activations()
        truth: list[Tensor] = []
        after = _last_to(model, truth)
        walk(model, [ids], Reference(), kept=kept, after=after)
        p = truth[0].softmax(dim=-1)
        tokens += ids.numel()
        for done, (site, choice) in enumerate(run):
            executor = Stacked(Stack({site: choice}), amaxes, weights)
            logits = _rest(model, ids, kept, site, executor)
            kl = logits_kl_nats(truth[0], logits, p)
            lost[site, choice] += float(
                kl.sum(dtype=torch.float64)
            )  # too short to split
            progress(index * len(run) + done + 1, len(sequences) * len(run))
    return {pair: kl / tokens for pair, kl in lost.items()}


def _last_to(
    model: LoadedModel, found: list[Tensor]
) -> Callable[[int, int, Tensor], None]:
    """Return what puts the logits (tokens, vocab) of a walk into a list."""

    def after(stage: int, index: int, out: Tensor) -> None:
        if stage == model.stages - 1:
            found.append(out[0])

    return after


def _rest(
    model: LoadedModel, ids: Tensor, kept: Activations, site: Site, executor: Reference
) -> Tensor:
    """Return the logits (tokens, vocab) from the layer of a site on."""
    if site.layer == WHOLE_MODEL and site.component is Component.EMBEDDINGS:
        return model.forward(ids, executor)[0]
    layers = len(model.layers)
    first = layers if site.layer == WHOLE_MODEL else site.layer
    return model.tail(first, ids, kept.get((first + 1, 0)), executor)[0]
