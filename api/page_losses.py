"""The losses of a probe as a page draws them, while its runs go on and after them."""

from collections.abc import Iterable
from typing import Any

from optimizer.training.curves import Curves, curves

COLORS = 8  # curves beyond them begin again
Json = dict[str, Any]
Losses = list[float | None]


def drawn(told: Iterable[Json]) -> Curves | None:
    """Return the curves of what `job.losses` events told. None: too little to draw.

    A run that a lost worker began is told again from its beginning, or from the middle:
    what was told last stands.
    """
    runs: dict[str, Losses] = {}
    for event in told:
        kept = runs.setdefault(_name(event), [])
        first = event["first"]
        kept[first:] = [None] * (first - len(kept)) + event["losses"]
    fixed = {"fp32": "base", "fp32, other order": "again"}
    others = [name for name in runs if name not in fixed]
    kinds = fixed | {name: str(n % COLORS) for n, name in enumerate(others)}
    order = [name for name in (*fixed, *others) if name in runs]
    return curves([(name, kinds[name], runs[name]) for name in order])


def _name(event: Json) -> str:
    if event["order"]:
        return f"{event['run']}, other order"
    return f"{event['run']}, promoted" if event["promoted"] else str(event["run"])
