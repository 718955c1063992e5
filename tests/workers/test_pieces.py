"""Pieces of one job by many workers: real rows, threads and processes, a small sum."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from api import auth, db, jobs, pieces as rows, queue, settings, watched
from api.models import JobPiece
from api.transitions import Claim
from optimizer.errors import Cancelled, NonFiniteError
from optimizer.pieces import Compute, Memory, Piece, Pieces, Result, key_of
from optimizer.spec import OptimizeSpec
from tests.service import eventually
from tests.workers.benches import Own, assist, bench, own, stored
from workers import app, sharing
from workers.beat import Beat
from workers.sharing import Kept

pytestmark = pytest.mark.usefixtures("quick")

SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")
COUNT = 8


def piece(number: int) -> Piece:
    return Piece("sweep", key_of("sweep", number), {"number": number})


PIECES = [piece(n) for n in range(COUNT)]


def thirds(piece: Piece) -> Result:
    return {"kl_nats": piece.payload["number"] / 3, "b": 1, "a": [0.1]}


EXPECTED = Memory().run(PIECES, thirds, lambda done, of: None)


def quiet(done: int, planned: int) -> None:
    pass


@pytest.fixture
def quick(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost worker is noticed in a second."""
    monkeypatch.setenv("PRECISION_LEASE_S", "1.2")
    monkeypatch.setenv("PRECISION_BEAT_S", "0.1")
    settings.settings.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every job that help was asked for."""
    rung: list[str] = []
    monkeypatch.setattr(
        queue, "ring_for_help", lambda job_id, hardware="": rung.append(job_id)
    )
    return rung


def submit(tenant: str = "acme") -> str:
    with db.transaction() as session:
        owner = auth.tenant_named(session, tenant).id
        return jobs.submit(session, owner, SPEC).id


def claimed(job_id: str) -> Claim:
    with db.transaction() as session:
        claim = jobs.claim(session, job_id, "own")
    assert claim is not None
    return claim


@pytest.fixture
def job(calls: list[str]) -> Claim:
    return claimed(submit())


@pytest.fixture
def shared(job: Claim) -> Iterator[Own]:
    with Beat(job, leave=lambda code: None) as beat:
        yield own(job, beat)


@dataclass
class Counted:
    """Computes thirds, slowly if asked to, and remembers which."""

    delay_s: float = 0.0
    numbers: list[int] = field(default_factory=list)

    def __call__(self, piece: Piece) -> Result:
        time.sleep(self.delay_s)
        self.numbers.append(piece.payload["number"])
        return thirds(piece)

    def make(self, spec: OptimizeSpec, pieces: Pieces) -> Compute:
        return self


def rows_of(job: Claim) -> list[JobPiece]:
    with db.reading() as session:
        found = session.query(JobPiece).filter_by(job_id=job.job_id)
        return list(found.order_by(JobPiece.place))


def cancel(job: Claim) -> None:
    with db.transaction() as session:
        jobs.cancel(session, job.tenant_id, job.job_id)


# One worker


def test_one_worker_computes_all_in_their_order_and_leaves_no_rows(
    shared: Own, calls: list[str]
) -> None:
    compute, told = Counted(), list[tuple[int, int]]()
    found = shared.run(PIECES, compute, lambda *at: told.append(at))
    assert found == EXPECTED
    assert compute.numbers == list(range(COUNT))
    assert told == [(n, COUNT) for n in range(COUNT + 1)]
    assert rows_of(shared.claim) == []
    assert calls == [shared.claim.job_id]  # one bell; who hears it rings on


def test_another_job_of_the_tenant_computes_nothing(shared: Own) -> None:
    shared.run(PIECES, thirds, quiet)
    compute = Counted()
    second = claimed(submit())
    with Beat(second) as beat:
        assert own(second, beat).run(PIECES, compute, quiet) == EXPECTED
        more = [*PIECES, piece(100)]
        own(second, beat).run(more, compute, quiet)
    assert compute.numbers == [100]


def test_another_tenants_job_computes_all(shared: Own) -> None:
    shared.run(PIECES, thirds, quiet)
    compute = Counted()
    other = claimed(submit("other"))
    with Beat(other) as beat:
        assert own(other, beat).run(PIECES, compute, quiet) == EXPECTED
    assert len(compute.numbers) == COUNT


def test_a_piece_that_is_asked_for_twice_is_computed_once(shared: Own) -> None:
    compute = Counted()
    found = shared.run([PIECES[1], PIECES[0], PIECES[1]], compute, quiet)
    assert found == [EXPECTED[1], EXPECTED[0], EXPECTED[1]]
    assert compute.numbers == [1, 0]


def test_one_piece_needs_no_help(shared: Own, calls: list[str]) -> None:
    shared.run(PIECES[:1], thirds, quiet)
    assert calls == []


def test_a_piece_may_need_another(shared: Own) -> None:
    inner = Counted()

    def compute(piece: Piece) -> Result:
        (needed,) = shared.run(PIECES[:1], inner, quiet)
        return {"needed": needed, "number": piece.payload["number"]}

    outer = [Piece("validate", key_of("validate", n), {"number": n}) for n in range(3)]
    found = shared.run(outer, compute, quiet)
    assert found == [{"needed": EXPECTED[0], "number": n} for n in range(3)]
    assert inner.numbers == [0]


def test_what_a_lost_attempt_did_is_kept(shared: Own) -> None:
    def lost(piece: Piece) -> Result:
        if piece.payload["number"] == 5:
            raise SystemExit
        return thirds(piece)

    with pytest.raises(SystemExit):
        shared.run(PIECES, lost, quiet)
    with db.transaction() as session:  # as its beat does when the pool stops it
        assert jobs.release(session, shared.claim)
    compute = Counted()
    second = claimed(shared.claim.job_id)
    with Beat(second) as beat:
        assert own(second, beat).run(PIECES, compute, quiet) == EXPECTED
    assert sorted(compute.numbers) == [5, 6, 7]
    assert rows_of(second) == []


def test_a_worker_that_lost_the_job_computes_nothing(shared: Own) -> None:
    with db.transaction() as session:
        assert jobs.release(session, shared.claim)
    claimed(shared.claim.job_id)
    compute = Counted()
    with pytest.raises(Cancelled):
        shared.run(PIECES, compute, quiet)
    assert compute.numbers == []


def test_the_error_of_a_piece_ends_the_job(shared: Own) -> None:
    def compute(piece: Piece) -> Result:
        raise NonFiniteError("layers.3.ffn_out, sample 2")

    with pytest.raises(NonFiniteError, match=r"layers\.3"):
        shared.run(PIECES, compute, quiet)


# Many workers


@pytest.mark.parametrize("helpers", [1, 3])
def test_many_workers_give_the_same_and_each_piece_is_computed_once(
    shared: Own, helpers: int
) -> None:
    computes = [Counted(delay_s=0.05) for _ in range(helpers + 1)]
    own, *others = computes
    with ThreadPoolExecutor(helpers) as pool:

        def help_it(compute: Counted) -> int:
            eventually(lambda: rows_of(shared.claim))
            return assist(shared.claim.job_id, "helper", compute.make)

        counts = [pool.submit(help_it, compute) for compute in others]
        assert shared.run(PIECES, own, quiet) == EXPECTED
        with db.transaction() as session:
            assert jobs.succeed(session, shared.claim, "sla_met", {})
        assert sum(c.result(10) for c in counts) == COUNT - len(own.numbers) > 0
    done = [number for compute in computes for number in compute.numbers]
    assert sorted(done) == list(range(COUNT))


def add(job: Claim, first: int = 0, last: int = COUNT) -> None:
    """As if the job's own worker were busy elsewhere."""
    with db.transaction() as session:
        assert rows.add(session, job, stored(PIECES[first:last]))


