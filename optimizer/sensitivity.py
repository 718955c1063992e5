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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum

import torch
from torch import Tensor

from optimizer.batches import batches, graph_tokens, together
from optimizer.collapse import COLLAPSE_ROWS, COLLAPSE_SEQUENCES
from optimizer.execute import (
    Amaxes,
    Operand,
    Reference,
    WeightCodes,
    round_operand,
)
from optimizer.labels import label_gradients
from optimizer.matmul import rough, rough_linear
from optimizer.matrices import Matrices, Product
from optimizer.model import LoadedModel
from optimizer.rounded import Whole, count, rounding_error
from optimizer.sites import LinearPart
from optimizer.stack import Role, Site
from optimizer.sums import (
    Candidates,
    Place,
    Sensitivities,
    Sums,
    total,
    wanted_roundings,
)
from optimizer.totals import sum_of_squares
from optimizer.walk import Activations, Told, silent, walk

# Per sequence. On SmolLM2, 512 tokens and 4 of its layers, 1, 2 and 4 samples had a
# log-Pearson of 0.9969, 0.9970 and 0.9979 with exact runs; each costs a backward pass.
LABEL_SAMPLES = 1
LOGITS = 1 << 25  # elements of the logits that are made together


@dataclass(slots=True, eq=False)
class Seen:
    """One tensor that passed a place, and the gradients of each label sample so far."""

    place: Place
    x: Tensor
    visible: Tensor | None  # False where the causal mask removes an element
    gradients: list[Tensor] = field(default_factory=list)

    def add(self, gradient: Tensor) -> None:
        """Add a gradient that came back."""
        self.gradients.append(gradient.detach())

    @property
    def squared(self) -> Tensor:
        """The sum of the squared gradients, in the shape of the tensor."""
        assert self.gradients, self.place
        return torch.stack([g.square() for g in self.gradients]).sum(dim=0)

    def by_sequence(
        self, numbers: Sequence[int]
    ) -> Iterator[tuple[Sequence[int], Tensor, list[Tensor]]]:
        """Yield the tensor of each of the sequences, and its gradients.

        They follow each other along the first dimension; embeddings of positions are
        one tensor for all of them.
        """
        x = self.x if self.visible is None else self.x.masked_fill(~self.visible, 0.0)
        if len(x) < len(numbers):
            yield numbers, x, self.gradients
            return
        columns = [t.chunk(len(numbers)) for t in (x, *self.gradients)]
        for number, one, *gradients in zip(numbers, *columns, strict=True):
            yield [number], one, gradients


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
        self.samples = samples
        self._wanted = wanted_roundings(candidates)
        self._seen: list[Seen] = []
        self._last: dict[Place, Tensor] = {}
        self._sequences: Sequence[int] = ()  # that run together
        self._rows: tuple[Tensor, Tensor] | None = None  # an input, and it rough
        self._vocabulary = model.shape.vocab
        self.sums = Sums()
        self._matrices = Matrices(model, weights, self._wanted, self.sums)

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
        """Run the product of an estimate; note the matrix's own gradient as well."""
        x = self.elementwise(part.site, Role.INPUT, x)
        y = rough_linear(x, part.weight, part.bias, self._noting(part, x))
        return self.elementwise(part.site, Role.OUTPUT, y)

    def _noting(self, part: LinearPart, x: Tensor) -> Callable[[Tensor], None]:
        if (part.site, Role.WEIGHT) not in self._wanted:
            return lambda gradient: None
        if self._rows is None or self._rows[0] is not x:  # siblings share theirs
            self._rows = x, rough(x.detach().flatten(0, -2))  # (tokens, in)
        numbers, rows = self._sequences, self._rows[1]
        return lambda g: self._matrices.note(Product(part, numbers, g, rows))

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

        A few sequences at a time: with a large vocabulary logits take the most memory.
        The draws of one do not depend on what runs beside it.
        """
        most = max(1, LOGITS // (ids.shape[1] * self._vocabulary))
        some = [slice(k, k + most) for k in range(0, len(ids), most)]
        found = [self._run_last(sequences[k], ids[k], hidden[k], seed) for k in some]
        return [torch.cat(gradients) for gradients in zip(*found, strict=True)]

    def _run_last(
        self, numbers: Sequence[int], ids: Tensor, hidden: Tensor, seed: int
    ) -> list[Tensor]:
        self._sequences = numbers
        with torch.enable_grad():
            hidden = hidden.detach().clone().requires_grad_(True)
            out = self._model.stage(self._model.stages - 1, ids, hidden, self)
            drawn = self._drawn(numbers, out.detach(), seed)
            gradients = [self._back(out, g, hidden) for g in drawn]
        self._score_seen()
        return [g for g in gradients if g is not None]

    def _drawn(self, numbers: Sequence[int], logits: Tensor, seed: int) -> list[Tensor]:
        """Draw labels of every sequence; return the gradients of each draw."""
        by_row = []
        for number, row in zip(numbers, logits, strict=True):
            self.sums.tokens[number] = len(row) * self.samples
            generator = torch.Generator().manual_seed(seed + 1_000_003 * number)
            by_row.append(label_gradients(row, self.samples, generator))
        return [torch.stack(drawn) for drawn in zip(*by_row, strict=True)]

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
        self._matrices.score()

    def _score_seen(self) -> None:
        for seen in self._seen:
            self._score(seen)
        self._seen.clear()
        self._last.clear()
        self._rows = None
        if self._matrices.full:
            self._matrices.score()

    @torch.no_grad()
    def _score(self, seen: Seen) -> None:
        assert seen.gradients, seen.place
        for numbers, x, gradients in seen.by_sequence(self._sequences):
            self._score_one(seen.place, numbers, x, gradients)

    def _score_one(
        self, place: Place, numbers: Sequence[int], x: Tensor, gradients: list[Tensor]
    ) -> None:
        """Score the tensor of one sequence: small enough to stay in the cache."""
        whole = Whole(x, COLLAPSE_ROWS if numbers[0] < COLLAPSE_SEQUENCES else 0)
        calibrated = self._amaxes.get(place)
        for precision in self._wanted[place]:
            operand = round_operand(x, precision, calibrated)
            error = rounding_error(x, operand)
            sums = self.sums.at((*place, precision))
            count(sums, whole, operand, error, precision)
            if error is not None:
                lost = fsum(sum_of_squares(error * g) for g in gradients)
                for number in numbers:
                    sums.lose(number, lost / len(numbers))


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
