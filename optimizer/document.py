"""What a run found, as the report document: plain JSON, version `precision.report/1`.

Everything that a person or a program reads later comes out of this document:
the HTML report, the job's result, the stack and the front.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from optimizer import as_served
from optimizer.checkpoint import Checkpoint
from optimizer.choose import Chooser, Totals, fp8_share
from optimizer.contrast import Contrast, compare
from optimizer.cost import SiteCost
from optimizer.document_beyond import Looked
from optimizer.document_latency import latency
from optimizer.document_limits import limits, warnings
from optimizer.document_provenance import provenance
from optimizer.document_sites import added_kl_nats, components, layers, site_row
from optimizer.document_stability import steadiness
from optimizer.evidence import Evidence
from optimizer.experts import ExpertTokens, rare
from optimizer.hardware import Device
from optimizer.kernels import Tables
from optimizer.ledger import kinds, served
from optimizer.local_run import SERVED, Measured
from optimizer.model import LoadedModel
from optimizer.one_pass import generates
from optimizer.recode import Gain
from optimizer.repair import Repair
from optimizer.spec import OptimizeSpec
from optimizer.stability import stability
from optimizer.stack import Stack
from optimizer.tokens import Half, Tokens
from optimizer.units import nats, seconds, significant, size
from optimizer.validate import (
    BLOCK_TOKENS,
    BOOTSTRAP_SAMPLES,
    CONFIDENCE,
    Interval,
    Quality,
    Validation,
)

SCHEMA = "precision.report/1"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of the request."""

    outcome: str  # sla_met, sla_not_met, no_improvement
    label: str  # of the chosen stack, in `Run.stacks`
    would_meet: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the chosen stack's FP8 weights are rounded, and what that gains."""

    asked: str
    used: str  # compensated only where it measured better
    nearest_kl_nats: Interval
    compensated_kl_nats: Interval | None = None  # None: not asked for
    gain: Gain | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """Everything that a run knows at its end."""

    spec: OptimizeSpec
    model: LoadedModel
    checkpoint: Checkpoint
    tokens: Tokens
    device: Device
    basis: str  # modelled, measured
    chooser: Chooser  # with what measured stacks taught it
    repair: Repair
    front: Sequence[Stack]
    stacks: Mapping[str, Stack]  # validated, by label
    validation: Validation
    verdict: Verdict
    contrast: Contrast | None
    rounding: Rounding
    experts: tuple[ExpertTokens, ...]  # empty without experts
    evidence: Evidence  # who sets the scales, and what attention looks at
    executed: Mapping[str, Any]  # what the validated stacks were run on
    profile: Tables | None = None  # of the device, that prices were taken from
    looked: Looked = field(default_factory=Looked)  # at the chosen stack, elsewhere
    runs: Mapping[str, Measured] = field(default_factory=dict)  # end to end, by label
    exported: Mapping[str, Any] | None = None  # of `exports.export`; None: nothing was


def build(run: Run) -> dict[str, Any]:
    """Return the document."""
    chosen = run.stacks[run.verdict.label]
    by_component = components(run, chosen)
    return {
        "schema": SCHEMA,
        "request": run.spec.to_json(),
        "verdict": _verdict(run),
        "model": _model(run),
        "data": _data(run),
        "hardware": _hardware(run),
        "executed_on": {**run.executed, "threads": torch.get_num_threads()},
        "workload": asdict(run.spec.workload),
        "precision_stack": {c["component"]: c["choice"] for c in by_component},
        "components": by_component,
        "layers": layers(chosen, run.model.shape.layers),
        "sites": [site_row(run, s, chosen) for s in chosen.choices],
        "front": [_front_point(run, i, s) for i, s in enumerate(run.front)],
        "prediction": _prediction(run),
        "validation": _validation(run),
        "rounding": asdict(run.rounding),
        "runs": [{"label": k, **asdict(m)} for k, m in run.runs.items()],
        "exported": run.exported,
        "statistics": run.evidence.to_json(),
        "contrast": compare(run.contrast, run.chooser.table) if run.contrast else None,
        "stability": steadiness(run, chosen),
        "by_distribution": list(run.looked.distributions),
        "by_position": list(run.looked.positions),
        "worst_tokens": list(run.looked.worst),
        "generation": run.looked.generation,
        "limits": limits(run),
        "warnings": warnings(run),
        "provenance": provenance(run),
    }


