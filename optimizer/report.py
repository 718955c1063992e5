"""The validation report: one HTML file that tells a reviewer what was measured.

`render_html` cleans the document (no control characters, no text that turns the
reading direction), derives what the pages show (plot, heat map, groups), and fills
the template. Same document, same bytes. No torch, no network; the one script names
the point of the plot that is under the pointer, and nothing is lost without it.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from jinja2 import Environment, Template
from markupsafe import Markup

from optimizer import (
    plot,
    report_beyond,
    report_sites,
    report_statistics,
    report_template,
    units,
)
from optimizer.report_exported import exported
from optimizer.report_script import policy, script
from optimizer.report_sites import Json, in_order, letter, tally
from optimizer.report_text import clean

_LATENCIES = ("per_token_s", "first_token_s")
_SECTIONS = (
    ("asked", "Asked"),
    ("verdict", "Verdict"),
    ("stack", "Stack"),
    ("front", "Pareto front"),
    ("validation", "Quality"),
    ("heat", "Heat map"),
    ("reasons", "Why high"),
    ("stability", "Stability"),
    ("generation", "Generation"),
    ("attention", "Attention"),
    ("latency", "Latency, memory"),
    ("limits", "Limits"),
    ("provenance", "Provenance"),
    ("sensitivity", "Sensitivity"),
    ("statistics", "Statistics"),
    ("coverage", "Coverage"),
)
_UNIFORM = ("all_bf16", "all_e4m3")  # all fp32 would stretch the plot for nothing


def render_html(document: Json) -> str:
    """Return the report of a "precision.report/1" document as one HTML file.

    Any field may be missing or null and is then shown as "—".
    """
    return _template().render(view(document))


def front_svg(shown: Json) -> str | None:
    """Return the plot of a `view` as an SVG file, in print's colors. None: no points."""
    if shown["plot"] is None:
        return None
    template = _environment().get_template("report_front.svg.j2")
    drawn = template.render(
        {**shown, "alone": report_template.read("report_front.css")}
    )
    return str(drawn)


def _template() -> Template:
    return _environment().get_template("report.html.j2")


@cache
def _environment() -> Environment:
    environment = report_template.environment()
    environment.filters["letter"] = letter
    environment.globals.update(
        change=units.change,
        ratio=units.ratio,
        heat_steps=report_sites.HEAT_STEPS,
        position_steps=report_statistics.POSITION_STEPS,
        geometry=plot,
    )
    return environment


def view(document: Json) -> Json:
    """Return everything the template reads: the clean document and what follows."""
    d = clean(document)
    sites = report_sites.named(_rows(d, "sites"))
    confidence = _at(d, "validation", "bootstrap", "confidence")
    stats = report_statistics.statistics(d, sites)
    front = _front_rows(d)
    stacks = {s.get("id"): s for s in _rows(d, "validation", "stacks")}
    chosen = _chosen(front) or stacks.get("chosen", {})
    return {
        "d": d,
        "sla_s": _at(d, "verdict", "sla", "per_token_s"),
        "front": front,
        "chosen": chosen,
        "chosen_measured": stacks.get("chosen") or chosen.get("measured"),
        "all_bf16": stacks.get("all_bf16"),
        "memory_of": {r.get("id"): r.get("memory_bytes") for r in front},
        "components": _component_rows(d),
        "plot": plot.plot(_points(d, front), _at(d, "verdict", "sla", "per_token_s")),
        "heat": report_sites.heat(sites),
        "reasons": report_sites.reasons(sites),
        "sensitivities": report_sites.sensitivities(sites),
        "stats": stats,
        "sections": _sections(stats),
        "positions": report_beyond.with_parts(_rows(d, "by_position")),
        "distributions": report_beyond.with_parts(_rows(d, "by_distribution")),
        "worst": report_beyond.worst(_rows(d, "worst_tokens")),
        "generation": report_beyond.generation(d.get("generation")),
        "exported": exported(d.get("exported")),
        "memory": _memory(d),
        "request_text": _json(_at(d, "provenance", "request")),
        "policy": Markup(policy().replace('"', "&quot;")),
        "script": Markup(script()),
        "versions": _versions(_at(d, "provenance", "versions") or {}),
        "confidence": units.share(confidence, 2),
        "basis": _at(d, "hardware", "basis") or "unlabelled",
    }


def _sections(stats: Json | None) -> list[tuple[str, str]]:
    """Return id and name of each section that is there."""
    without = set() if stats else {"statistics"}
    if not (stats or {}).get("attention"):
        without.add("attention")
    return [(i, name) for i, name in _SECTIONS if i not in without]


def _memory(d: Json) -> list[tuple[str, Any, float | None]]:
    """Return name, bytes and share of the device of each row of its memory."""
    whole = units.number(_at(d, "hardware", "memory_bytes"))
    rows = _at(d, "hardware", "per_device")
    found = []
    for key, value in (rows if isinstance(rows, Mapping) else {}).items():
        size = units.number(value)
        part = None if size is None or not whole else size / whole
        found.append((key.removesuffix("_bytes").replace("_", " "), value, part))
    return found


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False)


def _at(d: Any, *path: str) -> Any:
    for key in path:
        d = d.get(key) if isinstance(d, Mapping) else None
    return d


