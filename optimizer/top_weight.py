"""How much of a query's attention goes to its first key: before a choice, and after.

The mean over queries and heads of the largest softmax probability, by layer. What a
narrow format does to attention shows here before it shows in the loss.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from optimizer.execute import (
    Amaxes,
    Operand,
    Reference,
    Stacked,
    WeightCodes,
    apply_scale,
)
from optimizer.model import AttentionStep
from optimizer.stack import Choice, Component, Role, Site, Stack
from optimizer.totals import sum_of

INSIDE = (Component.ATTN_SCORES, Component.ATTN_SOFTMAX)  # what may move a weight here


@dataclass(slots=True)
class TopWeight:
    """A running mean of top attention weights."""

    total: float = 0.0
    count: int = 0  # queries × heads

    @property
    def mean(self) -> float:
        """The mean top weight, 0 to 1; 0 where nothing was seen."""
        return self.total / self.count if self.count else 0.0

    def add(self, p: Tensor, keep: Tensor | None = None) -> None:
        """See probabilities (batch, heads, queries, keys).

        `keep` is (batch, queries): what is False there is padding, not seen.
        """
        top = p.detach().amax(-1)  # (batch, heads, queries)
        if keep is not None:
            top = top.transpose(1, 2)[keep]
        self.total += sum_of(top)
        self.count += top.numel()

    def merge(self, other: "TopWeight") -> "TopWeight":
        """Return both together, in either order."""
        return TopWeight(self.total + other.total, self.count + other.count)


class Watching(Reference):
    """Mixed into an executor: notes the top weight of each layer's probabilities.

    Probabilities are seen as the site hands them on, rounded where a stack says so.
    """

    keep: Tensor | None = None  # (batch, tokens): False is padding

    @property
    def top(self) -> dict[int, TopWeight]:
        """The running means by layer."""
        made: dict[int, TopWeight] = self.__dict__.setdefault("_top", {})
        return made

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        """See what the executor makes of the softmax's output."""
        operand = super().tap(site, role, x, mask)
        if site.component is Component.ATTN_SOFTMAX and role is Role.OUTPUT:
            seen = self.top.setdefault(site.layer, TopWeight())
            seen.add(apply_scale(*operand), self.keep)
        return operand


class WatchedReference(Watching):
    """The reference, watched: the top weights before."""


class WatchedStack(Watching, Stacked):
    """A stack, watched: the top weights after, errors of earlier layers included."""


class Alternatives(Watching):
    """Runs the reference, and each layer's attention again under every choice alone.

    The inputs of the attention are the reference's: what differs is the choice. One
    sequence says enough; it costs an attention for each choice.
    """

    def __init__(
        self,
        candidates: Mapping[Site, Sequence[Choice]],
        amaxes: Amaxes,
        weights: WeightCodes,
    ) -> None:
        self.after: dict[tuple[Site, Choice], TopWeight] = {}
        self._runs: dict[int, list[tuple[Site, Choice, WatchedStack]]] = {}
        for site, choices in candidates.items():
            if site.component in INSIDE:
                for choice in choices:
                    run = WatchedStack(Stack({site: choice}), amaxes, weights)
                    made = (site, choice, run)
                    self._runs.setdefault(site.layer, []).append(made)

    def attention(self, step: AttentionStep) -> Tensor:
        """Return the reference's attention; note what the choices make of it."""
        for site, choice, run in self._runs.get(step.layer, []):
            run.keep = self.keep
            run.attention(step)
            self.after[site, choice] = run.top[step.layer]
        return super().attention(step)


def to_json(
    before: Mapping[int, TopWeight],
    after: Mapping[int, TopWeight] | None = None,
    alternatives: Mapping[tuple[Site, Choice], TopWeight] | None = None,
) -> list[dict[str, object]]:
    """Return each layer's top weight: of the reference, of a stack, of choices alone.

    {"layer", "before", "after", "choices": {component: {choice: mean}}}
    """
    choices: dict[int, dict[str, dict[str, float]]] = {}
    for (site, choice), seen in (alternatives or {}).items():
        of_layer = choices.setdefault(site.layer, {})
        of_layer.setdefault(str(site.component), {})[choice.name] = seen.mean
    return [
        {
            "layer": layer,
            "before": before[layer].mean,
            "after": after[layer].mean if after and layer in after else None,
            "choices": choices.get(layer, {}),
        }
        for layer in sorted(before)
    ]
