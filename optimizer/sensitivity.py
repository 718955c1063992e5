"""What each site × choice costs, in nats: all of them from a handful of passes.

A choice rounds tensors at certain places of a site (`stack.roundings`). Around the
reference, KL is a quadratic form in the error δ of those tensors, and its matrix is
the Fisher information: KL ≈ ½ E[(g·δ)²] with g the gradient of -log p(ŷ) for labels
ŷ drawn from the model itself. Rounding errors of different elements are independent
and centered, so the cross terms vanish and

    KL(site, choice) ≈ ½ Σ over its places of E[Σᵢ gᵢ² δᵢ²]    nats per token.

For a matrix g is its gradient summed over a sequence, since one δ acts on every
token. One forward pass and one backward pass per label sample give every g; each δ
is an elementwise rounding. `exact` measures the same numbers one at a time.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from optimizer.execute import (
    Amaxes,
    Operand,
    Reference,
    Stacked,
    WeightCodes,
    apply_scale,
    round_operand,
)
from optimizer.formats import FORMATS
from optimizer.metrics import logits_kl_nats
from optimizer.model import LoadedModel
from optimizer.quantize import saturated_share
from optimizer.sites import LinearPart
from optimizer.stack import LINEAR, Choice, Precision, Role, Site, Stack, roundings

Candidates = Mapping[Site, Sequence[Choice]]
# Per sequence. On SmolLM2, 512 tokens and 4 of its layers, 1, 2 and 4 samples had a
# log-Pearson of 0.9969, 0.9970 and 0.9979 with exact runs; each costs a backward pass.
LABEL_SAMPLES = 1
ROUNDED = 1e-6  # relative: what making and undoing a float32 scale may move a value


@dataclass(slots=True)
class Rounding:
    """Running sums for one place and one precision."""

    kl: float = 0.0  # ½ Σ g² δ², summed over tokens and label samples
    signal: float = 0.0  # Σ x²
    noise: float = 0.0  # Σ δ²
    saturated: int = 0
    flushed: int = 0
    count: int = 0

    def lose(self, error: Tensor, squared: Tensor) -> None:
        """Add δ² of one tensor, weighted with g² and not."""
        self.kl += 0.5 * float(torch.dot(error.flatten(), squared.flatten()))
        self.noise += float(error.sum())

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio; inf where nothing was lost."""
        if self.noise == 0.0:
            return math.inf
        return 10 * math.log10(self.signal / self.noise) if self.signal else -math.inf


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What one site loses to one choice."""

    kl_nats: float  # per token
    sqnr_db: float  # the worst of the places that are rounded
    saturated: float  # share of elements beyond the largest value of the format
    flushed: float  # share of non-zero elements that became zero


Sensitivities = dict[tuple[Site, Choice], Sensitivity]
Place = tuple[Site, Role]


@dataclass(slots=True, eq=False)
class _Seen:
    """One tensor that passed a place, and its squared gradients so far."""

    place: Place
    x: Tensor
    visible: Tensor | None  # False where the causal mask removes an element
    squared: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        square = gradient.detach().square()
        self.squared = square if self.squared is None else self.squared.add_(square)


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
            signal=float(torch.linalg.vector_norm(x)) ** 2,
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
    ) -> None:
        self._model = model
        self._amaxes = amaxes
        self._weights = weights
        self._wanted = wanted_roundings(candidates)
        self._seen: list[_Seen] = []
        self._last: dict[Place, Tensor] = {}
        self._squared_weight_gradients: dict[str, Tensor] = {}
        self.roundings: dict[tuple[Site, Role, Precision], Rounding] = {}
        self.tokens = 0  # × label samples

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
            seen = _Seen(place, x.detach(), visible)
            self._seen.append(seen)
            x.register_hook(seen.add)
        return x, None

    def linear(self, part: LinearPart, x: Tensor) -> Tensor:
        """Run in fp32; note the matrix's own gradient as well."""
        y = super().linear(part, x)
        if (part.site, Role.WEIGHT) in self._wanted:
            rows = x.detach().flatten(0, -2)  # (tokens, in)
            y.register_hook(lambda g: self._add_weight_gradient(part, g, rows))
        return y

    def _add_weight_gradient(self, part: LinearPart, g: Tensor, rows: Tensor) -> None:
        gradient = g.detach().flatten(0, -2).T @ rows  # (out, in), over the sequence
        total = self._squared_weight_gradients.get(part.name)
        if total is None:
            self._squared_weight_gradients[part.name] = gradient.square_()
        else:
            total.addcmul_(gradient, gradient)

    def run(self, ids: Tensor, samples: int, generator: torch.Generator) -> None:
        """Score one sequence of ids (1, tokens)."""
        with torch.enable_grad():
            logits = self._model.forward(ids, self)[0]  # (tokens, vocab)
            with torch.no_grad():
                p = logits.softmax(dim=-1)
                labels = torch.multinomial(p, samples, True, generator=generator)
            for k in range(samples):
                loss = functional.cross_entropy(logits, labels[:, k], reduction="sum")
                loss.backward(retain_graph=k < samples - 1)
        del logits, loss
        self.tokens += ids.shape[1] * samples
        for seen in self._seen:
            self._score(seen)
        self._seen.clear()
        self._last.clear()

    @torch.no_grad()
    def _score(self, seen: _Seen) -> None:
        assert seen.squared is not None, seen.place
        x = seen.x if seen.visible is None else seen.x.masked_fill(~seen.visible, 0.0)
        whole = _Whole.of(x)
        calibrated = self._amaxes.get(seen.place)
        for precision in self._wanted[seen.place]:
            codes, scale = round_operand(x, precision, calibrated)
            sums = self._sums((*seen.place, precision), whole, (codes, scale))
            error = codes if scale is None else codes.mul_(scale)  # fresh: ours to use
            sums.lose(error.sub_(x).square_(), seen.squared)

    def _sums(
        self, key: tuple[Site, Role, Precision], whole: "_Whole", operand: Operand
    ) -> Rounding:
        """Return the running sums of a rounding, with one more tensor counted."""
        sums = self.roundings.setdefault(key, Rounding())
        codes, scale = operand
        sums.signal += whole.signal
        sums.count += codes.numel()
        if scale is not None:  # what has no scale has fp32's range, or nearly
            sums.flushed += whole.nonzero - int(codes.count_nonzero())
            fmt = FORMATS[key[2].format]
            limit = fmt.max * (1 + ROUNDED)
            if scale.numel() == 1 and whole.largest > limit * float(scale):
                share = saturated_share(whole.x, scale, fmt)
                sums.saturated += round(share * codes.numel())
        return sums

    @torch.no_grad()
    def finish(self) -> None:
        """Score the matrices: their gradients are complete only now."""
        for site, parts in self._model.parts.items():
            for precision in self._wanted.get((site, Role.WEIGHT), ()):
                for part in parts:
                    squared = self._squared_weight_gradients[part.name]
                    operand = self._weights.get(part, precision)
                    key = (site, Role.WEIGHT, precision)
                    sums = self._sums(key, _Whole.of(part.weight), operand)
                    error = apply_scale(*operand).sub(part.weight)
                    sums.lose(error.square_(), squared)
        self._squared_weight_gradients.clear()


