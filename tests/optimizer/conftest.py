"""A model of two layers, and one run for each device, whichever test asks first."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from optimizer.spec import OptimizeSpec, Workload
from tests.service import tiny_model

Document = dict[str, Any]


def quiet(phase: str, fraction: float, detail: str) -> None:
    """Progress that nobody reads."""


@pytest.fixture(scope="session")
def spec(tmp_path_factory: pytest.TempPathFactory) -> OptimizeSpec:
    folder = tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    return spec_of(folder)


def spec_of(folder: Path) -> OptimizeSpec:
    return OptimizeSpec(
        model="tiny",
        model_path=str(folder),
        model_sha256="0" * 64,
        hardware="h100",
        workload=Workload(batch_size=4, prompt_tokens=512, output_tokens=128),
        calibration_tokens=128,
        validation_tokens=128,
        sequence_tokens=64,
    )


@pytest.fixture(scope="session")
def document_of(spec: OptimizeSpec) -> Callable[[str], Document]:
    """One run for each device, whichever test asks first."""
    from optimizer.run import optimize  # torch: seconds that most tests can do without

    return cache(lambda hardware: optimize(replace(spec, hardware=hardware), quiet))


def chosen(document: Document) -> Document:
    """The chosen stack as it was validated."""
    return next(s for s in document["validation"]["stacks"] if s["id"] == "chosen")
