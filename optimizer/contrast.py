"""Does the caller's data matter? The same sweep, smaller, on another distribution."""

from dataclasses import dataclass
from typing import Any

from scipy.stats import spearmanr

from optimizer.choose import Table
from optimizer.sums import Sensitivities


@dataclass(frozen=True, slots=True)
class Contrast:
    """What a smaller sweep found on another distribution."""

    distribution: str
    tokens: int
    sensitivities: Sensitivities


def compare(contrast: Contrast, table: Table) -> dict[str, Any]:
    """Return both distributions' losses by component and FP8 choice, as plain JSON."""
    other = contrast.sensitivities
    pairs = [
        (row.sensitivity.kl_nats, other[site, row.choice].kl_nats, site, row.choice)
        for site, rows in table.items()
        for row in rows
        if row.sensitivity is not None and (site, row.choice) in other
        if row.sensitivity.kl_nats > 0
    ]
    by_component: dict[tuple[str, str], list[float]] = {}
    for mine, theirs, site, choice in pairs:
        if choice.is_fp8:
            sums = by_component.setdefault((site.component, choice.name), [0.0, 0.0])
            sums[0] += mine
            sums[1] += theirs
    ranked = spearmanr([p[0] for p in pairs], [p[1] for p in pairs])
    return {
        "distribution": contrast.distribution,
        "tokens": contrast.tokens,
        "rank_correlation": float(ranked.statistic),
        "components": [
            {
                "component": component,
                "choice": choice,
                "kl_nats": mine,
                "contrast_kl_nats": theirs,
            }
            for (component, choice), (mine, theirs) in by_component.items()
        ],
    }