def front_id(run: Run, stack: Stack) -> str | None:
    """Return the id of the front point that is this stack; None: it is not on it."""
    for index, point in enumerate(run.front):
        if point.choices == stack.choices:
            return f"p{index}"
    return None


def _verdict(run: Run) -> dict[str, Any]:
    chosen = run.stacks[run.verdict.label]
    return {
        "outcome": run.verdict.outcome,
        "sentence": _sentence(run),
        "sla": {
            **asdict(run.spec.latency_sla),  # what the median has to meet
            "asked": run.spec.latency_sla.asked,
        },
        "chosen": front_id(run, chosen),
        "would_meet": list(run.verdict.would_meet),
    }


def _sentence(run: Run) -> str:
    base_id, base = run.chooser.base()
    base_label = base_id.replace("_", " ")
    chosen = as_served.taken(run)
    before = run.chooser.totals(base)
    kl, base_kl = (
        run.validation.stacks[label].kl_nats.value
        for label in (run.verdict.label, base_id)
    )
    ways = run.spec.workload.tensor_parallel
    name = run.device.name if ways == 1 else f"{ways} × {run.device.name}"
    start = {
        "sla_met": f"On {name} the chosen stack is within the targets: it",
        "sla_not_met": f"No stack is within the targets on {name}: the nearest",
        "no_improvement": f"On {name} nothing improves on {base_label}: it",
    }[run.verdict.outcome]
    each = "per token" if generates(run.model.shape) else "for a batch"
    if (under := run.runs.get(SERVED)) is not None:
        each += f" under {under.engine} {under.version}"
        if run.verdict.outcome == "sla_not_met":
            start = f"On {name} the chosen stack is not within the targets: it"
    return (
        f"{start} takes {seconds(chosen.per_token_s)} {each} ({_beside(run)}"
        f"{base_label}: {seconds(before.per_token_s)}), holds "
        f"{size(chosen.weight_bytes)} of weights "
        f"({base_label}: {size(before.weight_bytes)}) and loses "
        f"{nats(kl)} of KL on held-out data ({base_label}: "
        f"{significant(base_kl)})."
    )


def _beside(run: Run) -> str:
    """Say where the seconds are from, and torch's own where an engine served the stack."""
    if SERVED not in run.runs:
        return f"{run.basis}; "
    summed = run.chooser.totals(run.stacks[run.verdict.label])
    return f"measured; in torch {seconds(summed.per_token_s)}, "


def _model(run: Run) -> dict[str, Any]:
    shape = run.model.shape
    return {
        "name": run.spec.model,
        "sha256": run.spec.model_sha256,
        "architecture": shape.architecture,
        "parameters": shape.parameters,
        "layers": shape.layers,
        "stored_bytes": run.checkpoint.stored_bytes,
        "stored_dtypes": dict(run.checkpoint.dtype_bytes),
        "tied_embeddings": shape.tied_embeddings,
        "coverage_percent": run.model.coverage_percent,
        "experts": len(run.experts),
        "rare_experts": [asdict(e) for e in rare(run.experts)],
        "unrecognized": [asdict(u) for u in run.model.unrecognized],
        "warnings": list(run.checkpoint.warnings),
    }


def _data(run: Run) -> dict[str, Any]:
    dataset = run.tokens.dataset
    return {
        "distribution": dataset.name,
        "origin": dataset.origin,
        "licence": dataset.licence,
        "sha256": dataset.sha256,
        "calibration": _half(run, run.tokens.calibration),
        "validation": _half(run, run.tokens.validation),
    }


def _half(run: Run, half: Half) -> dict[str, int]:
    return {
        "samples": half.samples,
        "tokens": half.tokens,
        "sequence_tokens": run.spec.sequence_tokens,
    }


