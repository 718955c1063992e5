"""What the report shows of the tensors: who sets a scale, and what a format does there.

Reads the document's `statistics` and what its sites carry of them; the results are
plain values for the template.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any

from optimizer import units
from optimizer.report_sites import Json, in_order

# Times the median over the positions, and shares: fixed, so that reports compare.
POSITION_STEPS = (1.25, 1.5, 2.0, 4.0, 8.0, 30.0, 100.0)
COLLAPSE_STEPS = (0.1, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9)
NAMED = 4  # tokens and channels of one place
_KIND = re.compile(r"^(precision-limited|range-limited|even)\b")
_KINDS = ("precision-limited", "range-limited", "even")


def statistics(document: Json, sites: Sequence[Json]) -> Json | None:
    """Return what the section shows. None: the document has no statistics.

    `sites` are those of `report_sites.named`.
    """
    found = document.get("statistics")
    if not isinstance(found, Mapping):
        return None
    places = [p for p in _list(found.get("places")) if p.get("site")]
    named = sorted(filter(None, map(_outliers, places)), key=lambda p: -p["times"])
    first = _first_of_kind(named)
    layers = _list(found.get("attention"))
    return {
        "sequence_tokens": found.get("sequence_tokens"),
        "outliers": first,
        "more_outliers": [p for p in named if p not in first],
        "quiet": len(places) - len(named),
        "positions": positions(places),
        "attention": attention(layers),
        "attention_layers": layers,
        "collapse": collapse(sites),
        "ranges": ranges(sites),
        "scales": [s for s in sites if s.get("scales")],
    }


def _list(rows: object) -> list[Json]:
    return (
        [r for r in rows if isinstance(r, dict)]
        if isinstance(rows, list | tuple)
        else []
    )


# Outliers --------------------------------------------------------------------


def _outliers(place: Json) -> Json | None:
    """Return a place with the names of its sinks and channels. None: it has none."""
    tokens, channels = _list(place.get("tokens")), _list(place.get("channels"))
    if not tokens and not channels:
        return None
    times = [units.number(x.get("times_median")) or 0.0 for x in [*tokens, *channels]]
    return {
        **place,
        "times": max(times),
        "token_names": [_token(t) for t in tokens[:NAMED]],
        "channel_names": [_channel(c) for c in channels[:NAMED]],
    }


def _first_of_kind(places: Sequence[Json]) -> list[Json]:
    """Return the place of each component and role that stands out most."""
    first: dict[tuple[Any, Any], Json] = {}
    for place in places:
        first.setdefault((place.get("component"), place.get("role")), place)
    return list(first.values())


def _token(token: Json) -> Json:
    text = token.get("text")
    return {
        "name": "" if text is None else repr(str(text)),
        "where": f"position {token.get('position')}",
        "times": token.get("times_median"),
    }


def _channel(channel: Json) -> Json:
    head = channel.get("head")
    name = str(channel.get("channel"))
    return {
        "name": name if head is None else f"{name} of head {head}",
        "times": channel.get("times_median"),
    }


# Positions -------------------------------------------------------------------


def bucket_name(bucket: int) -> str:
    """Return the positions of a bucket: 0 -> 0, 1 -> 1, 2 -> 2–3, 3 -> 4–7."""
    if bucket < 2:
        return str(bucket)
    return f"{units.count(1 << (bucket - 1))}–{units.count((1 << bucket) - 1)}"


def positions(places: Sequence[Json]) -> Json:
    """Return a heat map: places by kind × positions, the layer that stands out most.

    A cell is the amax of the positions over the median of the place's positions.
    """
    kinds: dict[tuple[str, str], list[Json]] = defaultdict(list)
    for place in places:
        kinds[str(place.get("component")), str(place.get("role"))].append(place)
    width = max((len(p.get("positions") or ()) for p in places), default=0)
    order = in_order({component for component, _ in kinds})
    rows = [
        {"component": c, "role": r, "cells": _cells(kinds[c, r], width)}
        for c in order
        for r in sorted(role for component, role in kinds if component == c)
    ]
    return {"columns": [bucket_name(b) for b in range(width)], "rows": rows}


def _cells(places: Sequence[Json], width: int) -> list[Json]:
    ratios = [(p, _ratios(p)) for p in places]
    cells: list[Json] = []
    for bucket in range(width):
        some = [
            (r[bucket], p)
            for p, r in ratios
            if bucket < len(r) and r[bucket] is not None
        ]
        if not some:
            cells.append({"heat": None, "text": "", "title": "no such position"})
            continue
        times, place = max(some, key=lambda pair: pair[0] or 0.0)
        amax = (place.get("positions") or [])[bucket]
        cells.append(
            {
                "heat": heat(times, POSITION_STEPS),
                "text": units.significant(times, 2),
                "title": f"{place['site']}: amax {units.significant(amax)}",
            }
        )
    return cells


def _ratios(place: Json) -> list[float | None]:
    amaxes = [units.number(a) for a in place.get("positions") or ()]
    known = [a for a in amaxes if a is not None]
    usual = median(known) if known else 0.0
    return [a / usual if a is not None and usual else None for a in amaxes]


def heat(value: float | None, steps: Sequence[float]) -> int | None:
    """Return the color of a value, 0 to 7; None: there is no value."""
    return None if value is None else sum(value >= step for step in steps)


# Attention -------------------------------------------------------------------


def attention(layers: Sequence[Json]) -> list[Json]:
    """Return the top weight before and after, over all layers: the stack, each choice.

    {name, component, before, after, worst: (layer, before, after)}: the layer whose
    weight moved most.
    """
    rows = [
        _moved(
            "the chosen stack", "", [(r, units.number(r.get("after"))) for r in layers]
        )
    ]
    for component, choice in _tried(layers):
        after = [
            (r, units.number(_at(r, "choices", component).get(choice))) for r in layers
        ]
        rows.append(_moved(choice, component, after))
    return [r for r in rows if r]


def _tried(layers: Sequence[Json]) -> list[tuple[str, str]]:
    found = {
        (component, choice): None
        for r in layers
        for component, some in (r.get("choices") or {}).items()
        for choice in some
    }
    components = in_order({component for component, _ in found})
    return [(c, name) for c in components for of, name in found if of == c]


def _at(row: Json, *path: str) -> Json:
    for key in path:
        row = row.get(key) or {}
    return row


def _moved(
    name: str, component: str, after: Iterable[tuple[Json, float | None]]
) -> Json:
    pairs = [
        (r.get("layer"), before, a)
        for r, a in after
        if a is not None and (before := units.number(r.get("before"))) is not None
    ]
    if not pairs:
        return {}
    layer, before, then = max(pairs, key=lambda p: abs(p[2] - p[1]))
    return {
        "name": name,
        "component": component,
        "before": mean(p[1] for p in pairs),
        "after": mean(p[2] for p in pairs),
        "worst": {"layer": layer, "before": before, "after": then},
    }


# Collapse --------------------------------------------------------------------


def collapse(sites: Sequence[Json]) -> Json:
    """Return a heat map: components × choices, the median site's collapsed share."""
    found: dict[str, dict[str, list[tuple[float, float | None]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    names: dict[str, None] = {}
    for site in sites:
        for a in site["alternatives"]:
            share = units.number(a.get("collapsed"))
            if share is not None:
                names[a["choice"]] = None
                pair = (share, units.number(a.get("collapsed_pairs")))
                found[site["component"]][a["choice"]].append(pair)
    return {
        "choices": list(names),
        "rows": [(c, _collapse_cells(found[c], names)) for c in in_order(found)],
    }


def _collapse_cells(
    shares: Mapping[str, Sequence[tuple[float, float | None]]], names: Iterable[str]
) -> list[Json]:
    cells: list[Json] = []
    for name in names:
        some = shares.get(name)
        if not some:
            cells.append({"heat": None, "text": "", "title": ""})
            continue
        share = median(s for s, _ in some)
        pairs = [p for _, p in some if p is not None]
        title = f"{len(some)} sites, {units.share(min(some)[0])} to "
        title += units.share(max(some)[0])
        if pairs:
            title += (
                f"; two different inputs share a value: {units.share(median(pairs))}"
            )
        text = units.share(share, 2)
        cells.append(
            {"heat": heat(share, COLLAPSE_STEPS), "text": text, "title": title}
        )
    return cells


# Range -----------------------------------------------------------------------


def ranges(sites: Sequence[Json]) -> list[Json]:
    """Group the sites by what limits them: {kind, sites, counts by component}."""
    groups: dict[str, list[Json]] = defaultdict(list)
    for site in sites:
        match = _KIND.match(str(site.get("range") or ""))
        if match:
            groups[match[1]].append(site)
    return [_range_group(kind, groups[kind]) for kind in _KINDS if kind in groups]


def _range_group(kind: str, sites: Sequence[Json]) -> Json:
    counts = Counter(str(s["component"]) for s in sites)
    return {
        "kind": kind,
        "sites": sites,
        "counts": [(c, counts[c]) for c in in_order(counts)],
    }
