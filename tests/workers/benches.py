"""The worker's desk of a job, used in the test's own process instead of behind a pipe."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from api.transitions import Claim
from optimizer.pieces import Compute, Piece, Pieces
from optimizer.spec import OptimizeSpec
from workers import pieces, sharing
from workers.beat import Beat, HelpersBeat
from workers.pieces import Bench, HelpersBench, JobsBench
from workers.sharing import Kept, Shared


@dataclass(frozen=True)
class Own(Shared):
    """The pieces of a job that runs here, and beats, at its worker's own desk."""

    desk: JobsBench

    @property
    def claim(self) -> Claim:
        return self.desk.job

    @property
    def beat(self) -> Beat:
        assert isinstance(self.desk.beat, Beat)
        return self.desk.beat


def own(job: Claim, beat: Beat) -> Own:
    return Own(JobsBench.of(job, beat, "own"))


def bench(tenant_id: str = "") -> Bench:
    """Return that of no job, for models of the digest that tests use."""
    return Bench("", tenant_id, "0" * 64, HelpersBeat(""), "own")


def stored(rows: list[Piece]) -> list[Piece]:
    """Return the pieces under the keys of their rows."""
    return [replace(piece, key=bench().own(piece.key)) for piece in rows]


MakeCompute = Callable[[OptimizeSpec, Pieces], Compute]


def assist(job_id: str, worker: str, make: MakeCompute) -> int:
    """Help as a worker does, but compute in this very process."""

    def computing(spec: OptimizeSpec, bench: HelpersBench) -> None:
        sharing.assist(bench, make(spec, Kept(bench)))

    return pieces.assist(job_id, worker, computing)
