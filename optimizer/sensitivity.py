"""What each site × choice costs, in nats: all of them from a handful of passes.

A choice rounds tensors at certain places of a site (`stack.roundings`). Around the
reference, KL is a quadratic form in the error δ of those tensors, and its matrix is
the Fisher information: KL ≈ ½ E[(g·δ)²] with g the gradient of -log p(ŷ) for labels
ŷ drawn from the model itself. Rounding errors of different elements are independent
and centered, so the cross terms vanish and

    KL(site, choice) ≈ ½ Σ over its places of E[Σᵢ gᵢ² δᵢ²]    nats per token.

For a matrix g is its gradient summed over a sequence, since one δ acts on every
token. Stages run from the last to the first: each is run again from its input and
sent back the gradient of what follows, so only one stage's graph and weights are
ever in memory. Each δ is an elementwise rounding. `exact.py` measures the same
numbers one at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from optimizer.collapse import COLLAPSE_SEQUENCES
from optimizer.exact import exact
from optimizer.execute import (
    Amaxes,
    Operand,
    Reference,
    WeightCodes,
    apply_scale,
    round_operand,
)
from optimizer.formats import FORMATS
from optimizer.model import LoadedModel
from optimizer.quantize import saturated_share
from optimizer.sites import LinearPart
from optimizer.stack import (
    Granularity,
    Precision,
    Role,
    Site,
)
from optimizer.sums import (
    Candidates,
    Place,
    Rounding,
    Sensitivities,
    Sensitivity,
    Sums,
    total,
    wanted_roundings,
)
from optimizer.totals import sum_of, sum_of_squares
from optimizer.walk import Activations, Told, silent, walk

__all__ = ["Candidates", "Sensitivities", "Sensitivity", "exact", "measure", "sweep"]

# Per sequence. On SmolLM2, 512 tokens and 4 of its layers, 1, 2 and 4 samples had a
# log-Pearson of 0.9969, 0.9970 and 0.9979 with exact runs; each costs a backward pass.
LABEL_SAMPLES = 1
ERROR_BYTES = 600 << 20  # of the errors of one matrix's roundings at once
PRODUCT_BYTES = 256 << 20  # of activations and gradients that wait to be scored
# The scales of these are rounded, also down. Others of a group, row or head come from
# the largest value that they cover: nothing lies beyond the format, by construction.
SATURATING = frozenset({Granularity.MX, Granularity.NV})
ROUNDED = 1e-6  # relative: what making and undoing a float32 scale may move a value


@dataclass(slots=True, eq=False)
class Seen:
    """One tensor that passed a place, and its squared gradients so far."""

    place: Place
    x: Tensor
    visible: Tensor | None  # False where the causal mask removes an element
    squared: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        square = gradient.detach().square()
        self.squared = square if self.squared is None else self.squared.add_(square)


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """What a matrix was multiplied with in one sequence, and the gradient after it."""

    part: LinearPart
    sequence: int
    gradient: Tensor  # (..., out)
    rows: Tensor  # (tokens, in)

    @property
    def bytes(self) -> int:
        return 4 * (self.gradient.numel() + self.rows.numel())

    def squared_gradient(self) -> Tensor:
        """Return the matrix's own gradient over the sequence, squared: (out, in)."""
        return (self.gradient.flatten(0, -2).T @ self.rows).square_()


@dataclass(frozen=True, slots=True)
class _Whole:
    """What every rounding of a tensor is compared with."""

    x: Tensor
    signal: float  # Σ x²
    nonzero: int
    largest: float  # |x|

    @classmethod
    def of(cls, x: Tensor) -> "_Whole":
        low, high = x.aminmax()
        return cls(
            x=x,
            signal=sum_of_squares(x),
            nonzero=int(x.count_nonzero()),
            largest=max(-float(low), float(high)),
        )


