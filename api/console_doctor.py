"""What `precision doctor` shows."""

import textwrap
from typing import Any

from api.console import out

Json = dict[str, Any]


def diagnosis(found: Json) -> None:
    """Print every finding, the surest first, then what was read."""
    for finding in found["findings"]:
        _finding(finding)
    log = found["log"]
    columns = ", ".join(log["columns"].values())
    columns += ", layers" if log["layers"] else ""
    steps = f"steps {log['first_step']} to {log['last_step']}"
    _print(f"read: {log['records']} records, {steps}, with {columns}", 6)
    if log["missing"]:
        _print(f"not in it: {', '.join(log['missing'])}", 6)
    for note in log["notes"]:
        _print(f"note: {note}", 6)


def _finding(finding: Json) -> None:
    _print(f"{finding['verdict'].replace('_', ' ')} ({finding['sure']})")
    _print(f"  {finding['said']}", 2)
    for said in finding["evidence"]:
        _print(f"  - {said}", 4)
    _print(f"  first: {finding['first']}", 9)
    out.print()


def _print(text: str, indent: int = 0) -> None:
    """Print one paragraph; its further lines begin `indent` columns in."""
    folded = textwrap.fill(text, out.width, subsequent_indent=" " * indent)
    out.print(folded, soft_wrap=True)
