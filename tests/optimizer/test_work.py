import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from optimizer.pieces import Compute, Memory, Piece, Result, Told
from optimizer.run import optimize
from optimizer.spec import LatencySla, OptimizeSpec, Workload
from optimizer.work import Work
from tests.optimizer.conftest import quiet


class Counting:
    """Keeps results as `Memory` does, and notes what had to be computed."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.computed: list[str] = []

    def run(
        self, pieces: Sequence[Piece], compute: Compute, progress: Told
    ) -> list[Result]:
        def noted(piece: Piece) -> Result:
            self.computed.append(piece.kind)
            return compute(piece)

        return self.memory.run(pieces, noted, progress)


def facts(document: dict[str, Any]) -> dict[str, Any]:
    """What a run found, without what it was asked."""
    return {k: v for k, v in document.items() if k not in ("request", "provenance")}


def test_another_target_on_the_same_model_and_data_measures_one_stack_at_most(
    spec: OptimizeSpec,
) -> None:
    kept = Counting()
    first = optimize(spec, quiet, kept)
    assert {"calibrate", "sweep", "contrast", "truth"} <= set(kept.computed)
    kept.computed.clear()
    assert optimize(spec, quiet, kept) == first
    assert kept.computed == []
    tight = replace(spec, latency_sla=LatencySla(first["front"][0]["per_token_s"]))
    other = optimize(tight, quiet, kept)
    chosen = {"attention_of_stack", "elsewhere", "writes"}  # of the chosen stack alone
    assert set(kept.computed) <= {"validate", *chosen}
    assert kept.computed.count("validate") <= 1
    assert kept.computed.count("writes") <= 1  # what the reference writes is kept
    assert facts(other) == facts(optimize(tight, quiet))


def test_another_device_on_the_same_model_and_data_sweeps_nothing(
    spec: OptimizeSpec,
) -> None:
    kept = Counting()
    optimize(replace(spec, hardware="l4"), quiet, kept)
    kept.computed.clear()
    optimize(replace(spec, hardware="b200"), quiet, kept)
    optimize(replace(spec, hardware="h100", workload=Workload(8)), quiet, kept)
    # Seconds are others, so what nothing beats is searched again.
    chosen = {"attention_of_stack", "elsewhere", "writes"}  # of the chosen stack alone
    assert set(kept.computed) <= {"front", "validate", *chosen}
    kept.computed.clear()
    optimize(replace(spec, hardware="t4"), quiet, kept)  # fp16 is another family
    assert "calibrate" not in kept.computed
    assert "sweep" in kept.computed


@pytest.mark.parametrize(
    "change",
    [
        {"model_sha256": "1" * 64},
        {"data_distribution": "code"},
        {"sequence_tokens": 48},
        {"seed": 1},
    ],
)
def test_another_model_or_other_data_is_swept_again(
    spec: OptimizeSpec, change: dict[str, Any]
) -> None:
    kept = Counting()
    optimize(spec, quiet, kept)
    kept.computed.clear()
    optimize(replace(spec, **change), quiet, kept)
    assert "sweep" in kept.computed


def test_a_model_larger_than_its_room_is_streamed_to_the_same_bytes(
    spec: OptimizeSpec,
) -> None:
    def parts(work: Work) -> list[str]:
        found: list[str] = []
        run = work.pieces.run

        class Noting:
            def run(
                self, pieces: Sequence[Piece], compute: Compute, progress: Told
            ) -> list[Result]:
                results = run(pieces, compute, progress)
                found.extend(json.dumps(r, sort_keys=True) for r in results)
                return results

        work.pieces = Noting()
        work.sensitivities(work._candidates(["core"]))
        return found

    resident = Work(spec, Memory())
    streamed = Work(spec, Memory(), memory_bytes=0)
    assert parts(resident) == parts(streamed)
    assert resident.model.residency.whole
    assert not streamed.model.residency.whole


def test_a_piece_is_computed_from_its_payload_alone(spec: OptimizeSpec) -> None:
    def collect() -> tuple[list[Piece], list[Result]]:
        pieces: list[Piece] = []
        results: list[Result] = []
        memory = Memory()

        class Noting:
            def run(
                self, some: Sequence[Piece], compute: Compute, progress: Told
            ) -> list[Result]:
                found = memory.run(some, compute, progress)
                for piece, result in zip(some, found, strict=True):
                    if piece.key not in {p.key for p in pieces}:
                        pieces.append(piece)
                        results.append(result)
                return found

        optimize(spec, quiet, Noting())
        return pieces, results

    pieces, results = collect()
    compute: Callable[[Piece], Result] = Work(spec, Memory()).compute
    for piece, result in reversed(list(zip(pieces, results, strict=True))):
        again = Piece(piece.kind, piece.key, json.loads(json.dumps(piece.payload)))
        assert json.loads(json.dumps(compute(again))) == result, piece.kind
