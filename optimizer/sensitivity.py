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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from optimizer.batches import batches, graph_tokens, together
from optimizer.collapse import COLLAPSE_SEQUENCES, SampledRows
from optimizer.exact import exact
from optimizer.execute import (
    Amaxes,
    Operand,
    Reference,
    WeightCodes,
    round_operand,
)
from optimizer.formats import FORMATS
from optimizer.labels import label_gradients
from optimizer.matmul import linear, rough
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
from optimizer.totals import dots, dots_with, sum_of, sum_of_squares
from optimizer.walk import Activations, Told, silent, walk

__all__ = ["Candidates", "Sensitivities", "Sensitivity", "exact", "measure", "sweep"]

# Per sequence. On SmolLM2, 512 tokens and 4 of its layers, 1, 2 and 4 samples had a
# log-Pearson of 0.9969, 0.9970 and 0.9979 with exact runs; each costs a backward pass.
LABEL_SAMPLES = 1
ERROR_BYTES = 600 << 20  # of the errors of one matrix's roundings at once
AT_ONCE = 1 << 18  # elements of a gradient: what a core's cache holds with its errors
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
    sequences: Sequence[int]
    gradient: Tensor  # (..., out)
    rows: Tensor  # (tokens, in)

    @property
    def bytes(self) -> int:
        return 4 * (self.gradient.numel() + self.rows.numel())

    def squared_gradient(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the matrix's own gradient over each sequence, squared.

        (sequences, rows, in), some rows at a time, so that they are still in the
        cache when errors are weighted with them.
        """
        count, (out, width) = len(self.sequences), self.part.weight.shape
        gradient = rough(self.gradient).reshape(count, -1, out)
        transposed = gradient.transpose(1, 2).contiguous()  # (sequences, out, tokens)
        rows = rough(self.rows).view(count, -1, width)
        step = max(1, AT_ONCE // (count * width))
        for start in range(0, out, step):
            part = slice(start, start + step)
            yield part, (transposed[:, part] @ rows).float().square_()


@dataclass(frozen=True, slots=True)
class _Whole:
    """What every rounding of a tensor is compared with."""

    x: Tensor
    signal: float  # Σ x²
    nonzero: int
    largest: float  # |x|
    rows: SampledRows | None  # None: not asked for

    @classmethod
    def of(cls, x: Tensor, rows: SampledRows | None) -> "_Whole":
        low, high = x.aminmax()
        return cls(
            x=x,
            rows=rows,
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
        self._matrix: _Whole | None = None  # the one scored last
        self._rough: dict[str, Tensor] = {}  # matrices of this stage
        self._sequences: Sequence[int] = ()  # that run together
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
        x = self.elementwise(part.site, Role.INPUT, x)
        y = linear(x, part.weight, part.bias, self._way_back(part))
        y = self.elementwise(part.site, Role.OUTPUT, y)
        if (part.site, Role.WEIGHT) in self._wanted:
            rows = x.detach().flatten(0, -2)  # (tokens, in)
            numbers = self._sequences
            y.register_hook(
                lambda g: self._products.append(_Product(part, numbers, g, rows))
            )
        return y

    def _way_back(self, part: LinearPart) -> Tensor:
        """Return the matrix that gradients come back through, made once a stage."""
        if part.name not in self._rough:
            self._rough[part.name] = rough(part.weight)
        return self._rough[part.name]

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
            for part, squared in product.squared_gradient():
                for rounding, error in errors:
                    lost = dots_with(squared, error[part])
                    rounding.lose(product.sequences, lost)

    def _matrix_error(
        self, part: LinearPart, precision: Precision
    ) -> tuple[Rounding, Tensor]:
        """Return δ² of a rounding of a matrix, with its running sums."""
        weight = part.weight
        operand = self._weights.get(part, precision)
        error = _squared_error(weight, operand)
        key = (part.site, Role.WEIGHT, precision)
        if (part.name, precision) not in self._counted:
            self._counted.add((part.name, precision))
            if self._matrix is None or self._matrix.x is not weight:
                self._matrix = _Whole.of(weight, SampledRows.of(weight))
            self._count(key, self._matrix, operand, error)
        if not self._model.residency.whole:
            self._weights.drop()  # a matrix may be a large part of a stage
        return self.sums.at(key), error

    def run(
        self,
        stage: int,
        sequences: Sequence[int],
        ids: Tensor,
        hidden: Tensor | None,
        following: Sequence[Tensor],
    ) -> list[Tensor]:
        """Score one stage of some sequences; return the gradients of its input.

        There is one gradient for each label sample, as in `following`, which has
        those of the stage's output.
        """
        self._sequences = sequences
        with torch.enable_grad():
            if hidden is not None:
                hidden = hidden.detach().clone().requires_grad_(True)
            out = self._model.stage(stage, ids, hidden, self)
            gradients = [self._back(out, g, hidden) for g in following]
        self._score_seen()
        return [g for g in gradients if g is not None]

    def run_last(
        self, sequences: Sequence[int], ids: Tensor, hidden: Tensor, seed: int
    ) -> list[Tensor]:
        """Score norm and head, and draw the labels; return the gradients of the input.

        One sequence after the other: with a large vocabulary logits take the most
        memory, and the draws of one do not depend on what runs beside it.
        """
        by_row = [
            self._run_last(number, ids[row : row + 1], hidden[row : row + 1], seed)
            for row, number in enumerate(sequences)
        ]
        return [torch.cat(gradients) for gradients in zip(*by_row, strict=True)]

    def _run_last(
        self, number: int, ids: Tensor, hidden: Tensor, seed: int
    ) -> list[Tensor]:
        self._sequences = [number]
        generator = torch.Generator().manual_seed(seed + 1_000_003 * number)
        with torch.enable_grad():
            hidden = hidden.detach().clone().requires_grad_(True)
            out = self._model.stage(self._model.stages - 1, ids, hidden, self)
            self.sums.tokens[number] = out.shape[1] * self.samples
            drawn = label_gradients(out[0], self.samples, generator)
            gradients = [self._back(out, g[None], hidden) for g in drawn]
        self._score_seen()
        return [g for g in gradients if g is not None]

    def _back(
        self, out: Tensor, gradient: Tensor, hidden: Tensor | None
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
        self._rough.clear()
        self._matrix = None

    def _score_seen(self) -> None:
        for seen in self._seen:
            self._score(seen)
        self._seen.clear()
        self._last.clear()
        if sum(p.bytes for p in self._products) > PRODUCT_BYTES:
            self._score_matrices()

    @torch.no_grad()
    def _score(self, seen: Seen) -> None:
        assert seen.squared is not None, seen.place
        x = seen.x if seen.visible is None else seen.x.masked_fill(~seen.visible, 0.0)
        early = self._sequences[0] < COLLAPSE_SEQUENCES
        whole = _Whole.of(x, SampledRows.of(x) if early else None)
        calibrated = self._amaxes.get(seen.place)
        for precision in self._wanted[seen.place]:
            operand = round_operand(x, precision, calibrated)
            error = _squared_error(x, operand)
            sums = self._count((*seen.place, precision), whole, operand, error)
            lost = dots(error, seen.squared, len(self._sequences))
            sums.lose(self._sequences, lost)

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
        if whole.rows is not None:
            sums.collapse.add(whole.rows, *operand)
        if scale is not None:  # what has no scale has fp32's range, or nearly
            sums.flushed += whole.nonzero - int(codes.count_nonzero())
            fmt = FORMATS[key[2].format]
            limit = fmt.max * (1 + ROUNDED)
            beyond = scale.numel() == 1 and whole.largest > limit * float(scale)
            if beyond or key[2].granularity in SATURATING:
                share = saturated_share(whole.x, scale, fmt)
                sums.saturated += round(share * codes.numel())
        return sums


def _squared_error(x: Tensor, operand: Operand) -> Tensor:
    """Return δ² of a tensor and what it was rounded to."""
    codes, scale = operand
    error = codes - x if scale is None else (codes * scale).sub_(x)
    return error.square_()


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
    numbers = list(sequences)
    every = [sequences[number] for number in numbers]
    groups = batches(every, graph_tokens(model))
    ids = [together(every, group) for group in groups]
    names = [[numbers[n] for n in group] for group in groups]
    firsts = [group[0] for group in names]
    if kept is None:
        kept = Activations()
        walk(model, ids, Reference(), kept=kept, last=False, names=firsts)
    gradients = Activations()
    samples, last = range(executor.samples), model.stages - 1
    for stage in reversed(range(model.stages)):
        with model.residency.holding(stage):
            for done, group in enumerate(names):
                first = group[0]
                if stage == last:
                    hidden = kept.get((stage, first))
                    found = executor.run_last(group, ids[done], hidden, seed)
                else:
                    following = [gradients.get((k, first)) for k in samples]
                    before = kept.get((stage, first)) if stage else None
                    found = executor.run(stage, group, ids[done], before, following)
                for k, gradient in enumerate(found):
                    gradients.put((k, first), gradient)
                progress(
                    (last - stage) * len(names) + done + 1, model.stages * len(names)
                )
            executor.leave(stage)
