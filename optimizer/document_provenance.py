"""Where a report is from: code, versions, seed, and the command that repeats it."""

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from typing import TYPE_CHECKING, Any

from optimizer.spec import OptimizeSpec

if TYPE_CHECKING:
    from optimizer.document import Run

PACKAGES = ("precision", "torch", "transformers", "tokenizers", "numpy", "scipy")
REPRODUCE = "precision reproduce report.json"


def provenance(run: "Run") -> dict[str, Any]:
    """Return the document's section. Model and data have their sha256 in their own."""
    return {
        "versions": versions(),
        "code_sha256": code_sha256(),
        "seed": run.spec.seed,
        "request": request(run.spec),
        "reproduce": REPRODUCE,
    }


def versions() -> dict[str, str]:
    """Return the versions of what computes."""
    return {p: _version(p) for p in PACKAGES}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


@cache
def code_sha256() -> str:
    """Return a digest of the numerics' own files, data included, names and contents.

    A version says which release it was; this tells two builds of one apart.
    """
    digest = hashlib.sha256()
    for name, file in sorted(_files(resources.files("optimizer"), ""), key=_name):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def _name(item: tuple[str, Traversable]) -> str:
    return item[0]


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, Traversable]]:
    for entry in folder.iterdir():
        if entry.is_file():
            yield f"{prefix}{entry.name}", entry
        elif entry.name != "__pycache__":
            yield from _files(entry, f"{prefix}{entry.name}/")


def request(spec: OptimizeSpec) -> dict[str, Any]:
    """Return a body of `POST /v1/optimize` that asks for the same, defaults spelt out."""
    asked = {k: v for k, v in spec.latency_sla.asked.items() if v is not None}
    workload = spec.workload
    body: dict[str, Any] = {
        "model": spec.model,
        "hardware": spec.hardware,
        "latency_sla": {**asked, "percentile": spec.latency_sla.percentile},
        "workload": {
            "batch_size": workload.batch_size,
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "tensor_parallel": workload.tensor_parallel,
        },
        "task": spec.task,
        "data_distribution": {
            "name": spec.data_distribution,
            "calibration_tokens": spec.calibration_tokens,
            "validation_tokens": spec.validation_tokens,
            "sequence_tokens": spec.sequence_tokens,
            "seed": spec.seed,
        },
        "search": {
            "formats": list(spec.formats),
            "engine": spec.engine,
            "rounding": spec.rounding,
        },
        "max_memory_bytes": spec.max_memory_bytes,
    }
    without = {"latency_sla"} if not asked else set()
    if spec.max_memory_bytes is None:
        without.add("max_memory_bytes")
    return {k: v for k, v in body.items() if k not in without}
