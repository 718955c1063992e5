"""Parts of a job that can be computed alone, anywhere, again: equal keys, equal bytes.

    calibrate ──▶ sweep ──▶ validate        each is a list of pieces

A piece says what to compute; its key is a digest of everything that decides the
result. So a result may be read where it was computed before, for this job or for
another one, and pieces may be computed by many workers in any order.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

Result = dict[str, Any]
"""JSON: string keys, lists, finite numbers. Floats survive JSON exactly."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a job that can be computed alone, anywhere, again."""

    kind: str  # "calibrate" | "sweep" | "validate"
    key: str  # of `key_of`: everything that decides the result, and the numerics' version
    payload: dict[str, Any]  # JSON: what a worker needs that has only the job's spec


Compute = Callable[[Piece], Result]
Told = Callable[[int, int], None]
"""(results there, of how many), called often; raises Cancelled to stop."""


class Pieces(Protocol):
    """Where results are kept, and who computes those that are missing."""

    def run(
        self, pieces: Sequence[Piece], compute: Compute, progress: Told
    ) -> list[Result]:
        """Return every piece's result in the order given.

        Kept ones are read; the others are computed, here or by other workers, and
        kept. Raises what `compute` and `progress` raise.
        """
        ...


@dataclass(frozen=True, slots=True)
class Memory:
    """Keeps results in this process; computes what is missing one after the other."""

    kept: dict[str, str] = field(default_factory=dict)  # key -> JSON

    def run(
        self, pieces: Sequence[Piece], compute: Compute, progress: Told
    ) -> list[Result]:
        """Return every piece's result in the order given; see `Pieces`."""
        for done, piece in enumerate(pieces):
            progress(done, len(pieces))
            if piece.key not in self.kept:
                self.kept[piece.key] = to_json(compute(piece))
        progress(len(pieces), len(pieces))
        return [json.loads(self.kept[piece.key]) for piece in pieces]


def key_of(*parts: object) -> str:
    """Return the sha256 of the parts as canonical JSON, 64 hexadecimal digits.

    Parts are JSON: the order of an object's keys is nothing, that of a list is.
    Raises TypeError where a part is not JSON and ValueError where it is not finite.

    Example: key_of("sweep", 1) != key_of("sweep", 1.0) != key_of("sweep1")
    """
    return hashlib.sha256(to_json(parts).encode()).hexdigest()


def to_json(value: object) -> str:
    """Return the one JSON text of a value; see `key_of` for what it raises."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )
