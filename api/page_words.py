"""What the pages say: states, phases, events and errors in words."""

import re
from typing import Any

from api import phases
from api.ids import PATTERN
from api.models import FINAL, Status
from optimizer import units

Json = dict[str, Any]

JOB_ID = re.compile(f"job_{PATTERN}")
STATES = {  # sign, word: never told by color alone
    "queued": ("○", "Queued"),
    "running": ("◐", "Running"),
    "finalizing": ("◐", "Finalizing"),
    "cancelling": ("◐", "Cancelling"),
    "succeeded": ("✓", "Succeeded"),
    "failed": ("✗", "Failed"),
    "cancelled": ("–", "Cancelled"),
    "expired": ("–", "Expired"),
}
OUTCOMES = {
    "sla_met": ("✓", "SLA met"),
    "sla_not_met": ("✗", "SLA not met"),
    "no_improvement": ("=", "No improvement"),
    # of a training
    "recommended": ("✓", "Recommended"),
    "recommended_with_promotions": ("✓", "Recommended, with promotions"),
    "unstable": ("✗", "fp32 itself does not train"),
}
COMPONENTS = {
    "embeddings": "Embeddings",
    "attn_qkv": "Attention: Q, K, V",
    "kv_cache": "KV cache",
    "attn_scores": "Attention: QKᵀ",
    "attn_softmax": "Attention: softmax",
    "attn_values": "Attention: PV",
    "attn_out": "Attention: output",
    "ffn_in": "FFN: in",
    "ffn_act": "FFN: activation",
    "ffn_out": "FFN: out",
    "norms": "Norms",
    "lm_head": "LM head",
    "router": "Router",
}
SCENARIOS = {  # of training
    "pretraining": "Pre-training",
    "finetuning": "Fine-tuning",
    "lora": "LoRA",
    "alignment": "Alignment (preferences, reinforcement learning)",
    "small_model": "A small model, short sequences",
    "reproduction": "Repeating a run",
}
REMEDIES = {
    "user": "Change the request, and send it again.",
    "model": "Correct the model's files, upload it again, and send a new job.",
    "hardware": "Choose other hardware or formats that it has, and send a new job.",
    "platform": "Run it again. If it fails once more, tell the operator the job's id.",
}
EVENTS = {
    "job.created": "Accepted",
    "job.queued": "Waits for a worker",
    "job.started": "A worker took it",
    "job.attempt_lost": "The worker fell silent",
    "job.finalizing": "Results are being stored",
    "job.cancelling": "Asked to stop",
    "job.succeeded": "Succeeded",
    "job.failed": "Failed",
    "job.cancelled": "Cancelled",
    "job.expired": "Waited too long, and expired",
}
EVERY_EVENT = " ".join(
    (
        *EVENTS,
        *("job.progress", "job.phase_changed", "job.warning", "job.trial_completed"),
        *("job.losses", "job.log"),
        "artifact.created",
    )
)
UNTOLD = frozenset({"job.progress", "job.losses"})  # the bar and the curves show them


def state(status: str, outcome: str | None = None) -> tuple[str, str, str]:
    """Return the sign, the word and the tone of a job's state."""
    if outcome in OUTCOMES:
        sign, word = OUTCOMES[outcome]
        tones = {"✓": "good", "✗": "bad"}
        return sign, word, tones.get(sign, "even")
    sign, word = STATES.get(status, ("?", status))
    tones = {"failed": "bad", "succeeded": "good", "queued": "even"}
    live = status not in {str(final) for final in FINAL}
    return sign, word, tones.get(status, "live" if live else "even")


def trains(job: Any) -> bool:
    """Say whether a job probes a training."""
    return bool(job.request.get("training"))


def component(name: str) -> str:
    """Return a component's name for people."""
    return COMPONENTS.get(name, name)


def scenario(name: str) -> str:
    """Return what a training is for, for people."""
    return SCENARIOS.get(name, name)


