"""What a probe leaves: its report, the training stack, and configurations to train with."""

import json
from pathlib import Path
from typing import Any

from optimizer.seal import sealed
from workers.outputs import dated

Document = dict[str, Any]


def write(folder: Path, document: Document) -> None:
    """Write every file of a finished probe. Raises ValueError where it is not JSON."""
    from optimizer.training.exports import files
    from optimizer.training.layers_csv import render_csv
    from optimizer.training.report import render_html, render_markdown, render_pdf

    document = sealed(document)
    shown = dated(document)
    texts = {
        "report.json": json.dumps(document, allow_nan=False),
        "report.html": render_html(shown),
        "report.md": render_markdown(shown),
        "layers.csv": render_csv(document),
        **files(document),
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8", newline="")
    (folder / "report.pdf").write_bytes(render_pdf(shown))


def summarize(document: Document) -> Document:
    """Return what the job object shows of the report.

    `front` and `chosen`, which a job of serving has, are empty.
    """
    verdict = document["verdict"]
    return {
        "outcome": verdict["outcome"],
        "precision_stack": document["precision_stack"],
        "front": [],
        "chosen": {},
        "training": {
            "precision": verdict["chosen"],
            "sentence": verdict["sentence"],
            "held_out_loss": verdict["held_out_loss"],
            "candidates": [
                {"name": c["name"], "status": c["status"], "unusable": c["unusable"]}
                for c in document["candidates"]
            ],
            "loss_scaling": document["loss_scaling"],
        },
    }