def test_a_helper_rings_on_while_pieces_wait(job: Claim, calls: list[str]) -> None:
    add(job, 0, 2)
    submit()  # so that it does not linger
    assert assist(job.job_id, "helper", Counted().make) == 2
    assert calls == [job.job_id]


def test_the_sweep_calls_helpers_while_pieces_wait(
    job: Claim, calls: list[str]
) -> None:
    add(job)
    app.sweep()
    assert calls == [job.job_id]
    for number in range(COUNT):
        with db.transaction() as session:
            assert rows.claim(session, job.job_id, f"helper-{number}")
    app.sweep()
    assert calls == [job.job_id]


def test_a_doubled_bell_loads_nothing(job: Claim) -> None:
    def make(spec: OptimizeSpec, pieces: Pieces) -> Compute:
        raise AssertionError("loaded a model for nothing")

    assert assist(job.job_id, "helper", make) == 0
    add(job)
    cancel(job)
    assert assist(job.job_id, "helper", make) == 0
    assert assist("job_of_nobody", "helper", make) == 0


def test_a_helper_stays_for_the_next_list_and_leaves_with_the_job(job: Claim) -> None:
    compute = Counted()
    add(job, 0, 2)
    with ThreadPoolExecutor(1) as pool:
        helper = pool.submit(assist, job.job_id, "helper", compute.make)
        assert eventually(lambda: len(compute.numbers) == 2)
        add(job, 2)
        assert eventually(lambda: len(compute.numbers) == COUNT)
        assert not helper.done()
        cancel(job)
        assert helper.result(5) == COUNT


