"""What `compensate` needs of the data: H = E[w x xᵀ] of the input of each matrix.

w is 1, or says how much a token matters: Σ g² over the outputs, g the gradient of
the loss, where a pass has it. Of fixed size however much data passes, (in, in) float32 for every input; two of them
merge. Parts that share an input (q, k, v; gate, up; one expert's) share it.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.errors import NonFiniteError
from optimizer.execute import Operand, Reference
from optimizer.labels import label_gradients
from optimizer.model import LoadedModel
from optimizer.sites import LinearPart
from optimizer.stack import Role, Site

Key = tuple[Site, str]  # a site, and the group of its parts that share an input


def key_of(part: LinearPart) -> Key:
    """Return whose input the part multiplies."""
    return part.site, part.group


@dataclass(frozen=True, slots=True, eq=False)
class Moment:
    """Σ w x xᵀ of the tokens seen."""

    total: Tensor  # (in, in) float32
    tokens: int

    def merge(self, other: "Moment") -> "Moment":
        """Return both together, in either order."""
        return Moment(self.total + other.total, self.tokens + other.tokens)


class Hessians(Reference):
    """Runs the reference and adds up x xᵀ at the matrices of `sites`.

    Without `sites`, of every site. Memory: 4 × in² bytes for each input; a walk that
    goes layer by layer names one layer's sites, or drops each when it is used.
    """

    def __init__(self, sites: Collection[Site] | None = None) -> None:
        self._sites = None if sites is None else frozenset(sites)
        self._moments: dict[Key, Moment] = {}
        self._last: tuple[Key, Tensor] | None = None  # siblings share x
        self.tokens: Tensor | None = None  # (batch, tokens): False is padding

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Run in fp32; see the input once for all parts that share it."""
        if self.wants(part) and not self._has_just_seen(key_of(part), x):
            self._last = (key_of(part), x)
            self.add(key_of(part), x, self._keep(x))
        return super().linear(part, x)

    def wants(self, part: LinearPart) -> bool:
        """Whether the inputs of the part are to be seen."""
        return self._sites is None or part.site in self._sites

    def _has_just_seen(self, key: Key, x: Tensor) -> bool:
        last = self._last
        return last is not None and last[0] == key and last[1] is x

    def _keep(self, x: Tensor) -> Tensor | None:
        return self.tokens if x.ndim == 3 else None  # experts get no padding

    @torch.no_grad()
    def add(
        self,
        key: Key,
        x: Tensor,
        keep: Tensor | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """See inputs (..., in). `keep` (...) is False for padding, `weights` (...) is w.

        Raises NonFiniteError naming the site.
        """
        keep = torch.ones(x.shape[:-1]).bool() if keep is None else keep.bool()
        rows = x.detach()[keep]
        weighted = rows if weights is None else rows * weights[keep][:, None]
        total = weighted.T @ rows
        if not bool(total.isfinite().all()):
            raise NonFiniteError(f"{key[0]} input")
        moment = Moment(total, len(rows))
        before = self._moments.get(key)
        self._moments[key] = moment if before is None else before.merge(moment)

    def merge(self, other: "Hessians") -> None:
        """Take over what another has seen."""
        for key, moment in other._moments.items():
            before = self._moments.get(key)
            self._moments[key] = moment if before is None else before.merge(moment)

    def seen(self, key: Key) -> int:
        """Return how many tokens came by: 0 for an expert that got none."""
        moment = self._moments.get(key)
        return 0 if moment is None else moment.tokens

    def hessian(self, key: Key) -> Tensor:
        """Return E[w x xᵀ], (in, in) float64. KeyError where no token came by."""
        return self._moments[key].total.double() / max(self.seen(key), 1)

    def drop(self, key: Key) -> None:
        """Forget one input, if it was seen."""
        self._moments.pop(key, None)
        self._last = None


class FisherHessians(Hessians):
    """Hessians whose tokens weigh Σ g²: what an error of their outputs costs in KL.

    g is the gradient of -log p(ŷ) in the outputs, for labels ŷ drawn from the model
    itself, as in `sensitivity`; a sweep that has g calls `weigh` and needs no other
    pass. Parts that share an input add up.
    """

    def __init__(self, sites: Collection[Site] | None = None) -> None:
        super().__init__(sites)
        self._parts: dict[Key, set[str]] = {}  # each adds the same tokens

    def seen(self, key: Key) -> int:
        """Return how many tokens came by, however many parts they went to."""
        return super().seen(key) // max(len(self._parts.get(key, ())), 1)

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        """Begin the graph at the embeddings."""
        if torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_(True)
        return x, None

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Run in fp32; see the input when the gradient of the output comes back."""
        y = Reference.linear(self, part, x)
        if self.wants(part) and y.requires_grad:
            y.register_hook(lambda g: self.weigh(part, x, g, self._keep(x)))
        return y

    def weigh(
        self, part: LinearPart, x: Tensor, gradient: Tensor, keep: Tensor | None = None
    ) -> None:
        """See inputs (..., in) of a part, and the gradient (..., out) of its outputs."""
        self._parts.setdefault(key_of(part), set()).add(part.name)
        self.add(key_of(part), x, keep, gradient.detach().square().sum(-1))

    def merge(self, other: Hessians) -> None:
        """Take over what another has seen."""
        super().merge(other)
        if isinstance(other, FisherHessians):
            for key, names in other._parts.items():
                self._parts.setdefault(key, set()).update(names)

    def run(self, model: LoadedModel, ids: Tensor, generator: torch.Generator) -> None:
        """See one sequence of ids (1, tokens): one pass forward and one back."""
        with torch.enable_grad():
            logits = model.forward(ids, self)[0]  # (tokens, vocab)
            (gradient,) = label_gradients(logits, 1, generator)
            logits.backward(gradient)
