"""The training report: a page without script, network or torch; Markdown and PDF.

Same document, same bytes. Any field may be missing and is then shown as "—".
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from jinja2 import Template

from optimizer import report_markdown, report_pdf, report_template
from optimizer.report_text import clean
from optimizer.training import curves
from optimizer.training.outline import outline

Json = dict[str, Any]
DRIFT_STEPS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
ZERO_STEPS = (0.001, 0.003, 0.01, 0.05, 0.1, 0.3, 0.6)
COLORS = 8  # curves beyond them begin again
GRADIENTS = ("gradient", "weight_gradient")
OUTCOMES = {
    "recommended": ("✓", "Train in", "sla_met"),
    "recommended_with_promotions": ("✓", "Train in, with promotions:", "sla_met"),
    "no_improvement": ("=", "Nothing narrower than", ""),
    "unstable": ("✗", "fp32 itself does not train", "sla_not_met"),
}


def render_html(document: Mapping[str, Any]) -> str:
    """Return the page of a "precision.training_report/1" document."""
    return _template().render(view(document))


def render_markdown(document: Mapping[str, Any]) -> str:
    """Return the report for tickets and reviews."""
    return report_markdown.written(outline(view(document)))


def render_pdf(document: Mapping[str, Any]) -> bytes:
    """Return the report for paper."""
    return report_pdf.typeset(outline(view(document)))


@cache
def _template() -> Template:
    environment = report_template.environment()
    environment.globals.update(geometry=curves)
    return environment.get_template("training_report.html.j2")


def view(document: Mapping[str, Any]) -> Json:
    """Return everything the template reads."""
    d = clean(document)
    tried = [c for c in _rows(d, "candidates") if c.get("rounds")]
    verdict = d.get("verdict") or {}
    chosen = verdict.get("chosen")
    return {
        "d": d,
        "outcome": OUTCOMES.get(str(verdict.get("outcome")), ("?", "", "")),
        "tried": tried,
        "named": chosen,
        "chosen": next((c for c in tried if c.get("name") == chosen), None),
        "colors": {c["name"]: n % COLORS for n, c in enumerate(tried)},
        "curves": curves.curves(_runs(d, tried)),
        "drift": heat(_drift(tried), DRIFT_STEPS),
        "reasons": _reasons(tried),
        "updates": _updates(d),
        "zeros": heat(_zeros(d, tried), ZERO_STEPS),
        "strips": [
            found
            for role in ("gradient", "weight_gradient", "input")
            if (found := curves.strips(_histograms(d), role))
        ],
        "rows": _stack_rows(d),
        "drift_steps": DRIFT_STEPS,
        "zero_steps": ZERO_STEPS,
    }


def _natural(layer: str) -> list[tuple[int, str]]:
    """Return a key that puts layer 2 before layer 10."""
    return [(int(p), "") if p.isdigit() else (-1, p) for p in layer.split(".")]


def _histograms(d: Mapping[str, Any]) -> list[Json]:
    rows = _rows(d, "histograms")
    return sorted(rows, key=lambda row: _natural(str(row.get("layer"))))


def _rows(d: Mapping[str, Any], name: str) -> list[Json]:
    rows = d.get(name)
    return [r for r in rows if isinstance(r, dict)] if isinstance(rows, list) else []


def _runs(d: Json, tried: Sequence[Json]) -> list[tuple[str, str, list[float | None]]]:
    """Return the runs to draw: fp32, fp32 in another order, then the candidates."""
    base = d.get("baseline") or {}
    first = [
        ("fp32", "base", base.get("losses") or []),
        ("fp32, other order", "again", base.get("again") or []),
    ]
    others = [
        (c["name"], str(n % COLORS), c.get("losses") or []) for n, c in enumerate(tried)
    ]
    return [*first, *others]


# -- heat maps ----------------------------------------------------------------------


def heat(
    values: Mapping[str, Mapping[str, float | None]], steps: Sequence[float]
) -> Json:
    """Return a table of layers × candidates: {"columns", "rows"}.

    A cell is (class, text, title): the class counts the steps that its value reaches.
    """
    columns = list(dict.fromkeys(name for cells in values.values() for name in cells))
    rows = [
        (layer, [_cell(cells.get(name, 0.0), steps, name) for name in columns])
        for layer, cells in sorted(values.items(), key=lambda row: _natural(row[0]))
    ]
    return {"columns": columns, "rows": rows}


def _cell(
    value: float | None, steps: Sequence[float], name: str
) -> tuple[str, str, str]:
    if value is None:
        return f"h{len(steps)}", "not finite", f"{name}: not finite"
    step = sum(abs(value) >= limit for limit in steps)
    percent = f"{100 * value:.2g} %"
    return f"h{step}", percent if step else "", f"{name}: {percent}"


def _drift(tried: Sequence[Json]) -> dict[str, dict[str, float | None]]:
    """Return the gradient norm's deviation by layer and candidate, as first run."""
    found: dict[str, dict[str, float | None]] = {}
    for candidate in tried:
        for row in candidate["rounds"][0].get("drift") or []:
            found.setdefault(row["layer"], {})[candidate["name"]] = _worst(row)
    return found


