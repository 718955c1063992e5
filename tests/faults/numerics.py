"""What stands in the place of the numerics where a fault is about the queue alone.

It has the phases, the pieces and the report of the real one, and takes no torch: the
seed of a job says how many tenths of a second it takes, or that it is poison.
"""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from optimizer.pieces import Piece, Pieces, Result, key_of
from optimizer.spec import OptimizeSpec
from tests.optimizer.example_document import example_document

PHASES = ("load", "calibrate", "sweep", "search", "validate", "export", "report")
STEPS = 4  # of a phase
PIECES = 3
ENDS, IS_KILLED = 10_001, 10_002  # seeds: the process ends, the kernel ends it

Told = Callable[..., None]


def optimize(spec: OptimizeSpec, progress: Told, pieces: Pieces, *_: object) -> Any:
    """Take the time that the seed says, and return a report of the usual form."""
    for phase in PHASES:
        if phase == "sweep":
            _take_poison(spec.seed)
            pieces.run(list(_pieces(spec)), compute, lambda done, of: None)
        for step in range(STEPS):
            progress(phase, step / STEPS, "")
            time.sleep(_tenths(spec.seed) / 10 / STEPS / len(PHASES))
    return example_document(layers=2)


def _tenths(seed: int) -> int:
    return 0 if seed in (ENDS, IS_KILLED) else seed


def _take_poison(seed: int) -> None:
    if seed == ENDS:
        os._exit(3)
    if seed == IS_KILLED:
        os.kill(os.getpid(), signal.SIGKILL)


def _pieces(spec: OptimizeSpec) -> Iterator[Piece]:
    for number in range(PIECES):
        payload = {"number": number, "seed": spec.seed}
        yield Piece("sweep", key_of("sweep", payload), payload)


def compute(piece: Piece) -> Result:
    """Compute a piece, which is not much."""
    return {"third": piece.payload["number"] / 3}


class Work:
    """As `optimizer.work.Work`: what helpers load."""

    def __init__(self, spec: OptimizeSpec, pieces: Pieces) -> None:
        self.model: object = None

    def opened(self) -> None:
        """Load a model that is there already."""
        self.model = self

    def compute(self, piece: Piece) -> Result:
        """Compute a piece."""
        return compute(piece)


def fill(module: ModuleType) -> None:
    """Make a module what the computing process imports it for."""
    if module.__name__ == "torch":
        module.set_num_threads = lambda count: None  # type: ignore[attr-defined]
    if module.__name__ == "optimizer.run":
        module.optimize = optimize  # type: ignore[attr-defined]
    if module.__name__ == "optimizer.work":
        module.Work = Work  # type: ignore[attr-defined]


STAND_INS = ("torch", "optimizer.run", "optimizer.work")


def stand_in() -> None:
    """Take the place of the numerics in this process from now on."""
    for name in STAND_INS:
        module = ModuleType(name)
        fill(module)
        sys.modules[name] = module
