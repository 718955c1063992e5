"""A probe as a job: a spec goes in, the training report's document comes out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from optimizer.configs import shape_of
from optimizer.errors import ModelError
from optimizer.folder import read_json
from optimizer.hardware import LOCAL, Device, device
from optimizer.pieces import Memory, Pieces
from optimizer.spec import OptimizeSpec
from optimizer.stack import ModelShape
from optimizer.training import document
from optimizer.training.candidates import Arithmetic, Candidate, unusable
from optimizer.training.document import About
from optimizer.training.gemms import bare
from optimizer.training.place import executed_on
from optimizer.training.probe import probe
from optimizer.training.work import Heard, TrainingWork, unheard

Progress = Callable[[str, float, str], None]
"""(phase, fraction of it, detail), called at each step; raises Cancelled to stop."""

# Phases: load, calibrate (fp32 twice), sweep (candidates), validate (promotions), report.
MAX_CONFIG_BYTES = 1 << 20


@dataclass(slots=True)
class _Meter:
    """Tells progress where the probe is, at every step."""

    progress: Progress
    phase: str = "load"
    fraction: float = 0.0

    def enter(self, phase: str, fraction: float) -> None:
        if phase != self.phase:
            self.phase, self.fraction = phase, 0.0
        self.at(fraction)

    def steps(self, done: int, planned: int) -> None:
        self.at(done / max(planned, 1))

    def at(self, fraction: float) -> None:
        self.fraction = max(self.fraction, min(1.0, fraction))
        self.tick()

    def tick(self) -> None:
        self.progress(self.phase, self.fraction, "")


def train(
    spec: OptimizeSpec,
    progress: Progress,
    pieces: Pieces | None = None,
    heard: Heard = unheard,
) -> dict[str, Any]:
    """Probe a training, and return its report's document; `heard` is told of losses.

    Raises ModelError, DatasetError or SpecError before the first step where the request
    cannot be served, and whatever `progress` raises.
    """
    assert spec.training is not None
    meter = _Meter(progress)
    meter.tick()
    work = TrainingWork(spec, pieces or Memory(), meter.steps, meter.tick, heard)
    data = work.tokens  # before the model: a folder of weights may be large
    target = None if spec.hardware == LOCAL else device(spec.hardware)
    found = probe(
        spec.training,
        work,
        work.sizes(),
        unusable=lambda candidate: _unusable(candidate, target),
        seed=spec.seed,
        told=meter.enter,
    )
    meter.enter("report", 0.0)
    return document.build(
        found,
        About(
            spec=spec,
            shape=_shape(work),
            device=target,
            data={
                "distribution": data.dataset.name,
                "origin": data.dataset.origin,
                "licence": data.dataset.licence,
                "sha256": data.dataset.sha256,
                **work.described(),
            },
            sizes=work.sizes(),
            parameters=work.parameters(),
            bare=bare(work.network),
            warnings=_warnings(work),
        ),
    )


def _unusable(candidate: Candidate, target: Device | None) -> str | None:
    if target is not None:
        return unusable(candidate, target)
    here = executed_on()
    if candidate.arithmetic is Arithmetic.FP8 and here["emulated"]:
        return f"the worker's own device ({here['device']}) multiplies no FP8"
    return None


def _shape(work: TrainingWork) -> ModelShape | None:
    try:
        return shape_of(read_json(work.folder, "config.json", MAX_CONFIG_BYTES))
    except ModelError:
        return None  # trained all the same: only its memory is not counted


def _warnings(work: TrainingWork) -> list[str]:
    """Say what was short: of the data, warnings are of what a job of serving asks."""
    epochs = work.batches(0).epochs
    said = list(work.tokens.dataset.warnings)
    if epochs > 1:
        said.append(
            f"the data was gone through {epochs:.1f} times: what a longer run sees may "
            "differ"
        )
    return said
