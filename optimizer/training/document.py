"""The training report as a document: plain JSON, from what a probe found.

Schema `precision.training_report/1`; `report.py` makes a page of it, `exports_*.py`
configurations for those who train.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from optimizer.document_provenance import REPRODUCE, code_sha256, versions
from optimizer.hardware import Device
from optimizer.ledger import Ledger
from optimizer.spec import OptimizeSpec
from optimizer.stack import ModelShape
from optimizer.training import document_figures, place, scales, stack, verdict
from optimizer.training.candidates import Arithmetic
from optimizer.training.document_figures import mean, plain
from optimizer.training.drift import CONFIDENCE, SAFE, SAMPLES, layer_of
from optimizer.training.probe import Probed
from optimizer.training.trainer import looked_at
from optimizer.training.verdict import Outcome, Result, Status, Tried
from optimizer.training_memory import (
    Arithmetic as Held,
    Optimizer,
    Training,
    gain,
    training,
)

Json = dict[str, Any]
SCHEMA = "precision.training_report/1"


@dataclass(frozen=True, slots=True)
class About:
    """What a probe was of."""

    spec: OptimizeSpec
    shape: ModelShape | None  # None: the sizes are not those of a known architecture
    device: Device | None  # None: the worker's own
    data: Mapping[str, Any]
    sizes: Mapping[str, int]  # elements of each matrix
    parameters: Mapping[str, int]  # all, and those that are trained
    bare: Sequence[str]  # matrices that are in no Linear: not narrowed
    warnings: Sequence[str]


def build(found: Probed, about: About) -> Json:
    """Return the document."""
    rows = stack.rows(found, about.sizes)
    return {
        "schema": SCHEMA,
        "request": about.spec.to_json(),
        "training": found.how.to_json(),
        "verdict": _verdict(found, about),
        "model": _model(about),
        "data": dict(about.data),
        "hardware": {
            "id": about.spec.hardware,
            "name": about.device.name if about.device else "the worker's own device",
        },
        "executed_on": place.executed_on(),
        "baseline": _baseline(found),
        "candidates": [_candidate(n, r, found) for n, r in found.results.items()],
        "precision_stack": stack.by_component(rows),
        "stack": rows,
        "kept_fp32": stack.kept_fp32(found.chosen),
        "loss_scaling": scales.settings(found),
        "memory": _memory(found, about),
        "histograms": document_figures.histograms(found.baseline),
        "limits": _limits(found, about),
        "warnings": [*about.warnings, *_bare(about)],
        "provenance": {
            "versions": versions(),
            "code_sha256": code_sha256(),
            "seed": about.spec.seed,
            "request": _request(about.spec),
            "reproduce": REPRODUCE,
        },
    }


def _request(spec: OptimizeSpec) -> Json:
    """Return a body of `POST /v1/optimize` that asks for the same, defaults spelt out."""
    assert spec.training is not None
    return {
        "model": spec.model,
        "hardware": spec.hardware,
        "task": {"type": spec.task, **spec.training.to_json()},
        "data_distribution": {"name": spec.data_distribution, "seed": spec.seed},
    }


def _verdict(found: Probed, about: About) -> Json:
    chosen = found.chosen
    return {
        "outcome": str(found.outcome),
        "sentence": _sentence(found),
        "chosen": chosen.candidate.name if chosen else "fp32",
        "held_out_loss": chosen.loss.to_json() if chosen else None,
        "findings": [f.to_json() for f in found.findings],
        "pays": _pays(about),
    }


def _sentence(found: Probed) -> str:
    steps = found.how.steps
    match found.outcome, found.chosen:
        case Outcome.UNSTABLE, _:
            first = next(f for f in found.findings if f.breaks)
            return f"No precision helps yet: {first.said}."
        case Outcome.NO_IMPROVEMENT, _:
            return f"Over {steps} steps nothing narrower follows fp32: train in fp32."
        case _, Tried() as chosen:
            return _follows(chosen, steps)
    raise AssertionError(found.outcome)


def _follows(chosen: Tried, steps: int) -> str:
    loss, some = chosen.loss, len({p.matrix for p in chosen.candidate.promotions})
    wider = f", with {some} matrices in something wider" if some else ""
    worst = max((d.worst for d in chosen.drifts), default=0.0)
    return (
        f"Train in {chosen.candidate.name}{wider}: over {steps} steps no layer leaves "
        f"fp32 by more than 1 % and the noise floor (worst {100 * worst:.2g} %), and the "
        f"held-out loss is off by {100 * loss.value:.2g} % "
        f"({100 * loss.low:.2g} to {100 * loss.high:.2g} %; noise {100 * loss.floor:.2g} %)."
    )


def _pays(about: About) -> Json | None:
    if about.shape is None:
        return None
    saved = gain(about.shape, _how(about))
    return {**asdict(saved), "saved_share": saved.saved_share}


def _model(about: About) -> Json:
    return {
        "name": about.spec.model,
        "sha256": about.spec.model_sha256,
        "architecture": about.shape.architecture if about.shape else None,
        **about.parameters,
        "matrices": len(about.sizes),
        "not_narrowed": list(about.bare),
    }


def _how(about: About) -> Training:
    how, lora = about.spec.training, about.spec.task == "lora"
    assert how is not None
    return Training(
        optimizer=Optimizer(how.optimizer),
        batch_size=how.batch_size,
        sequence_tokens=how.sequence_tokens,
        lora_rank=how.lora_rank if lora else None,
    )


def _memory(found: Probed, about: About) -> Json | None:
    """Return the ledger of the chosen precision, beside fp32's."""
    if about.shape is None:
        return None
    runs = found.chosen.candidate.arithmetic if found.chosen else Arithmetic.FP32
    held = {Arithmetic.FP32: Held.FP32, Arithmetic.FP8: Held.FP8}.get(runs, Held.MIXED)
    how = _how(about)
    ledgers = {
        "chosen": training(about.shape, replace(how, arithmetic=held)),
        "fp32": training(about.shape, replace(how, arithmetic=Held.FP32)),
    }
    return {name: _ledger(ledger) for name, ledger in ledgers.items()}


