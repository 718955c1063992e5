"""Precision of a training run: before it, during it and after it failed.

What `__all__` lists can be imported from here; each name is loaded when it is asked
for, so that reading a log does not load torch.
"""

from importlib import import_module

_HOMES = {  # public name -> module of this package
    # before a run
    "Candidate": "candidates",
    "NextToken": "trainer",
    "Planned": "spec",
    "Probed": "probe",
    "Problem": "trainer",
    "TrainingSpec": "spec",
    "batches": "train_data",
    "probe_here": "probe",
    # beside it
    "Alarm": "health",
    "HealthMonitor": "monitor",
    "Metric": "health",
    "Policy": "stability",
    "PrecisionScheduler": "scheduler",
    "Thresholds": "health",
    "jsonl_log": "log_files",
    # after it
    "diagnose": "doctor",
    "read_log": "log_files",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