class Sweep(Reference):
    """Runs the reference with gradients and scores every rounding on the way."""

    def __init__(
        self,
        model: LoadedModel,
        candidates: Candidates,
        amaxes: Amaxes,
        weights: WeightCodes,
        samples: int = LABEL_SAMPLES,
    ) -> None:
        self._model = model
        self._amaxes = amaxes
        self._weights = weights
        self.samples = samples
        self._wanted = wanted_roundings(candidates)
        self._seen: list[Seen] = []
        self._last: dict[Place, Tensor] = {}
        self._products: list[_Product] = []
        self._counted: set[tuple[str, Precision]] = set()  # matrices
        self._sequence = 0
        self.sums = Sums()

    def tap(
        self, site: Site, role: Role, x: Tensor, mask: Tensor | None = None
    ) -> Operand:
        """Note the tensor, and its gradient when that comes back."""
        if not x.requires_grad:
            x.requires_grad_(True)  # the embeddings: where the graph begins
        place = (site, role)
        if place in self._wanted and self._last.get(place) is not x:
            self._last[place] = x
            visible = None if mask is None else (mask >= 0).expand_as(x)
            seen = Seen(place, x.detach(), visible)
            self._seen.append(seen)
            x.register_hook(seen.add)
        return x, None

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Run in fp32; note the matrix's own gradient as well."""
        y = super().linear(part, x)
        if (part.site, Role.WEIGHT) in self._wanted:
            rows = x.detach().flatten(0, -2)  # (tokens, in)
            number = self._sequence
            y.register_hook(
                lambda g: self._products.append(_Product(part, number, g, rows))
            )
        return y

    @torch.no_grad()
    def _score_matrices(self) -> None:
        """Score the matrices of the products seen, one matrix in memory at a time."""
        by_name: dict[str, list[_Product]] = {}
        for product in self._products:
            by_name.setdefault(product.part.name, []).append(product)
        self._products.clear()
        for products in by_name.values():
            part = products[0].part
            wanted = self._wanted[part.site, Role.WEIGHT]
            room = ERROR_BYTES if self._model.residency.whole else 0
            at_once = max(1, room // (4 * part.weight.numel()))
            for start in range(0, len(wanted), at_once):
                self._score_matrix(products, wanted[start : start + at_once])

    def _score_matrix(
        self, products: Sequence["_Product"], precisions: Sequence[Precision]
    ) -> None:
        errors = [self._matrix_error(products[0].part, p) for p in precisions]
        for product in products:
            squared = product.squared_gradient()
            for rounding, error in errors:
                rounding.lose(product.sequence, error, squared)

    def _matrix_error(
        self, part: LinearPart, precision: Precision
    ) -> tuple[Rounding, Tensor]:
        """Return δ² of a rounding of a matrix, with its running sums."""
        weight = part.weight
        operand = self._weights.get(part, precision)
        error = apply_scale(*operand).sub(weight).square_()
        key = (part.site, Role.WEIGHT, precision)
        if (part.name, precision) not in self._counted:
            self._counted.add((part.name, precision))
            sums = self._count(key, _Whole.of(weight), operand, error)
            sums.collapse.add(weight, *operand)
        if not self._model.residency.whole:
            self._weights.drop()  # a matrix may be a large part of a stage
        return self.sums.at(key), error

    def run(
        self,
        stage: int,
        sequence: int,
        ids: Tensor,
        hidden: Tensor | None,
        following: Sequence[Tensor] | torch.Generator,
    ) -> list[Tensor]:
        """Score one stage of one sequence; return the gradients of its input.

        There is one gradient for each label sample. `following` has those of the
        stage's output; for the last stage, what draws the labels.
        """
        self._sequence = sequence
        with torch.enable_grad():
            if hidden is not None:
                hidden = hidden.detach().clone().requires_grad_(True)
            out = self._model.stage(stage, ids, hidden, self)
            if isinstance(following, torch.Generator):
                losses = self._losses(out[0], following)
                gradients = [self._back(loss, None, hidden) for loss in losses]
            else:
                gradients = [self._back(out, g, hidden) for g in following]
        for seen in self._seen:
            self._score(seen)
        self._seen.clear()
        self._last.clear()
        if sum(p.bytes for p in self._products) > PRODUCT_BYTES:
            self._score_matrices()
        return [g for g in gradients if g is not None]

    def _losses(self, logits: Tensor, generator: torch.Generator) -> list[Tensor]:
        with torch.no_grad():
            p = logits.softmax(dim=-1)  # (tokens, vocab)
            labels = torch.multinomial(p, self.samples, True, generator=generator)
        self.sums.tokens[self._sequence] = len(logits) * self.samples
        return [
            functional.cross_entropy(logits, labels[:, k], reduction="sum")
            for k in range(self.samples)
        ]

    def _back(
        self, out: Tensor, gradient: Tensor | None, hidden: Tensor | None
    ) -> Tensor | None:
        """Send one gradient through the stage; return what arrives at its input."""
        out.backward(gradient, retain_graph=self.samples > 1)
        if hidden is None:
            return None
        found, hidden.grad = hidden.grad, None
        return found

    def leave(self, stage: int) -> None:
        """Score what is left of a stage, while its weights are still there."""
        self._score_matrices()

    @torch.no_grad()
    def _score(self, seen: Seen) -> None:
        assert seen.squared is not None, seen.place
        x = seen.x if seen.visible is None else seen.x.masked_fill(~seen.visible, 0.0)
        whole = _Whole.of(x)
        calibrated = self._amaxes.get(seen.place)
        for precision in self._wanted[seen.place]:
            operand = round_operand(x, precision, calibrated)
            error = apply_scale(*operand).sub(x).square_()
            sums = self._count((*seen.place, precision), whole, operand, error)
            if self._sequence < COLLAPSE_SEQUENCES:
                sums.collapse.add(x, *operand)
            sums.lose(self._sequence, error, seen.squared)

    def _count(
        self,
        key: tuple[Site, Role, Precision],
        whole: "_Whole",
        operand: Operand,
        error: Tensor,
    ) -> Rounding:
        """Return the running sums of a rounding, with one more tensor counted."""
        sums = self.sums.at(key)
        codes, scale = operand
        sums.signal += whole.signal
        sums.noise += sum_of(error)
        sums.count += codes.numel()
        if scale is not None:  # what has no scale has fp32's range, or nearly
            sums.flushed += whole.nonzero - int(codes.count_nonzero())
            fmt = FORMATS[key[2].format]
            limit = fmt.max * (1 + ROUNDED)
            beyond = scale.numel() == 1 and whole.largest > limit * float(scale)
            if beyond or key[2].granularity in SATURATING:
                share = saturated_share(whole.x, scale, fmt)
                sums.saturated += round(share * codes.numel())
        return sums


def measure(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    candidates: Candidates,
    amaxes: Amaxes,
    weights: WeightCodes,
    *,
    label_samples: int = LABEL_SAMPLES,
    seed: int = 0,
    progress: Told = silent,
    kept: Activations | None = None,
) -> Sensitivities:
    """Estimate every candidate's KL in nats per token over `sequences` of ids (1, tokens).

    `kept` has the inputs of every stage, where `calibrate` left them.
    """
    sums = sweep(
        model,
        dict(enumerate(sequences)),
        candidates,
        amaxes,
        weights,
        label_samples=label_samples,
        seed=seed,
        progress=progress,
        kept=kept,
    )
    return total(sums, candidates)


def sweep(
    model: LoadedModel,
    sequences: Mapping[int, Tensor],
    candidates: Candidates,
    amaxes: Amaxes,
    weights: WeightCodes,
    *,
    label_samples: int = LABEL_SAMPLES,
    seed: int = 0,
    progress: Told = silent,
    kept: Activations | None = None,
) -> Sums:
    """Return the sums over some of the sequences of ids (1, tokens), by their number.

    The sums of a sequence do not depend on which others are swept with it.
    """
    executor = Sweep(model, candidates, amaxes, weights, label_samples)
    walk_back(model, sequences, executor, seed=seed, progress=progress, kept=kept)
    return executor.sums


def walk_back(
    model: LoadedModel,
    sequences: Mapping[int, Tensor],
    executor: Sweep,
    *,
    seed: int = 0,
    progress: Told = silent,
    kept: Activations | None = None,
) -> None:
    """Send gradients of sequences of ids (1, tokens) from the last stage to the first."""
    order = list(sequences)
    if kept is None:
        kept = Activations()
        every = list(sequences.values())
        walk(model, every, Reference(), kept=kept, last=False, names=order)
    gradients = Activations()
    planned = model.stages * len(sequences)
    for stage in reversed(range(model.stages)):
        with model.residency.holding(stage):
            for done, number in enumerate(order):
                following = (
                    [gradients.get((k, number)) for k in range(executor.samples)]
                    if stage + 1 < model.stages
                    else torch.Generator().manual_seed(seed + 1_000_003 * number)
                )
                hidden = kept.get((stage, number)) if stage else None
                ids = sequences[number]
                found = executor.run(stage, number, ids, hidden, following)
                for k, gradient in enumerate(found):
                    gradients.put((k, number), gradient)
                back = model.stages - 1 - stage
                progress(back * len(order) + done + 1, planned)
            executor.leave(stage)
