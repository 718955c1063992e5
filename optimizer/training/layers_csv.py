"""Every layer of every run of a probe as CSV (RFC 4180): figures as they are."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from optimizer.report_cells import at, dicts, listed
from optimizer.report_text import clean, no_formula

COLUMNS = (
    "candidate",
    "round",
    "layer",
    "gradient_norm",
    "gradient_norm_low",
    "gradient_norm_high",
    "gradient_norm_floor",
    "moved",
    "moved_floor",
    "drifts",
    "why",
    "matrix",
    "gemms",
    "said",
)


def render_csv(document: Mapping[str, Any]) -> str:
    """Return how far each layer is from fp32, as shares: 0.01 is 1 %.

    What is not finite is empty. A text that a spreadsheet would compute begins with an
    apostrophe.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for candidate in dicts(clean(document.get("candidates"))):
        writer.writerows(_rows(candidate))
    return out.getvalue()


def _rows(candidate: Mapping[str, Any]) -> Iterator[Sequence[object]]:
    for number, round_ in enumerate(dicts(candidate.get("rounds"))):
        for row in dicts(round_.get("drift")):
            why = row.get("why")
            norm, moved = row.get("gradient_norm"), row.get("moved")
            yield [
                _cell(value)
                for value in (
                    candidate.get("name"),
                    number,
                    row.get("layer"),
                    *(at(norm, name) for name in ("value", "low", "high", "floor")),
                    *(at(moved, name) for name in ("value", "floor")),
                    row.get("drifts"),
                    at(why, "code"),
                    at(why, "matrix"),
                    " ".join(map(str, listed(at(why, "gemms")))),
                    at(why, "said"),
                )
            ]


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return no_formula(value) if isinstance(value, str) else value
