"""What the cells of a report's tables hold: texts of whatever a document has there."""

from typing import Any

from optimizer import units
from optimizer.report_sites import Json
from optimizer.units import count, significant


def text(value: object) -> str:
    """Return what stands in a cell."""
    if value is None or value == "":
        return units.MISSING
    if isinstance(value, int):
        return count(value)
    return significant(value) if isinstance(value, float) else str(value)


def at(found: Any, *path: str) -> Any:
    """Return what lies under the keys. None: nothing does."""
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def listed(found: Any) -> list[Any]:
    """Return a list, and nothing of what is none."""
    return found if isinstance(found, list) else []


def dicts(found: Any) -> list[Json]:
    """Return the rows of a list that have fields."""
    return [row for row in listed(found) if isinstance(row, dict)]


def measured(interval: object, digits: int = 3, factor: float = 1.0) -> str:
    """{"value", "low", "high"} -> 0.0215 (0.0196 – 0.0235)."""
    value = units.number(at(interval, "value"))
    if value is None:
        return units.MISSING
    ends = units.bounds(interval, digits, factor)
    return f"{significant(value * factor, digits)} ({ends})"