def duration(seconds: float | None) -> str:
    """Return a time span as people say it: 42 s, 3 min, 2 h 5 min, 3 d."""
    if seconds is None:
        return units.MISSING
    whole = max(0, round(seconds))
    if whole < 100:
        return f"{whole} s"
    minutes = round(whole / 60)
    if minutes < 100:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {rest} min" if rest else f"{hours} h"
    return f"{round(hours / 24)} d"


def target(sla: Json | None) -> str:
    """Return a latency target in words."""
    sla = sla or {}
    said = [
        f"{units.seconds(sla[key])} {words}"
        for key, words in (
            ("per_token_s", "a token"),
            ("first_token_s", "to the first"),
        )
        if sla.get(key)
    ]
    if said and sla.get("percentile", 0.5) > 0.5:
        said[-1] += f" (p{100 * sla['percentile']:g})"
    return ", ".join(said) or "none"


def verdict(outcome: str | None, chosen: Json, sla: Json | None) -> str:
    """Return the verdict in one sentence."""
    kl = chosen.get("kl_nats")
    loss = kl.get("value") if isinstance(kl, dict) else kl
    took = f"{units.seconds(chosen.get('per_token_s'))} a token"
    lost = f"{units.nats(loss)} from the reference"
    narrow = units.share(chosen.get("fp8_share"))
    asked = target(sla)
    said = f"{took}, {lost}, {narrow} of the weights in FP8"
    match outcome:
        case "sla_met":
            return f"Meets {asked}: {said}."
        case "sla_not_met":
            return f"No stack meets {asked}. The nearest takes {said}."
        case _:
            return f"Nothing beats the uniform 16-bit stack: {said}."


def progress(job: Any) -> str:
    """Return how far a job is in one sentence."""
    if job.status is Status.QUEUED:
        place = job.queue_position
        where = f", place {place} in the queue" if place else ""
        return f"Waits for a worker{where}."
    if job.status is Status.RUNNING:
        left = job.progress.eta_seconds
        more = f", about {duration(left)} left" if left is not None else ""
        said = phases.name(job.phase, trains(job)) if job.phase else "Starting"
        return f"{said}{more}."
    if job.status in (Status.FINALIZING, Status.CANCELLING):
        return f"{STATES[job.status][1]}."
    return ""


def event(found: Json, of_training: bool = False) -> str | None:
    """Return an event as a line of the log. None: it is shown in another way."""
    kind, data = found["type"], found["data"]
    if kind in UNTOLD:
        return None
    match kind:
        case "job.phase_changed":
            phase = phases.name(data.get("phase", ""), of_training)
            return f"{phase} began at {data.get('percent', 0):.0f} %"
        case "job.warning":
            return f"Warning: {data.get('message', data.get('code', ''))}"
        case "job.log":
            return str(data.get("message", ""))
        case "job.trial_completed":
            return _trial(data)
        case "artifact.created":
            return f"Stored {data.get('name')}, {units.size(data.get('bytes'))}"
        case _:
            return f"{EVENTS.get(kind, kind)}{_why(data)}"


def _why(data: Json) -> str:
    outcome = data.get("outcome")
    said = (data.get("error") or {}).get("message")
    why = OUTCOMES[outcome][1] if outcome in OUTCOMES else said
    return f": {why}" if why else ""


def _trial(data: Json) -> str:
    lost, took = units.nats(data.get("kl_nats")), units.seconds(data.get("per_token_s"))
    narrow = units.share(data.get("fp8_share"))
    return f"Measured a stack: {lost} at {took} a token, {narrow} in FP8"


def remedy(error: Json | None) -> str:
    """Return what to do about a job's error."""
    return REMEDIES.get((error or {}).get("category", ""), REMEDIES["platform"])


def tflops(value: object) -> str:
    """Return a peak: 9.89e14 is 989 TFLOP/s. Of what nobody states, —."""
    peak = units.number(value)
    return (
        units.MISSING if peak is None else f"{units.significant(peak / 1e12)} TFLOP/s"
    )


def is_id(text: str) -> bool:
    """Say whether a text looks like a job's id."""
    return JOB_ID.fullmatch(text) is not None
