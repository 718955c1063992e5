"""What the report shows of the stack beyond the mean: lengths, data, words.

Reads the document's `by_position`, `by_distribution`, `worst_tokens` and
`generation`; the results are plain values for the template.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from optimizer import units
from optimizer.report_sites import Json

_VISIBLE = str.maketrans({"\n": "↵\n", "\t": "⇥"})


def visible(text: object) -> str:
    """Return text whose ends of lines and tabs can be seen."""
    return "" if text is None else str(text).translate(_VISIBLE)


def with_parts(rows: Sequence[Json]) -> list[Json]:
    """Return rows with `part`: their KL in percent of the largest, for a bar."""
    known = [_kl(r) for r in rows]
    largest = max((k for k in known if k is not None), default=0.0)
    return [
        {**r, "part": round(100 * max(k or 0.0, 0.0) / largest, 1) if largest else 0.0}
        for r, k in zip(rows, known, strict=True)
    ]


def _kl(row: Mapping[str, Any]) -> float | None:
    kl = row.get("kl_nats")
    value = units.number(kl.get("value")) if isinstance(kl, Mapping) else None
    return value if value is not None and value < float("inf") else None


def worst(rows: Sequence[Json]) -> list[Json]:
    """Return the worst tokens, their texts made visible."""
    texts = ("before", "next", "reference", "stack")
    return [
        {
            **r,
            **{key: visible(r.get(key)) for key in texts},
            "same": r.get("reference") == r.get("stack"),
        }
        for r in rows
    ]


def generation(found: object) -> Json | None:
    """Return both texts of each prompt, cut where they part. None: none was written."""
    if not isinstance(found, Mapping):
        return None
    listed = found.get("continuations")
    rows = (
        [r for r in listed if isinstance(r, dict)] if isinstance(listed, list) else []
    )
    if not rows:
        return None
    sign, sentence = _verdict(found, len(rows))
    return {
        **found,
        "continuations": [_sides(r) for r in rows],
        "sign": sign,
        "sentence": sentence,
    }


def _sides(row: Json) -> Json:
    texts = [
        visible((row.get(who) or {}).get("text")) for who in ("reference", "stack")
    ]
    end = _shared(*texts)
    sides = {
        who: {**(row.get(who) or {}), "same": text[:end], "other": text[end:]}
        for who, text in zip(("reference", "stack"), texts, strict=True)
    }
    whole = texts[0] == texts[1]
    return {**row, **sides, "prompt": visible(row.get("prompt")), "whole": whole}


def _shared(a: str, b: str) -> int:
    """Return how many characters both begin with."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def _verdict(found: Mapping[str, Any], prompts: int) -> tuple[str, str]:
    """Return a sign and a sentence: does the stack loop where the reference does not?"""
    loops = found.get("loops") or {}
    plain, narrow = (units.number(loops.get(w)) for w in ("reference", "stack"))
    shares = found.get("repeated") or {}
    said = (
        f"{units.share(shares.get('stack'))} of the stack's runs repeat, "
        f"{units.share(shares.get('reference'))} of the reference's."
    )
    if plain is None or narrow is None:
        return "Not recorded.", said
    counts = (
        f"The stack ends in a loop on {units.count(narrow)} of {prompts} prompts, the "
        f"reference on {units.count(plain)}; {said}"
    )
    return ("✗ More loops." if narrow > plain else "✓ No more loops."), counts
