"""The JSON of an estimate: every figure with its basis, and physics beside it."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the API starts without numpy
    from optimizer.advice import Advice
    from optimizer.estimate import Ask, Estimate, Priced
    from optimizer.hardware import Device
    from optimizer.ledger import Ledger
    from optimizer.limits import Limit
    from optimizer.training_memory import Gain, Training

Json = dict[str, Any]


def estimate(found: "Estimate", name: str, source: str) -> Json:
    """Return the answer: what was asked, the stacks, FP8, the target, the choice."""
    ask = found.ask
    return {
        "object": "estimate",
        "model": {
            "id": name,
            "source": source,
            "architecture": ask.model.architecture,
            "parameters": ask.model.parameters,
            "layers": ask.model.layers,
            "max_context": ask.model.max_context or None,
        },
        "hardware": {
            "id": ask.device.id,
            "name": ask.device.name,
            "memory_bytes": ask.device.memory_bytes,
        },
        "workload": asdict(ask.workload),
        "engine": ask.engine,
        "basis": _origin(ask),
        "formats": [_priced(p, ask) for p in found.priced],
        "refused": dict(found.refused),
        "fp8": {
            **asdict(found.fp8),
            "by_batch": [
                {"batch_size": at.batch_size, "per_token_s": dict(at.per_token_s)}
                for at in found.by_batch
            ],
        },
        "latency_sla": _target(found),
        "recommendation": asdict(found.choice),
        "training_advice": every_advice(ask.device),
        "training": None,
        "warnings": _warnings(ask),
    }


def _origin(ask: "Ask") -> Json:
    """Whose kernels stand for this device, and what figures are called."""
    from optimizer.kernels import stand_in

    known = ask.tables
    other = known is not None and stand_in(known, ask.engine)
    return {
        "stands_in_for": ask.engine if other else None,
        "engine": known.engine if known else None,
        "engine_version": known.version if known else None,
        "origin": known.origin if known else None,
        "said": "kernels: composed of measured kernel times; roofline: modelled from the "
        "data sheet, by efficiencies that were fitted to such times",
    }


def _priced(priced: "Priced", ask: "Ask") -> Json:
    cost = priced.cost
    return {
        "name": priced.name,
        "kept_wide": dict(priced.kept),
        "per_token_s": cost.per_token_s,
        "first_token_s": cost.first_token_s,
        "tokens_per_s": ask.workload.batch_size / cost.per_token_s,
        "basis": str(cost.per_token.basis),
        "error": _known(cost.per_token.error),
        "basis_shares": {
            str(basis): share for basis, share in cost.per_token.shares.items()
        },
        "first_token_basis": str(cost.first_token.basis),
        "first_token_error": _known(cost.first_token.error),
        "limits": {
            "per_token": _limit(priced.per_token, ask),
            "first_token": _limit(priced.first_token, ask),
        },
        "memory": _ledger(priced.ledger),
        "fits": priced.fits,
        "largest_batch": priced.largest_batch,
        "largest_context": priced.largest_context,
        "meets_sla": priced.meets if _has_target(ask) else None,
    }


def _known(error: float) -> float | None:
    """Return a relative error; None: nothing is known of it."""
    return None if math.isnan(error) else error


def _limit(limit: "Limit", ask: "Ask") -> Json:
    return {
        "seconds": limit.seconds,
        "term": str(limit.term),
        "said": limit.said(ask.device),
    }


def _ledger(ledger: "Ledger") -> Json:
    return {
        "devices": ledger.devices,
        "rows": [asdict(entry) for entry in ledger.entries],
        "total_bytes": ledger.total_bytes,
    }


def _has_target(ask: "Ask") -> bool:
    return ask.sla.per_token_s is not None or ask.sla.first_token_s is not None


def _target(found: "Estimate") -> Json | None:
    from optimizer.targets import needs

    if not _has_target(found.ask):
        return None
    sla = found.ask.sla  # of the median; `asked` are those of its percentile
    return {**asdict(sla), "asked": sla.asked, **asdict(needs(found))}


def _warnings(ask: "Ask") -> list[str]:
    tokens = ask.workload.prompt_tokens + ask.workload.output_tokens
    if ask.model.max_context and tokens > ask.model.max_context:
        return [
            f"prompt and output are {tokens} tokens, but the model takes "
            f"{ask.model.max_context} at once"
        ]
    return []


# -- training ------------------------------------------------------------------


def training(ask: "Ask", how: "Training", scenario: str) -> Json:
    """Return what training takes on each device, and what to train in."""
    from optimizer.training_memory import gain, training

    ledger = training(ask.model, how)
    saved = gain(ask.model, how)
    return {
        "assumed": {"scenario": scenario, **asdict(how)},
        "memory": _ledger(ledger),
        "fits": ledger.total_bytes <= ask.room_bytes,
        "mixed_precision": {**asdict(saved), "saved_share": saved.saved_share},
        "advice": every_advice(ask.device)[_pays(scenario, saved)],
    }


def _pays(scenario: str, saved: "Gain") -> str:
    """Return whose advice holds: where mixed precision does not pay, a small model's."""
    whole = scenario in ("pretraining", "finetuning")
    return "small_model" if whole and not saved.pays else scenario


def too_long(ask: "Ask", how: "Training") -> list[str]:
    """Return the warning of sequences that the model does not take, where they are."""
    longest, tokens = ask.model.max_context, how.sequence_tokens
    if not longest or tokens <= longest:
        return []
    return [f"sequences of {tokens} tokens: the model takes {longest} at once"]


def every_advice(device: "Device") -> Json:
    """Return what to train in on a device, by what the training is for."""
    from optimizer.advice import Scenario, training_advice

    return {str(s): _advice(training_advice(device, s)) for s in Scenario}


def _advice(advice: "Advice") -> Json:
    return {
        **asdict(advice),
        "scenario": str(advice.scenario),
        "tier": str(advice.tier),
    }