def test_a_helper_leaves_when_another_job_waits(job: Claim) -> None:
    add(job, 0, 2)
    with ThreadPoolExecutor(1) as pool:
        helper = pool.submit(assist, job.job_id, "helper", Counted().make)
        time.sleep(3 * sharing.POLL_S)
        assert not helper.done()
        submit()
        assert helper.result(5) == 2


def test_a_helper_that_cannot_leaves_the_piece_to_the_jobs_own(
    shared: Own,
) -> None:
    add(shared.claim, 0, 2)

    def compute(piece: Piece) -> Result:
        raise MemoryError("the owner's data")

    def make(spec: OptimizeSpec, pieces: Pieces) -> Compute:
        return compute

    assert assist(shared.claim.job_id, "helper", make) == 0
    first, second = rows_of(shared.claim)
    assert (first.state, first.error) == ("failed", "MemoryError")
    assert second.state == "queued"
    assert counted() == {("failed", "reference"): 1}
    assert shared.run(PIECES, thirds, quiet) == EXPECTED


def test_a_helper_keeps_its_piece_while_it_computes(shared: Own) -> None:
    """Three leases long, as a kernel may be: nobody else takes it."""
    own, other = Counted(), Counted(delay_s=3.6)
    add(shared.claim, 0, 1)
    with ThreadPoolExecutor(1) as pool:
        helper = pool.submit(assist, shared.claim.job_id, "helper", other.make)
        eventually(lambda: rows_of(shared.claim)[0].worker)
        assert shared.run(PIECES[:2], own, quiet) == EXPECTED[:2]
        cancel(shared.claim)
        helper.result(10)
    assert (own.numbers, other.numbers) == ([1], [0])


def test_a_cancel_is_heard_while_others_compute(shared: Own) -> None:
    def progress(done: int, planned: int) -> None:
        shared.beat.check()
        if done == 1:
            cancel(shared.claim)

    add(shared.claim, 0, 1)
    with db.transaction() as session:
        assert rows.claim(session, shared.claim.job_id, "elsewhere")
    began = time.monotonic()
    with pytest.raises(Cancelled):
        shared.run(PIECES[:2], thirds, progress)
    assert time.monotonic() - began < 5


def killed_helper(job_id: str, started: Path) -> None:
    """A process of its own that never finishes its second piece."""

    def make(spec: OptimizeSpec, pieces: Pieces) -> Compute:
        def compute(piece: Piece) -> Result:
            with started.open("a") as file:
                file.write(f"{piece.payload['number']}\n")
            if len(started.read_text().split()) == 2:
                time.sleep(600)
            return thirds(piece)

        return compute

    queue.ring_for_help = lambda job_id, hardware="": None  # nobody else is there
    assist(job_id, f"helper:{os.getpid()}", make)


def test_every_piece_is_a_trial_that_the_job_counts(shared: Own) -> None:
    assert shared.desk.trials == (0, 0)
    assert shared.run(PIECES, Counted(), quiet) == EXPECTED
    assert shared.desk.trials == (COUNT, COUNT)


def test_every_piece_is_counted_where_it_is_computed(shared: Own) -> None:
    shared.run(PIECES, Counted(delay_s=0.02), quiet)
    shared.run(PIECES, Counted(), quiet)  # those are kept: nobody measures
    assert counted() == {("measured", "reference"): COUNT}
    with db.reading() as session:
        times = watched.times(session, (0.001, 60.0))
    assert (times.at_most, times.total) == ((0, COUNT), COUNT)
    assert COUNT * 0.02 <= times.sum_s < 60


def counted() -> dict[tuple[str, str], int]:
    with db.reading() as session:
        return watched.counted(session)


@pytest.mark.slow
def test_a_killed_helper_loses_only_its_current_piece(
    shared: Own, tmp_path: Path
) -> None:
    add(shared.claim)
    started = tmp_path / "started"
    spawn = multiprocessing.get_context("spawn")  # as workers are
    helper = spawn.Process(target=killed_helper, args=(shared.claim.job_id, started))
    helper.start()
    assert eventually(lambda: started.exists() and len(started.read_text().split()) > 1)
    assert helper.pid is not None
    os.kill(helper.pid, signal.SIGKILL)
    helper.join()
    lost = int(started.read_text().split()[1])
    compute = Counted()
    assert shared.run(PIECES, compute, quiet) == EXPECTED
    # The first one is kept; the second was computed again, after all that waited.
    assert compute.numbers == [*range(2, COUNT), lost] == [*range(2, COUNT), 1]


# Without a job


def test_kept_results_are_read_and_the_rest_is_computed_here(job: Claim) -> None:
    kept, compute = Kept(bench(job.tenant_id)), Counted()
    assert kept.run(PIECES[:2], compute, quiet) == EXPECTED[:2]
    assert kept.run(PIECES, compute, quiet) == EXPECTED
    assert compute.numbers == list(range(COUNT))
