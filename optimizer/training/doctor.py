"""The doctor: what a training log looks like, why, how sure that is, what to do first.

Each sign (`doctor_signs.py`) looks for one thing that goes wrong. What it finds has
evidence, in steps and figures of the log. Findings are ordered by how sure they are;
nothing found means that nothing wrong can be seen in what the log has.

`certain`: the log shows the cause itself. `likely`: it shows what only this cause is
known to do. `possible`: something else would look the same. That nothing is wrong is never certain.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from optimizer.training import doctor_facts as facts
from optimizer.training.doctor_signs import SIGNS
from optimizer.training.findings import Finding, Sure, Verdict
from optimizer.training.logs import RunLog

ORDER = list(Sure)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What a log looks like; `findings` are ordered, the surest first."""

    findings: tuple[Finding, ...]
    log: RunLog

    @property
    def verdict(self) -> Verdict:
        """The surest finding."""
        return self.findings[0].verdict

    @property
    def well(self) -> bool:
        """Whether nothing wrong was found."""
        return self.verdict is Verdict.NOTHING_WRONG

    def to_json(self) -> dict[str, Any]:
        """Return the answer of POST /v1/diagnose and of `precision doctor --json`."""
        return {
            "object": "diagnosis",
            "verdict": str(self.verdict),
            "findings": [finding.to_json() for finding in self.findings],
            "log": _usable(self.log),
        }


def _usable(log: RunLog) -> Mapping[str, Any]:
    return {
        "records": len(log.records),
        "first_step": log.records[0].step,
        "last_step": log.records[-1].step,
        "steps_between": log.every,
        "columns": dict(log.columns),
        "missing": list(log.missing),
        "layers": bool(facts.sampled(log)),
        "precision": log.precision,
        "notes": list(log.notes),
    }


def diagnose(log: RunLog) -> Diagnosis:
    """Say what a log looks like."""
    found = [finding for sign in SIGNS if (finding := sign(log)) is not None]
    found.sort(key=lambda finding: ORDER.index(finding.sure))  # stable: SIGNS' order
    return Diagnosis(tuple(found) or (_nothing(log),), log)


def _nothing(log: RunLog) -> Finding:
    layers = bool(facts.sampled(log))
    few = len(log.records) < facts.LEAST_RECORDS
    evidence = []
    lacks = [name for name in log.missing if name in ("loss", "gradient_norm")]
    if lacks:
        named = " and no ".join(name.replace("_", " ") for name in lacks)
        evidence.append(f"the log has no {named}: a run can be ill and not show it")
    if few:
        evidence.append(f"{len(log.records)} records are too few to judge a run by")
    seen = facts.losses(log)
    if seen is not None:
        evidence.append(f"the loss went from {seen.first:.4g} to {seen.last:.4g}")
    scale = facts.scale(log)
    if scale is not None:
        left_out = len(scale.skipped)
        evidence.append(f"{left_out} of {scale.steps} steps were left out, as is usual")
    if not layers:
        evidence.append("the log has no layers, so only the run as a whole was judged")
    blind = few or lacks
    return Finding(
        verdict=Verdict.NOTHING_WRONG,
        sure=Sure.POSSIBLE if blind else Sure.LIKELY,
        said="Nothing wrong can be seen in what the log has.",
        evidence=tuple(evidence),
        first=_next(layers, bool(lacks)),
    )


def _next(layers: bool, blind: bool) -> str:
    if blind:
        return "Log loss and gradient norm at every step, best with HealthMonitor."
    if not layers:
        return "Nothing to do. For more to judge by, log with HealthMonitor."
    return "Nothing to do."
