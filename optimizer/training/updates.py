"""What a step does to the weights, and how much of it a narrow weight would lose.

An update is lost where weight + update rounds back to the weight. For a weight w that
is under half of its spacing, w · eps / 2 at most: in bf16 (eps 2^-7) 0.4 % of w.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor, nn

from optimizer.formats import BF16, FP16, Format
from optimizer.quantize import IEEE_DTYPES
from optimizer.training.candidates import Candidate
from optimizer.training.exponents import PART

STORED = (BF16, FP16)  # what weights without masters are in


@dataclass(slots=True)
class Update:
    """Of one parameter, over the steps that were looked at: sums, to be divided."""

    steps: int = 0
    ratio: float = 0.0  # lr · ‖g‖ / ‖w‖
    step_ratio: float = 0.0  # ‖what the weight really moved by‖ / ‖w‖
    changed: int = 0  # elements that an update was meant for
    lost: dict[str, int] = field(default_factory=dict)  # of these, by stored format

    def lost_share(self, fmt: str) -> float:
        """Return the share of updates that a stored format rounds away."""
        return self.lost.get(fmt, 0) / max(self.changed, 1)

    @property
    def mean_ratio(self) -> float:
        """The effective update ratio lr · ‖g‖ / ‖w‖."""
        return self.ratio / max(self.steps, 1)

    @property
    def mean_step_ratio(self) -> float:
        """‖Δw‖ / ‖w‖: what the optimizer made of it."""
        return self.step_ratio / max(self.steps, 1)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON."""
        return asdict(self)


def copied(trained: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the weights as they are before a step."""
    return {name: p.detach().clone() for name, p in trained.items()}


def note(
    found: dict[str, Update],
    trained: Mapping[str, nn.Parameter],
    before: Mapping[str, Tensor],
    rate: float,
    candidate: Candidate,
) -> None:
    """Add one step to what is known of each parameter."""
    for name, parameter in trained.items():
        if parameter.grad is None:
            continue
        update = found.setdefault(name, Update())
        old, new = before[name].float(), parameter.detach().float()
        size = float(old.norm()) or 1.0
        update.steps += 1
        update.ratio += rate * float(parameter.grad.float().norm()) / size
        update.step_ratio += float((new - old).norm()) / size
        whole = (old, new, parameter.grad)
        parts = (x.reshape(-1).split(PART) for x in whole)
        for old, new, gradient in zip(*parts, strict=True):
            _note_lost(update, old, new, gradient, candidate)


def _note_lost(
    update: Update, old: Tensor, new: Tensor, gradient: Tensor, candidate: Candidate
) -> None:
    """Count what is lost: in a run without masters as it was, else as it would be.

    The tensors are a part of a parameter: what is compared meets in the cache.
    """
    if not candidate.masters:
        meant = gradient != 0
        stays = (new == old) & meant
        update.changed += int(meant.count_nonzero())
        _add(update, candidate.storage, stays)
        return
    change = new - old
    meant = change != 0
    update.changed += int(meant.count_nonzero())
    for fmt in STORED:
        _add(update, fmt, meant & lost(old, change, fmt))


def _add(update: Update, fmt: Format, where: Tensor) -> None:
    update.lost[fmt.name] = update.lost.get(fmt.name, 0) + int(where.count_nonzero())


def lost(weight: Tensor, change: Tensor, fmt: Format) -> Tensor:
    """Return where a weight stored in `fmt` (16 bits) stays what it is."""
    dtype = IEEE_DTYPES[fmt.name]
    stored = weight.to(dtype)
    return (stored.float() + change).to(dtype) == stored


def scaled(value: float, fmt: Format) -> float:
    """Return an update ratio in steps of the format: below 0.5 most of it is lost."""
    return value / fmt.eps


def total(found: Mapping[str, Update], fmt: str) -> float:
    """Return the share of all updates that a stored format rounds away."""
    changed = sum(u.changed for u in found.values())
    gone = sum(u.lost.get(fmt, 0) for u in found.values())
    return gone / max(changed, 1)
