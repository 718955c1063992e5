"""What a job leaves: the files that its owner may fetch, and what the job object shows.

The computing process writes the files; whatever lies in the folder is published.
"""

import json
from pathlib import Path
from typing import Any

Document = dict[str, Any]


def write(folder: Path, document: Document) -> None:
    """Write every file of a finished job. Raises ValueError where it is not JSON."""
    from optimizer.report import render_html

    texts = {
        "report.json": json.dumps(document, allow_nan=False),
        "report.html": render_html(document),
        "stack.json": json.dumps(stack(document), indent=1),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8")


def stack(document: Document) -> Document:
    """Return the answer alone, for machines: a choice for every site."""
    return {
        "schema": "precision.stack/1",
        "model": {k: document["model"][k] for k in ("name", "sha256")},
        "hardware": document["hardware"]["id"],
        "rounding": document["rounding"]["used"],
        "stack": {site["site"]: site["choice"] for site in document["sites"]},
        "padding": {s["site"]: s["padding"] for s in document["sites"] if s["padding"]},
    }


def summarize(document: Document) -> Document:
    """Return what the job object shows of the report: points without their stacks."""
    front = [{k: v for k, v in p.items() if k != "stack"} for p in document["front"]]
    validated = document["validation"]["stacks"]
    return {
        "outcome": document["verdict"]["outcome"],
        "precision_stack": document["precision_stack"],
        "layers": document["layers"],
        "front": front,
        "chosen": next(s for s in validated if s["id"] == "chosen"),
    }