def _ledger(ledger: Ledger) -> Json:
    rows = [asdict(entry) for entry in ledger.entries]
    return {"rows": rows, "total_bytes": ledger.total_bytes}


# -- runs -------------------------------------------------------------------------


def _baseline(found: Probed) -> Json:
    figures = found.baseline
    return {
        "losses": plain(figures.losses),
        "again": plain(found.again.losses),
        "held_out_loss": mean(figures.held_out),
        "held_out_loss_again": mean(found.again.held_out),
        "gradient_norms": document_figures.norms(figures),
        "looked_at": sorted(looked_at(found.how.steps)),
        "safe": SAFE,
        "bootstrap": {"samples": SAMPLES, "confidence": CONFIDENCE},
        "gemms": document_figures.gemms_with_histograms(figures.seen),
        "updates": document_figures.update_rows(figures),
    }


def _candidate(name: str, result: Result, found: Probed) -> Json:
    if not result.rounds:
        return {"name": name, "status": None, "unusable": result.unusable}
    last = result.last
    return {
        "name": name,
        "status": str(result.status),
        "unusable": result.unusable,
        "candidate": last.candidate.to_json(),
        "rounds": [verdict.to_json(one) for one in result.rounds],
        "promotions": _promotions(result),
        "losses": plain(result.rounds[0].figures.losses),
        "losses_promoted": plain(last.figures.losses)
        if len(result.rounds) > 1
        else None,
        "held_out_loss": mean(last.figures.held_out),
        "loss_scales": plain(result.rounds[0].figures.scales),
        "skipped": [list(each) for each in result.rounds[0].figures.skipped],
        "gradient_norms": document_figures.norms(last.figures),
        "gemms": document_figures.gemms(last.figures.seen),
        "updates": document_figures.update_rows(last.figures),
    }


def _promotions(result: Result) -> list[Json]:
    """Return what each matrix was promoted to, with the proof: drift before and after."""
    before = {d.layer: d for d in result.rounds[0].drifts}
    after = {d.layer: d for d in result.last.drifts}
    rows: dict[str, Json] = {}
    for promotion in result.last.candidate.promotions:
        layer = layer_of(promotion.matrix)
        row = rows.setdefault(
            promotion.matrix,
            {
                "matrix": promotion.matrix,
                "layer": layer,
                "gemms": [],
                "arithmetic": str(promotion.arithmetic),
                "before": before[layer].to_json() if layer in before else None,
                "after": after[layer].to_json() if layer in after else None,
                "cured": result.status is Status.CURED,
            },
        )
        row["gemms"].append(str(promotion.gemm))
    return list(rows.values())


# -- what it does not say -----------------------------------------------------------


def _limits(found: Probed, about: About) -> list[str]:
    how = found.how
    said = [
        place.said(),
        f"{how.steps} steps were probed, {len(looked_at(how.steps))} of them looked "
        "into. What grows over thousands of steps is seen where it has begun.",
        "Nothing is dropped out; gradients are of the mean over a whole step.",
        "A step whose gradients overflow is tried again on the same data with the lower "
        "loss scale; a training goes on with the next batch.",
        "No speed was measured: which of the precisions that follow is fastest is taken "
        "from the width of their products.",
    ]
    if about.spec.task == "pretrain":
        said.append("The weights were drawn afresh from the model's configuration.")
    return said


def _bare(about: About) -> list[str]:
    if not about.bare:
        return []
    return [
        f"{len(about.bare)} parameters hold matrices that are in no Linear (experts): "
        f"they ran as autocast has them, and FP8 was not tried there: {about.bare[0]}, …"
    ]
