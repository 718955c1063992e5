"""The report as PDF, set by Typst: tagged for screen readers, and the same each time.

The document reaches the template as data: what somebody named is text there, and
never markup. Fonts are those that Typst brings; nothing is read but its own files.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from importlib import resources
from typing import Any

from optimizer.report import front_svg, view
from optimizer.report_blocks import Block
from optimizer.report_outline import outline

EPOCH = 0  # the PDF's own date: a file is to be the same when it is made again


def render_pdf(document: Mapping[str, Any]) -> bytes:
    """Return the report as a PDF file."""
    shown = view(dict(document))
    return typeset(outline(shown), front_svg(shown))


def typeset(blocks: Iterable[Block], plot: str | None = None) -> bytes:
    """Return blocks as a PDF file; `plot` is an SVG for the one block that shows it."""
    import typst  # tens of megabytes that only this needs

    given = {"blocks": [asdict(block) for block in blocks], "plot": plot}
    made: bytes = typst.compile(
        _template(),
        sys_inputs={"report": json.dumps(given)},
        ignore_system_fonts=True,
        timestamp=EPOCH,
    )
    return made


def _template() -> bytes:
    return resources.files("optimizer").joinpath("data", "report.typ").read_bytes()