def _reasons(tried: Sequence[Json]) -> list[tuple[str, Json]]:
    """Return the layers that drift in first runs, each with its candidate and why."""
    return [
        (candidate["name"], row)
        for candidate in tried
        for row in candidate["rounds"][0].get("drift") or []
        if row.get("why")
    ]


def _updates(d: Mapping[str, Any]) -> list[tuple[str, Json]]:
    """Return what fp32's steps do to each layer."""
    found = (d.get("baseline") or {}).get("updates") or {}
    return sorted(found.items(), key=lambda row: _natural(str(row[0])))


def _worst(row: Json) -> float | None:
    values = [row["gradient_norm"]["value"], row["moved"]["value"]]
    known = [value for value in values if value is not None]
    return None if len(known) < len(values) else max(known, key=abs)


def _zeros(d: Json, tried: Sequence[Json]) -> dict[str, dict[str, float | None]]:
    """Return the largest zero rate of a gradient by layer, above that in fp32."""
    base = _zero_rates(_rows(d.get("baseline") or {}, "gemms"))
    found: dict[str, dict[str, float | None]] = {}
    for candidate in tried:
        for key, rate in _zero_rates(_rows(candidate, "gemms")).items():
            more = max(rate - base.get(key, 0.0), 0.0)
            cells = found.setdefault(key[0], {})
            cells[candidate["name"]] = max(cells.get(candidate["name"]) or 0.0, more)
    return found


def _zero_rates(rows: Sequence[Json]) -> dict[tuple[str, str, str], float]:
    """Return zero rates as the products read gradients: (layer, matrix, role) -> share."""
    found: dict[tuple[str, str, str], float] = {}
    for row in rows:
        tensors = dict(row.get("operands") or {})
        if row.get("gemm") == "wgrad" and row.get("result"):
            tensors["weight_gradient"] = row["result"]
        for role, tensor in tensors.items():
            if role in GRADIENTS:
                key = (row["layer"], row["matrix"], role)
                found[key] = max(found.get(key, 0.0), tensor.get("zero_rate") or 0.0)
    return found


# -- the stack ----------------------------------------------------------------------


def _stack_rows(d: Json) -> list[Json]:
    """Return the stack with equal neighbors in one row: {"matrices", …}.

    Layers that run alike are folded by their matrix's name inside the layer.
    """
    folded: dict[tuple[str, ...], Json] = {}
    for row in _rows(d, "stack"):
        inside = str(row.get("matrix", "")).removeprefix(f"{row.get('layer')}.")
        runs = tuple(str(row.get(g)) for g in ("fprop", "dgrad", "wgrad"))
        key = (inside, *runs, str(row.get("reason")))
        kept = folded.setdefault(key, {**row, "inside": inside, "layers": []})
        kept["layers"].append(row.get("layer"))
    return list(folded.values())
