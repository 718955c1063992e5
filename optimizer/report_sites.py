"""What the report shows of the sites: heat map, reasons, sensitivities.

Sites are the document's, made whole by `named`; the results are plain values for the
template.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from optimizer import units
from optimizer.stack import Component

Json = dict[str, Any]

_VARIABLE = re.compile(r"layers\.\d+|(?<![\w.])[-−]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")
_HIGH = ("fp32", "tf32", "bf16", "fp16")
_LETTERS = {
    "fp32": "f",
    "bf16": "b",
    "fp16": "h",
    "fp8_e4m3": "8",
    "fp8_e4m3_token": "t",
    "fp8_e4m3_head": "p",
    "fp8_e4m3_block": "k",
    "fp8_e4m3_weight_only": "w",
    "fp8_e5m2": "5",
    "fp6_e3m2_mx": "6",
    "fp4_e2m1_mx": "4",
    "fp4_e2m1_nv": "n",
    "int8": "i",
    "int4_weight_only": "j",
}
# Half decades, nats: fixed, so that the colors of two reports can be compared.
HEAT_STEPS = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
_ORDER = {str(c): i for i, c in enumerate(Component)}


def named(sites: Iterable[Json]) -> list[Json]:
    """Return the sites with a name, a component, a choice and alternatives each."""
    return [_named(site) for site in sites]


def _named(site: Json) -> Json:
    name = str(site.get("site") or units.MISSING)
    known = {
        "site": name,
        "component": name.rsplit(".", 1)[-1],
        "choice": units.MISSING,
        "alternatives": [],
    }
    whole = known | {k: v for k, v in site.items() if v is not None}
    alternatives = [
        a for a in whole["alternatives"] if isinstance(a, dict) and a.get("choice")
    ]
    return {**whole, "alternatives": alternatives}


def tally(counts: Mapping[str, int]) -> str:
    """{"bf16": 10, "fp8_e4m3": 20} -> 20 × fp8_e4m3, 10 × bf16."""
    known = [(name, n) for name, n in counts.items() if units.number(n) is not None]
    ordered = sorted(known, key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{units.count(n)}\u00a0×\u00a0{name}" for name, n in ordered)


def in_order(components: Iterable[str]) -> list[str]:
    """Return the components in the order of the model, unknown ones last."""
    return sorted(components, key=lambda c: (_ORDER.get(c, len(_ORDER)), c))


def is_high(choice: str) -> bool:
    """Whether the choice keeps sixteen bits or more."""
    return choice.startswith(_HIGH)


def letter(choice: str) -> str:
    """Return the letter of a choice in the heat map: fp8_e4m3 -> 8."""
    return _LETTERS.get(choice) or (choice[:1].upper() or "?")


def _narrow_kl(site: Json) -> tuple[str, float | None]:
    """Return the FP8 choice that a site has, or else the best measured, and its KL."""
    if not is_high(site["choice"]):
        return site["choice"], units.number(site.get("kl_nats"))
    best = best_narrow(site)
    return best.get("choice", ""), units.number(best.get("kl_nats"))


def best_narrow(site: Json) -> Json:
    """Return the narrow alternative of the least KL, allowed ones first; {} if none."""
    narrow = [
        a
        for a in site["alternatives"]
        if not is_high(a["choice"]) and units.number(a.get("kl_nats")) is not None
    ]
    return min(narrow, key=lambda a: (bool(a.get("refused")), a["kl_nats"]), default={})


def heat(sites: Sequence[Json]) -> Json:
    """Return {components, layers: [(layer, cells)], whole: cells, legend}."""
    per_layer: dict[Any, dict[str, Json]] = defaultdict(dict)
    for site in sites:
        per_layer[site.get("layer")][site["component"]] = _cell(site)
    whole = per_layer.pop(None, {})
    components = in_order({c for cells in per_layer.values() for c in cells})
    used = sorted({s["choice"] for s in sites}, key=lambda c: (is_high(c), c))
    return {
        "components": components,
        "layers": sorted(per_layer.items(), key=lambda item: item[0]),
        "whole": [(c, whole[c]) for c in in_order(whole)],
        "legend": [(letter(c), c) for c in used],
    }


def _cell(site: Json) -> Json:
    choice, kl = _narrow_kl(site)
    color = None if kl is None else sum(kl >= step for step in HEAT_STEPS)
    text = (
        "" if kl is None else "<0.01" if kl < 1e-5 else units.significant(kl * 1e3, 2)
    )
    title = f"{site.get('site')}: {site['choice']}"
    if kl is not None:
        title += f"; {choice} costs {units.nats(kl)}"
    return {
        "choice": site["choice"],
        "narrow": not is_high(site["choice"]),
        "heat": color,
        "text": text,
        "title": title,
    }


def reasons(sites: Sequence[Json]) -> list[Json]:
    """Group the sites that stayed high; reasons that differ in numbers are one."""
    groups: dict[str, list[Json]] = defaultdict(list)
    for site in sites:
        if site.get("reason") or is_high(site["choice"]):
            reason = str(site.get("reason") or "No reason was recorded.")
            best = best_narrow(site)
            row = {
                **site,
                "reason": reason,
                "best": best,
                "saves_s": _saves(site, best),
            }
            groups[_VARIABLE.sub("…", reason)].append(row)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return [_reason_group(pattern, rows) for pattern, rows in ordered]


def _reason_group(pattern: str, rows: Sequence[Json]) -> Json:
    reasons = {r["reason"] for r in rows}
    counts = Counter(str(r["component"]) for r in rows)
    return {
        "reason": reasons.pop() if len(reasons) == 1 else pattern,
        "varies": len(reasons) > 0,
        "has_narrow": any(r["best"] for r in rows),
        "sites": rows,
        "counts": [(c, counts[c]) for c in in_order(counts)],
    }


def _saves(site: Json, best: Json) -> float | None:
    here, there = (units.number(s.get("per_token_s")) for s in (site, best))
    return None if here is None or there is None else here - there


def sensitivities(sites: Sequence[Json]) -> list[Json]:
    """Return a summary and the table (site × choice) of each component."""
    by_component: dict[str, list[Json]] = defaultdict(list)
    for site in sites:
        by_component[site["component"]].append(site)
    return [_sensitivity(c, by_component[c]) for c in in_order(by_component)]


def _sensitivity(component: str, sites: Sequence[Json]) -> Json:
    tested = [(s, _tested(s)) for s in sites]
    names = list(dict.fromkeys(name for _, choices in tested for name in choices))
    return {
        "component": component,
        "choices": [_summary(name, tested) for name in names],
        "names": names,
        "sites": tested,
    }


def _tested(site: Json) -> dict[str, Json]:
    """Return the choices of a site by name, the one it got among them."""
    choices = {a["choice"]: a for a in site["alternatives"]}
    if site["choice"] not in choices and site["choice"] != units.MISSING:
        choices[site["choice"]] = {"kl_nats": site.get("kl_nats")}
    return choices


def _summary(name: str, tested: Sequence[tuple[Json, dict[str, Json]]]) -> Json:
    """Return how one choice does over the sites of a component."""
    rows = [(s, c[name]) for s, c in tested if name in c]
    kls = [(k, s) for s, a in rows if (k := units.number(a.get("kl_nats"))) is not None]
    worst: tuple[float | None, Json] = max(
        kls, key=lambda pair: pair[0], default=(None, {})
    )
    refusals = Counter(str(a["refused"]) for _, a in rows if a.get("refused"))
    return {
        "choice": name,
        "got": sum(s["choice"] == name for s, _ in rows),
        "median": median(k for k, _ in kls) if kls else None,
        "worst": worst[0],
        "worst_site": worst[1].get("site"),
        "sqnr_db": _extreme(min, rows, "sqnr_db"),
        "saturated": _extreme(max, rows, "saturated"),
        "flushed": _extreme(max, rows, "flushed"),
        "refused": [(reason, n) for reason, n in sorted(refusals.items())],
    }


def _extreme(pick: Any, rows: Sequence[tuple[Json, Json]], field: str) -> float | None:
    values = [v for _, a in rows if (v := units.number(a.get(field))) is not None]
    extreme: float | None = pick(values, default=None)
    return extreme
