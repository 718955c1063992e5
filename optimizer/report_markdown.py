"""The report as Markdown, for tickets and reviews: tables as GitHub shows them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from optimizer.report import view
from optimizer.report_blocks import Block, Code, Facts, Heading, Items, Table, Text
from optimizer.report_outline import outline
from optimizer.report_text import fenced, markdown


def render_markdown(document: Mapping[str, Any]) -> str:
    """Return the report; whatever others named shows as text, and never as markup."""
    return written(outline(view(dict(document))))


def written(blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown."""
    parts = [_written(block) for block in blocks]
    return "\n\n".join(part for part in parts if part) + "\n"


def _written(block: Block) -> str:
    match block:
        case Heading(text, level):
            return f"{'#' * level} {markdown(text)}"
        case Text(text, style):
            shown = markdown(text)
            return f"**{shown}**" if style == "lead" else shown
        case Facts(rows):
            return _table(("", ""), [(name, value) for name, value in rows])
        case Items(rows):
            return "\n".join(f"- {markdown(row)}" for row in rows)
        case Code(text):
            return fenced(text)
        case Table(columns, rows, figures, chosen):
            return _table(columns, rows, figures, chosen)
    return ""  # a plot: the table beside it has its figures


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    figures: Sequence[int] = (),
    chosen: Sequence[int] = (),
) -> str:
    rules = ["---:" if n in figures else "---" for n in range(len(columns))]
    lines = [_line([markdown(c) for c in columns]), _line(rules)]
    for number, row in enumerate(rows):
        cells = [markdown(cell) for cell in row]
        if number in chosen:
            cells[0] = f"**{cells[0]}**"
        lines.append(_line(cells))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
