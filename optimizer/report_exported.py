"""What the report shows of exports: what an engine loads, and where that differs."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from optimizer.report_cells import dicts
from optimizer.report_sites import Json

_ALIKE = ("export", "measured", "served", "toward", "reason")


def exported(found: object) -> Json | None:
    """Return the section, deviations that are alike as one row. None: there is none."""
    if not isinstance(found, Mapping):
        return None
    groups: dict[tuple[Any, ...], list[Json]] = defaultdict(list)
    for row in dicts(found.get("deviations")):
        groups[tuple(str(row.get(key)) for key in _ALIKE)].append(row)
    kept = found.get("checkpoint")
    return {
        "checkpoint": kept if isinstance(kept, Mapping) else None,
        "refused": dicts(found.get("refused")),
        "files": dicts(found.get("files")),
        "groups": [
            {**dict(zip(_ALIKE, key, strict=True)), **_sites(rows)}
            for key, rows in groups.items()
        ],
    }


def _sites(rows: list[Json]) -> Json:
    """Return how many sites they are, and the first and the last by name."""
    names = [str(row.get("site")) for row in rows]
    named = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
    return {"sites": len(names), "first": named}
