"""Two jobs side by side: figures with their difference, and where the stacks differ."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from api import page_words
from api.views import JobView
from optimizer import units

Json = dict[str, Any]

# What depends on the model and the text that it was measured on.
OF_TEXT = frozenset({"kl_nats", "perplexity", "top1_agreement", "fallback"})


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both jobs. `tone`: is the second good or bad beside the first?"""

    name: str
    first: str
    second: str
    change: str
    tone: str  # good, bad or even
    more: tuple[str, str] = ("", "")  # intervals


@dataclass(frozen=True, slots=True)
class Pair:
    """What both jobs say of one thing."""

    name: str
    first: str
    second: str

    @property
    def same(self) -> bool:
        """Say whether they agree."""
        return self.first == self.second


@dataclass(frozen=True, slots=True)
class Compared:
    """All that the page shows of two jobs."""

    figures: list[Figure]
    requests: list[Pair]
    components: list[Pair]
    layers: list[tuple[int, list[Pair]]]  # those where something differs
    same_text: bool  # of the same model on the same data: what they lose compares


def compare(first: JobView, second: JobView) -> Compared:
    """Return two jobs that succeeded, side by side."""
    a, b = first.result or {}, second.result or {}
    stacks = a["precision_stack"], b["precision_stack"]
    names = list(dict.fromkeys([*stacks[0], *stacks[1]]))
    same_text = all(
        first.request.get(name) == second.request.get(name)
        for name in ("model", "data_distribution")
    )
    return Compared(
        figures=_figures(a["chosen"], b["chosen"], same_text),
        requests=_requests(first.request, second.request),
        components=[
            Pair(page_words.component(n), *(_shown(s.get(n)) for s in stacks))
            for n in names
        ],
        layers=_layers(a.get("layers") or [], b.get("layers") or []),
        same_text=same_text,
    )


def _figures(a: Json, b: Json, same_text: bool) -> list[Figure]:
    plain = (
        ("Per output token", "per_token_s", units.seconds, True),
        ("To the first token", "first_token_s", units.seconds, True),
        ("KL from the reference", "kl_nats", units.nats, True),
        ("Perplexity", "perplexity", units.significant, True),
        ("Same top token", "top1_agreement", units.share, False),
        ("Weights", "bytes", units.size, True),
        ("Memory in use", "memory_bytes", units.size, True),
        ("Weights in FP8", "fp8_share", units.share, None),
        ("Tokens beyond FP8", "fallback", units.share, True),
    )
    found = [
        _figure(name, a.get(k), b.get(k), say, less) for name, k, say, less in plain
    ]
    if same_text:
        return found
    lost = {name for name, key, _, _ in plain if key in OF_TEXT}
    return [
        replace(f, change=units.MISSING, tone="even") if f.name in lost else f
        for f in found
    ]


def _figure(
    name: str, a: Any, b: Any, say: Callable[[object], str], less: bool | None
) -> Figure:
    x, y = _value(a), _value(b)
    tone = "even"
    if less is not None and x is not None and y is not None and x != y:
        tone = "good" if (y < x) == less else "bad"
    if _overlap(a, b):
        tone = "even"  # the intervals do not tell them apart
    return Figure(
        name,
        say(x),
        say(y),
        units.change(y, x),
        tone,
        (_bounds(a, say), _bounds(b, say)),
    )


def _value(figure: Any) -> float | None:
    found = figure.get("value") if isinstance(figure, dict) else figure
    return units.number(found)


def _bounds(figure: Any, say: Callable[[object], str]) -> str:
    if not isinstance(figure, dict):
        return ""
    return f"{say(figure.get('low'))} to {say(figure.get('high'))}"


def _overlap(a: Any, b: Any) -> bool:
    if not (isinstance(a, dict) and isinstance(b, dict)):
        return False
    return bool(a["low"] <= b["high"] and b["low"] <= a["high"])


def _requests(a: Json, b: Json) -> list[Pair]:
    names = {
        "model": "Model",
        "hardware": "Hardware",
        "task": "Task",
        "data_distribution": "Data",
        "engine": "Engine",
        "rounding": "Rounding",
    }
    pairs = [
        Pair(label, _shown(a.get(k)), _shown(b.get(k))) for k, label in names.items()
    ]
    targets = (page_words.target(r.get("latency_sla")) for r in (a, b))
    loads = (_load(r.get("workload") or {}) for r in (a, b))
    return [*pairs, Pair("Target", *targets), Pair("Workload", *loads)]


def _load(workload: Json) -> str:
    return (
        f"batch {workload.get('batch_size')}, {workload.get('prompt_tokens')} + "
        f"{workload.get('output_tokens')} tokens"
    )


def _layers(a: list[Json], b: list[Json]) -> list[tuple[int, list[Pair]]]:
    """Return the layers whose choices differ, with what differs in each."""
    second = {row["layer"]: row["choices"] for row in b}
    found = []
    for row in a:
        other = second.get(row["layer"], {})
        pairs = [
            Pair(page_words.component(name), _shown(choice), _shown(other.get(name)))
            for name, choice in row["choices"].items()
        ]
        if differing := [pair for pair in pairs if not pair.same]:
            found.append((row["layer"], differing))
    return found


def _shown(value: Any) -> str:
    return units.MISSING if value is None else str(value)
