"""The layer table as CSV (RFC 4180): a line for each site, figures as they are."""

import csv
import io
from collections.abc import Mapping
from typing import Any

from optimizer import units
from optimizer.report_sites import Json, best_narrow, named
from optimizer.report_text import clean, no_formula

COLUMNS = (
    "site",
    "layer",
    "component",
    "choice",
    "kl_nats",
    "per_token_s",
    "first_token_s",
    "bytes",
    "basis",
    "sqnr_db",
    "saturated",
    "flushed",
    "collapsed",
    "best_narrow",
    "best_narrow_kl_nats",
    "reason",
)


def render_csv(document: Mapping[str, Any]) -> str:
    """Return the sites of a document; seconds, bytes and nats without their units.

    A text that a spreadsheet would compute begins with an apostrophe.
    """
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    listed = clean(document.get("sites"))
    rows = (
        [r for r in listed if isinstance(r, dict)] if isinstance(listed, list) else []
    )
    for site in named(rows):
        best = best_narrow(site)
        got = _got(site)
        line = {
            **got,
            **site,
            "best_narrow": best.get("choice"),
            "best_narrow_kl_nats": best.get("kl_nats"),
        }
        writer.writerow([_cell(line.get(column)) for column in COLUMNS])
    return out.getvalue()


def _got(site: Json) -> Json:
    """Return the figures of the choice that the site got."""
    mine = (a for a in site["alternatives"] if a["choice"] == site["choice"])
    return next(mine, {})


def _cell(value: object) -> str | float | int:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "" if units.number(value) is None else value
    return "" if value is None else no_formula(str(value))