def _hardware(run: Run) -> dict[str, Any]:
    return {
        "id": run.device.id,
        "name": run.device.name,
        "arch": run.device.arch,
        "basis": run.basis,
        **latency(run.device, run.basis, _costs(run), run.spec.engine, run.profile),
        "memory_bytes": run.device.memory_bytes,  # of each device
        "devices": run.spec.workload.tensor_parallel,
        "per_device": _per_device(run),
        "notes": list(run.device.notes),
    }


def _per_device(run: Run) -> dict[str, int]:
    """Return what the chosen stack takes of one device: the ledger's rows."""
    shape, workload = run.model.shape, run.spec.workload
    alike = kinds(shape, run.stacks[run.verdict.label])
    ledger = served(shape, alike, workload.tensor_parallel).ledger(workload)
    rows = {f"{entry.name}_bytes": entry.bytes for entry in ledger.entries}
    return {**rows, "total_bytes": ledger.total_bytes}


def _costs(run: Run) -> list[SiteCost]:
    chosen = run.stacks[run.verdict.label].choices
    rows = [run.chooser.row(site, choice) for site, choice in chosen.items()]
    return [row.cost for row in rows if row.cost is not None]


def _totals(totals: Totals) -> dict[str, Any]:
    return {
        "per_token_s": totals.per_token_s,
        "first_token_s": totals.first_token_s,
        "kl_nats": totals.kl_nats,
        "bytes": totals.weight_bytes,
        "memory_bytes": totals.memory_bytes,
    }


def _front_point(run: Run, index: int, stack: Stack) -> dict[str, Any]:
    label = next((k for k, s in run.stacks.items() if s.choices == stack.choices), None)
    quality = run.validation.stacks[label] if label else None
    return {
        "id": f"p{index}",
        **_totals(run.chooser.totals(stack)),
        "fp8_share": fp8_share(run.model.shape, stack),
        "stack": stack.to_json(),
        "validated": label is not None,
        "measured_kl_nats": quality.kl_nats.value if quality else None,
        "stability": asdict(stability(run.chooser, stack, quality)),
    }


def _prediction(run: Run) -> dict[str, Any]:
    """Say how the predicted losses were corrected, and how well they hold."""
    learned = run.chooser.surrogate
    kinds = sorted(learned.multipliers.items())
    return {
        "scale": learned.a,
        "exponent": learned.b,
        "multipliers": [
            {"component": component, "choice": choice, "multiplier": m}
            for (component, choice), m in kinds
        ],
        "residual": learned.residual,
        "rounds": run.repair.rounds,
        "measured_stacks": len(run.repair.measured),
        "agrees": run.repair.agrees,
    }


def _validation(run: Run) -> dict[str, Any]:
    return {
        "tokens": run.validation.tokens,
        "bootstrap": {
            "samples": BOOTSTRAP_SAMPLES,
            "block_tokens": BLOCK_TOKENS,
            "confidence": CONFIDENCE,
        },
        "reference": {
            "perplexity": run.validation.reference_perplexity
            if generates(run.model.shape)
            else None
        },
        "stacks": [
            _validated(run, label, run.validation.stacks[label]) for label in run.stacks
        ],
    }


def _validated(run: Run, label: str, quality: Quality) -> dict[str, Any]:
    stack = run.stacks[label]
    totals = run.chooser.totals(stack)
    where = front_id(run, stack)
    name = shown_as(label, where)
    return {
        "id": name,
        "label": name.replace("_", " "),
        "chosen": label == run.verdict.label,
        "front_id": where,
        "predicted_kl_nats": totals.kl_nats,
        "added_kl_nats": added_kl_nats(run, stack),
        "per_token_s": totals.per_token_s,
        "first_token_s": totals.first_token_s,
        "bytes": totals.weight_bytes,
        "memory_bytes": totals.memory_bytes,
        "fp8_share": fp8_share(run.model.shape, stack),
        **asdict(quality),
        **({} if generates(run.model.shape) else {"perplexity": None}),
    }


def shown_as(label: str, where: str | None) -> str:
    """Return what a validated stack goes by: its role, or its place on the front.

    Points get their label before measurement refutes some: their places may move.
    """
    if not label.startswith("p"):
        return label
    return where or f"refuted_{label}"
