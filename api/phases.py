"""The phases of a job, in words: a probe goes through the same ones, and does other things."""

from collections.abc import Mapping
from types import MappingProxyType

SERVING: Mapping[str, str] = MappingProxyType(
    {  # in the order in which a job goes through them
        "fetch": "Fetch",  # of a model that is at the hub; the others do not
        "load": "Load",
        "calibrate": "Calibrate",
        "sweep": "Sweep",
        "search": "Search",
        "validate": "Validate",
        "export": "Export",
        "report": "Report",
    }
)
TRAINING: Mapping[str, str] = MappingProxyType(
    {  # what the phases of a probe are; it searches nothing
        "load": "Load",
        "calibrate": "Baseline in fp32",
        "sweep": "Candidates",
        "validate": "Promotions",
        "export": "Export",
        "report": "Report",
    }
)


def names(trains: bool) -> Mapping[str, str]:
    """Return the phases of a job in its order, by name."""
    return TRAINING if trains else SERVING


def name(phase: str, trains: bool) -> str:
    """Return what a phase is called; one that is not known by its own name."""
    return names(trains).get(phase, phase)
