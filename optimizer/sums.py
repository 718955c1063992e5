"""What a sweep adds up for every rounding, and what a choice loses by it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from optimizer.collapse import Collapse
from optimizer.stack import Choice, Precision, Role, Site, roundings

Candidates = Mapping[Site, Sequence[Choice]]


@dataclass(slots=True)
class Rounding:
    """Running sums for one place and one precision."""

    kl: dict[int, float] = field(default_factory=dict)  # ½ Σ g² δ², by sequence
    signal: float = 0.0  # Σ x²
    noise: float = 0.0  # Σ δ²
    saturated: int = 0
    flushed: int = 0
    count: int = 0
    collapse: Collapse = field(default_factory=Collapse)  # of a few rows

    def lose(self, sequence: int, g2_delta2: float) -> None:
        """Add Σ g² δ² of a tensor of one sequence, or of a part of it."""
        self.kl[sequence] = self.kl.get(sequence, 0.0) + 0.5 * g2_delta2

    def merge(self, other: "Rounding") -> None:
        """Add the sums of other sequences."""
        self.kl.update(other.kl)
        self.signal += other.signal
        self.noise += other.noise
        self.saturated += other.saturated
        self.flushed += other.flushed
        self.count += other.count
        self.collapse = self.collapse.merge(other.collapse)

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
    kl_nats_se: float = 0.0  # standard error of the KL: how much sequences differ
    exact: bool = False  # measured alone, not estimated
    collapsed: float = 0.0  # share of a row's inputs that lost a value of their own
    collapsed_pairs: float = 0.0  # chance that two different inputs got one value


Sensitivities = dict[tuple[Site, Choice], Sensitivity]
Place = tuple[Site, Role]


@dataclass(slots=True)
class Sums:
    """What a sweep of some sequences adds up to. Those of others merge into it."""

    tokens: dict[int, int] = field(default_factory=dict)  # × label samples, by sequence
    roundings: dict[tuple[Site, Role, Precision], Rounding] = field(
        default_factory=dict
    )

    def at(self, key: tuple[Site, Role, Precision]) -> Rounding:
        """Return the sums of one rounding, new ones where it had none."""
        return self.roundings.setdefault(key, Rounding())

    def merge(self, other: "Sums") -> None:
        """Add the sums of other sequences; which come first changes no bit of a KL."""
        self.tokens.update(other.tokens)
        for key, rounding in other.roundings.items():
            self.at(key).merge(rounding)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON; floats survive it exactly."""
        return {
            "tokens": {str(n): count for n, count in self.tokens.items()},
            "roundings": {
                _name(key): {
                    **asdict(r),
                    "kl": {str(n): kl for n, kl in sorted(r.kl.items())},
                }
                for key, r in self.roundings.items()
            },
        }

    @classmethod
    def from_json(
        cls, data: Mapping[str, Any], wanted: Mapping[Place, tuple[Precision, ...]]
    ) -> "Sums":
        """Inverse of `to_json`; `wanted` has every rounding that may be in it."""
        keys = {
            _name((site, role, precision)): (site, role, precision)
            for (site, role), some in wanted.items()
            for precision in some
        }
        tokens = {int(n): count for n, count in data["tokens"].items()}
        found = {keys[name]: _rounding(r) for name, r in data["roundings"].items()}
        return cls(tokens, found)


def _rounding(data: Mapping[str, Any]) -> Rounding:
    kl = {int(n): lost for n, lost in data["kl"].items()}
    return Rounding(**{**data, "kl": kl, "collapse": Collapse(**data["collapse"])})


def _name(key: tuple[Site, Role, Precision]) -> str:
    site, role, precision = key
    return f"{site} {role} {precision}"


def wanted_roundings(candidates: Candidates) -> dict[Place, tuple[Precision, ...]]:
    """Return the distinct precisions that the candidates ask for at each place."""
    wanted: dict[Place, dict[Precision, None]] = {}
    for site, choices in candidates.items():
        for choice in choices:
            for role, precision in roundings(site.component, choice):
                wanted.setdefault((site, role), {})[precision] = None
    return {place: tuple(some) for place, some in wanted.items()}


def total(sums: Sums, candidates: Candidates) -> Sensitivities:
    """Return every candidate's sensitivity from the sums over all sequences."""
    return {
        (site, choice): _total(sums, site, choice)
        for site, choices in candidates.items()
        for choice in choices
    }


def _total(sums: Sums, site: Site, choice: Choice) -> Sensitivity:
    parts = [
        sums.roundings[site, role, precision]
        for role, precision in roundings(site.component, choice)
    ]
    numbers = sorted(sums.tokens)
    lost = [math.fsum(p.kl.get(n, 0.0) for p in parts) for n in numbers]
    tokens = [sums.tokens[n] for n in numbers]
    mean = math.fsum(lost) / sum(tokens)
    return Sensitivity(
        kl_nats=mean,
        kl_nats_se=_standard_error(lost, tokens, mean),
        sqnr_db=min((s.sqnr_db for s in parts), default=math.inf),
        saturated=max((s.saturated / s.count for s in parts), default=0.0),
        flushed=max((s.flushed / s.count for s in parts), default=0.0),
        collapsed=max((s.collapse.share for s in parts), default=0.0),
        collapsed_pairs=max((s.collapse.pair_share for s in parts), default=0.0),
    )


def _standard_error(lost: Sequence[float], tokens: Sequence[int], mean: float) -> float:
    """Of a ratio of sums over sequences (Cochran 1977, §6.4); inf from one sequence."""
    n = len(lost)
    if mean == 0.0:
        return 0.0
    if n < 2:
        return math.inf
    squares = math.fsum((k - mean * t) ** 2 for k, t in zip(lost, tokens, strict=True))
    return math.sqrt(n / (n - 1) * squares) / sum(tokens)