def _rows(d: Any, *path: str) -> list[Json]:
    rows = _at(d, *path)
    return [r for r in rows if isinstance(r, dict)] if isinstance(rows, list) else []


# Front -----------------------------------------------------------------------


def _front_rows(d: Json) -> list[Json]:
    """Return the front by latency, each point with what was measured of it."""
    measured = {s.get("front_id"): s for s in _rows(d, "validation", "stacks")}
    rows = [
        {
            **p,
            "measured": measured.get(p.get("id")) if p.get("id") else None,
            "chosen": p.get("id") is not None
            and p.get("id") == _at(d, "verdict", "chosen"),
            "meets_sla": _meets(p, _at(d, "verdict", "sla") or {}),
            "by_component": _by_component(p.get("stack") or {}),
        }
        for p in _rows(d, "front")
    ]
    return sorted(rows, key=lambda r: units.number(r.get("per_token_s")) or 0.0)


def _meets(point: Json, sla: Mapping[str, Any]) -> str:
    limits = {k: v for k in _LATENCIES if (v := units.number(sla.get(k))) is not None}
    if not limits:
        return "no SLA"
    takes = {k: units.number(point.get(k)) for k in limits}
    if None in takes.values():
        return units.MISSING
    return "yes" if all(t <= limits[k] for k, t in takes.items() if t) else "no"


def _chosen(front: Sequence[Json]) -> Json:
    return next((r for r in front if r["chosen"]), {})


def _by_component(stack: Mapping[str, str]) -> dict[str, str]:
    """Return {component: "20 × fp8_e4m3, 10 × bf16"}, in the order of the model."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for site, choice in stack.items():
        counts[site.rsplit(".", 1)[-1]][choice or units.MISSING] += 1
    return {c: tally(counts[c]) for c in in_order(counts)}


def _points(d: Json, front: Sequence[Json]) -> list[plot.Point]:
    rows = {r["id"]: r for r in front if r.get("measured")}
    drawn = [_point("predicted", r, r) for r in front]
    for stack in _rows(d, "validation", "stacks"):
        if stack.get("id") in _UNIFORM:  # even where the front has it, too
            drawn.append(_point("uniform", stack, {}))
        elif stack.get("front_id") in rows:
            drawn.append(_point("measured", stack, rows[stack["front_id"]]))
    return _ring_once([p for p in drawn if p])


def _ring_once(points: list[plot.Point]) -> list[plot.Point]:
    """Ring the chosen stack where it was measured, else where it was predicted."""
    last = max((i for i, p in enumerate(points) if p.chosen), default=None)
    return [
        p if i == last or not p.chosen else replace(p, chosen=False, label="")
        for i, p in enumerate(points)
    ]


def _point(kind: str, source: Json, row: Json) -> plot.Point | None:
    """Return what to draw of a front row or of a validated stack. None: no figures."""
    kl = source.get("kl_nats")
    interval = kl if isinstance(kl, dict) else {"value": kl}
    x, y = units.number(source.get("per_token_s")), units.number(interval.get("value"))
    if x is None or y is None:
        return None
    chosen = bool(row.get("chosen"))
    name = str(row.get("id") or source.get("label") or source.get("id") or "—")
    memory = row.get("memory_bytes") or source.get("memory_bytes")
    return plot.Point(
        kind=kind,
        per_token_s=x,
        kl_nats=y,
        memory_bytes=units.number(memory or source.get("bytes")),
        title=_title(name, kind, source, interval, row),
        label=f"chosen: {name}" if chosen else name if kind == "uniform" else "",
        chosen=chosen,
        low=units.number(interval.get("low")),
        high=units.number(interval.get("high")),
    )


def _title(name: str, kind: str, source: Json, interval: Json, row: Json) -> str:
    basis = "predicted" if kind == "predicted" else "measured"
    kl = f"KL {units.nats(interval.get('value'))} {basis}"
    if basis == "measured":
        kl += f" (interval {units.bounds(interval)})"
    lines = [f"{name}: {units.seconds(source.get('per_token_s'))} per token, {kl}"]
    if row:
        lines.append(
            f"{units.size(row.get('memory_bytes'))} memory, "
            f"{units.share(row.get('fp8_share'))} of the weights in FP8"
        )
    lines += [f"{c}: {text}" for c, text in (row.get("by_component") or {}).items()]
    return "\n".join(lines)


# Components ------------------------------------------------------------------


def _component_rows(d: Json) -> list[Json]:
    rows = _rows(d, "components")
    total = sum(max(units.number(r.get("kl_nats")) or 0.0, 0.0) for r in rows)
    return [
        {
            **r,
            "got": tally(r.get("choices") or {}),
            "kl_share": _part(units.number(r.get("kl_nats")), total),
        }
        for r in rows
    ]


def _part(value: float | None, total: float) -> float | None:
    if value is None or not 0 < total < math.inf:
        return None
    return max(value, 0.0) / total


def _versions(versions: Mapping[str, Any]) -> str | None:
    """{"torch": "2.13.0"} -> torch 2.13.0. None: none are recorded."""
    return ", ".join(f"{k} {v or units.MISSING}" for k, v in versions.items()) or None
