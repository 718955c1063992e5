"""What a job leaves: the files that its owner may fetch, and what the job object shows.

The computing process writes the files; whatever lies in the folder is published.
"""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from optimizer import document_provenance, stack_file
from optimizer.seal import sealed
from optimizer.spec import OptimizeSpec
from workers import device

Document = dict[str, Any]
REPORT = "report.json"  # its worker signs it
KINDS = {
    REPORT: "report",
    "report.html": "report",
    "report.md": "report",
    "report.pdf": "report",
    "layers.csv": "report",
    "stack.json": "stack",
    "checkpoint": "checkpoint",
    "transformer_engine_plan.py": "module_plan",
    "torchao.json": "configuration",
    # of a training
    "training_stack.json": "stack",
    "training_arguments.json": "configuration",
    "deepspeed.json": "configuration",
    "fsdp.json": "configuration",
    "transformer_engine.yaml": "configuration",
    "transformer_engine_recipe.json": "configuration",
    "torchao_float8.py": "configuration",
}


def write(folder: Path, document: Document) -> None:
    """Write every file of a finished job. Raises ValueError where it is not JSON."""
    from optimizer.report import render_html
    from optimizer.report_csv import render_csv
    from optimizer.report_markdown import render_markdown
    from optimizer.report_pdf import render_pdf

    document = sealed(document)
    shown = dated(document)
    texts = {
        REPORT: json.dumps(document, allow_nan=False),
        "report.html": render_html(shown),
        "report.md": render_markdown(shown),
        "layers.csv": render_csv(document),
        "stack.json": json.dumps(stack_file.of_document(document).to_json(), indent=1),
    }
    for name, text in texts.items():
        (folder / name).write_text(text, "utf-8", newline="")
    (folder / "report.pdf").write_bytes(render_pdf(shown))


def dated(document: Document) -> Document:
    """Return what is shown of a document: with the time, which the JSON's digest has not.

    The signature has it there.
    """
    return {**document, "made_at": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"}


def kind_of(name: str) -> str:
    """Return what an artifact is: a report, a part of a checkpoint, …"""
    return KINDS.get(name.partition("/")[0], "file")


def summarize(document: Document) -> Document:
    """Return what the job object shows of the report: points without their stacks."""
    front = [{k: v for k, v in p.items() if k != "stack"} for p in document["front"]]
    validated = document["validation"]["stacks"]
    return {
        "outcome": document["verdict"]["outcome"],
        "precision_stack": document["precision_stack"],
        "layers": document["layers"],
        "front": front,
        "basis": document["hardware"]["basis"],  # of seconds: measured, modelled
        "chosen": next(s for s in validated if s["id"] == "chosen"),
    }


def provenance(spec: OptimizeSpec) -> Document:
    """Return what the job object says of what computed it.

    The worker reads it itself: what computes may be a hostile model's by then.
    """
    made = {"versions": document_provenance.versions(), "seed": spec.seed}
    code = {"code_sha256": document_provenance.code_sha256()}
    return {**made, **code, **device.identity()}