def wanted_roundings(candidates: Candidates) -> dict[Place, tuple[Precision, ...]]:
    """Return the distinct precisions that the candidates ask for at each place."""
    wanted: dict[Place, dict[Precision, None]] = {}
    for site, choices in candidates.items():
        for choice in choices:
            for role, precision in roundings(site.component, choice):
                wanted.setdefault((site, role), {})[precision] = None
    return {place: tuple(some) for place, some in wanted.items()}


def measure(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    candidates: Candidates,
    amaxes: Amaxes,
    weights: WeightCodes,
    *,
    label_samples: int = LABEL_SAMPLES,
    seed: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Sensitivities:
    """Estimate every candidate's KL in nats per token over `sequences` of ids (1, tokens)."""
    sweep = Sweep(model, candidates, amaxes, weights)
    generator = torch.Generator().manual_seed(seed)
    for index, ids in enumerate(sequences):
        sweep.run(ids, label_samples, generator)
        progress(index + 1)
    sweep.finish()
    return {
        (site, choice): _total(sweep, site, choice)
        for site, choices in candidates.items()
        for choice in choices
    }


def _total(sweep: Sweep, site: Site, choice: Choice) -> Sensitivity:
    sums = [
        sweep.roundings[site, role, precision]
        for role, precision in roundings(site.component, choice)
    ]
    return Sensitivity(
        kl_nats=sum(s.kl for s in sums) / sweep.tokens,
        sqnr_db=min((s.sqnr_db for s in sums), default=math.inf),
        saturated=max((s.saturated / s.count for s in sums), default=0.0),
        flushed=max((s.flushed / s.count for s in sums), default=0.0),
    )


# --- one at a time -----------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Prefix:
    """The reference run of one sequence: what every candidate starts from."""

    ids: Tensor
    inputs: list[Tensor] = field(default_factory=list)  # of each layer, and of the end
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    p: Tensor = field(default_factory=lambda: torch.empty(0))


@torch.no_grad()
def exact(
    model: LoadedModel,
    sequences: Sequence[Tensor],
    candidates: Candidates,
    amaxes: Amaxes,
    weights: WeightCodes,
    progress: Callable[[int, int], None] = lambda done, planned: None,
) -> dict[tuple[Site, Choice], float]:
    """Measure every candidate alone, in nats per token, from cached prefixes.

    Layers before the candidate's own are not run again. fp32 loses nothing and is
    not run at all.
    """
    pairs = [(s, c) for s, some in candidates.items() for c in some]
    total = dict.fromkeys(pairs, 0.0)
    run = [(s, c) for s, c in pairs if roundings(s.component, c)]
    tokens = 0
    for index, ids in enumerate(sequences):
        prefix = _prefix(model, ids)
        tokens += ids.numel()
        for done, (site, choice) in enumerate(run):
            executor = Stacked(Stack({site: choice}), amaxes, weights)
            logits = _resume(model, prefix, site, executor)
            kl = logits_kl_nats(prefix.logits, logits, prefix.p)
            total[site, choice] += float(kl.sum(dtype=torch.float64))
            progress(index * len(run) + done + 1, len(sequences) * len(run))
    return {pair: kl / tokens for pair, kl in total.items()}


def _prefix(model: LoadedModel, ids: Tensor) -> _Prefix:
    prefix = _Prefix(ids)
    model.captured = prefix.inputs
    try:
        prefix.logits = model.forward(ids, Reference())[0]
        prefix.p = prefix.logits.softmax(dim=-1)
    finally:
        model.captured = None
    return prefix


def _resume(
    model: LoadedModel, prefix: _Prefix, site: Site, executor: Reference
) -> Tensor:
    first = site.layer
    if first < 0:  # the embeddings run from the start, norm and head from the end
        first = len(model.layers) if site.component in LINEAR_OR_NORM else 0
    model.resume = (first, prefix.inputs[first]) if first else None
    try:
        return model.forward(prefix.ids, executor)[0]
    finally:
        model.resume = None


LINEAR_OR_NORM = LINEAR | {"norms"}
