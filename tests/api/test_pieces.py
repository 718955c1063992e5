"""Kept results and the pieces of a running job, on SQLite and on PostgreSQL."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier

import pytest
from sqlalchemy import func, select, update

from api import auth, jobs, pieces, queue, settings
from api.db import reading, transaction
from api.jobs import Signal
from api.models import JobPiece, KeptResult
from api.pieces import PieceClaim
from api.transitions import Claim
from optimizer.pieces import Piece, key_of, to_json
from optimizer.spec import OptimizeSpec

pytestmark = pytest.mark.usefixtures("database")

SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")
PAST = datetime(2020, 1, 1, tzinfo=UTC)


def piece(number: int) -> Piece:
    return Piece("sweep", key_of(number), {"number": number})


PIECES = [piece(n) for n in range(4)]
KEYS = [p.key for p in PIECES]


def tenant_named(name: str) -> str:
    with transaction() as session:
        return auth.tenant_named(session, name).id


@pytest.fixture
def tenant() -> str:
    return tenant_named("acme")


@pytest.fixture
def job(tenant: str) -> Claim:
    """The right to run a job, and four pieces of it that wait."""
    with transaction() as session:
        job_id = jobs.submit(session, tenant, SPEC).id
    claim = claimed_job(job_id)
    with transaction() as session:
        assert pieces.add(session, claim, PIECES)
    return claim


def claimed_job(job_id: str) -> Claim:
    with transaction() as session:
        claim = jobs.claim(session, job_id, "own")
    assert claim is not None
    return claim


def helped(job: Claim, worker: str = "helper") -> PieceClaim | None:
    with transaction() as session:
        return pieces.claim(session, job.job_id, worker)


def taken(job: Claim, worker: str = "helper") -> PieceClaim:
    claim = helped(job, worker)
    assert claim is not None
    return claim


def own(job: Claim) -> PieceClaim | None:
    with transaction() as session:
        return pieces.claim_own(session, job, KEYS, "own")


def finish(claim: PieceClaim, text: str = "{}") -> bool:
    with transaction() as session:
        return pieces.finish(session, claim, text)


def beat(claim: PieceClaim) -> Signal:
    with transaction() as session:
        return pieces.beat(session, claim)


def kept(tenant: str, *keys: str) -> dict[str, str]:
    with transaction() as session:
        return pieces.read(session, tenant, keys or KEYS)


def keep(tenant: str, number: int, text: str = "{}") -> None:
    with transaction() as session:
        pieces.keep(session, tenant, piece(number), text)


def states(job: Claim) -> list[str]:
    mine = select(JobPiece.state).where(JobPiece.job_id == job.job_id)
    with reading() as session:
        return [s.value for s in session.scalars(mine.order_by(JobPiece.place))]


def silence(claim: PieceClaim) -> None:
    """As if its worker had said nothing for years."""
    with transaction() as session:
        session.execute(
            update(JobPiece)
            .where(JobPiece.key == claim.piece.key)
            .values(heartbeat_at=PAST)
        )


def sweep() -> list[str]:
    with transaction() as session:
        return [job.id for job in pieces.sweep(session, queue.names())]


# Results


def test_a_kept_result_is_read_by_its_key(tenant: str) -> None:
    text = to_json({"kl_nats": [1 / 3, 5e-324]})
    keep(tenant, 0, text)
    assert kept(tenant) == {KEYS[0]: text}


def test_the_first_result_of_a_key_stays(tenant: str) -> None:
    keep(tenant, 0, '{"first":1}')
    keep(tenant, 0, '{"second":2}')
    assert kept(tenant) == {KEYS[0]: '{"first":1}'}


def test_another_tenants_result_is_not_there(tenant: str) -> None:
    other = tenant_named("other")
    keep(other, 0, '{"mine":1}')
    assert kept(tenant) == {}
    keep(tenant, 0, '{"ours":1}')
    assert kept(other) == {KEYS[0]: '{"mine":1}'}


def test_a_long_result_is_a_file_and_one_that_is_gone_is_no_result(
    tenant: str, data_dir: Path
) -> None:
    long = json.dumps("x" * pieces.INLINE_BYTES)
    keep(tenant, 0, long)
    keep(tenant, 1)
    (file,) = (data_dir / "results").rglob("*.json")
    assert kept(tenant) == {KEYS[0]: long, KEYS[1]: "{}"}
    file.unlink()
    assert kept(tenant) == {KEYS[1]: "{}"}
    keep(tenant, 0, long)  # computed again
    assert kept(tenant, KEYS[0]) == {KEYS[0]: long}


def test_a_key_that_is_a_path_is_refused(tenant: str) -> None:
    long = "x" * (pieces.INLINE_BYTES + 1)
    with pytest.raises(ValueError, match="not a key"), transaction() as session:
        pieces.keep(session, tenant, Piece("sweep", "../../x", {}), long)


def age(tenant: str, number: int, days: int) -> None:
    with transaction() as session:
        row = session.get_one(KeptResult, (tenant, piece(number).key))
        row.last_used_at = datetime.now(UTC) - timedelta(days=days)


def limit(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setenv("PRECISION_RESULTS_MAX_BYTES", str(count))
    settings.settings.cache_clear()


def test_what_was_not_used_for_longest_goes_first(
    tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, days in enumerate((3, 9, 1)):
        keep(tenant, number, "1234567890")
        age(tenant, number, days)
    sweep()
    assert len(kept(tenant)) == 3  # they fit
    for number, days in enumerate((3, 9, 1)):
        age(tenant, number, days)
    kept(tenant, KEYS[1])  # and that is a use
    limit(monkeypatch, 20)
    sweep()
    assert set(kept(tenant)) == {KEYS[1], KEYS[2]}


def test_the_file_of_an_evicted_result_goes_too(
    tenant: str, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(tenant, 0, json.dumps("x" * pieces.INLINE_BYTES))
    limit(monkeypatch, 0)
    sweep()
    assert kept(tenant) == {}
    assert list((data_dir / "results").rglob("*.json")) == []


def test_what_a_job_has_still_to_read_is_not_evicted(
    job: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert finish(taken(job), '{"wanted":1}')
    limit(monkeypatch, 0)
    sweep()
    assert kept(job.tenant_id) == {KEYS[0]: '{"wanted":1}'}


# Pieces


def test_the_whole_life_of_a_piece(job: Claim) -> None:
    claim = taken(job)
    assert claim == PieceClaim(job.job_id, job.tenant_id, 1, PIECES[0])
    assert beat(claim) is Signal.OK
    assert states(job) == ["running", "queued", "queued", "queued"]
    assert finish(claim, '{"a":1}')
    assert states(job) == ["done", "queued", "queued", "queued"]
    assert kept(job.tenant_id) == {KEYS[0]: '{"a":1}'}
    with transaction() as session:
        assert pieces.drop(session, job, [KEYS[0]])
    assert states(job) == ["queued", "queued", "queued"]


def test_pieces_are_taken_in_their_order_until_none_is_left(job: Claim) -> None:
    assert [taken(job).piece for _ in PIECES] == PIECES
    assert helped(job) is None
    assert own(job) is None


def test_sixteen_claims_of_four_pieces_have_four_winners(job: Claim) -> None:
    together = Barrier(16)

    def race(number: int) -> PieceClaim | None:
        together.wait()
        return helped(job, f"worker-{number}")

    with ThreadPoolExecutor(16) as pool:
        won = [c for c in pool.map(race, range(16)) if c is not None]
    assert sorted(c.piece.key for c in won) == sorted(KEYS)
    assert {c.attempt for c in won} == {1}


def test_a_piece_whose_worker_fell_silent_is_taken_again_and_fenced_off(
    job: Claim,
) -> None:
    lost = taken(job, "lost")
    silence(lost)
    again = taken(job, "next")
    assert (again.piece, again.attempt) == (lost.piece, 2)
    assert beat(lost) is Signal.LOST
    with transaction() as session:
        assert not pieces.fail(session, lost, "late")
        assert not pieces.release(session, lost)
    assert beat(again) is Signal.OK
    # What came late is still right: equal keys, equal bytes.
    assert not finish(lost, '{"late":1}')
    assert states(job)[0] == "running"
    assert finish(again, '{"again":1}')
    assert kept(job.tenant_id) == {KEYS[0]: '{"late":1}'}


def test_a_beat_keeps_a_piece(job: Claim) -> None:
    claim = taken(job)
    silence(claim)
    assert beat(claim) is Signal.OK
    assert taken(job).piece == PIECES[1]


def test_a_piece_that_costs_workers_is_left_to_the_jobs_own(job: Claim) -> None:
    for _ in range(pieces.HELPER_TRIES):
        silence(taken(job))
    assert taken(job).piece == PIECES[1]
    claim = own(job)
    assert claim is not None
    assert claim.piece == PIECES[0]


def test_a_piece_that_a_helper_could_not_do_is_left_to_the_jobs_own(
    job: Claim,
) -> None:
    with transaction() as session:
        assert pieces.fail(session, taken(job), "NonFiniteError")
    assert taken(job).piece == PIECES[1]
    claim = own(job)
    assert claim is not None
    assert claim.piece == PIECES[0]


def test_a_released_piece_waits_again(job: Claim) -> None:
    with transaction() as session:
        assert pieces.release(session, taken(job))
    assert taken(job).piece == PIECES[0]


def test_own_pieces_are_those_asked_for(job: Claim) -> None:
    with transaction() as session:
        claim = pieces.claim_own(session, job, [KEYS[2]], "own")
        assert claim is not None
        assert claim.piece == PIECES[2]
        assert pieces.claim_own(session, job, [KEYS[2]], "own") is None


def test_adding_twice_is_once(job: Claim) -> None:
    claim = taken(job)
    with transaction() as session:
        assert pieces.add(session, job, PIECES)
    assert states(job) == ["running", "queued", "queued", "queued"]
    assert beat(claim) is Signal.OK


def test_a_done_piece_whose_result_was_lost_is_computed_again(job: Claim) -> None:
    finish(taken(job))
    with transaction() as session:
        assert pieces.add(session, job, PIECES[:1])
    assert taken(job).piece == PIECES[0]


def cancel(job: Claim) -> None:
    with transaction() as session:
        jobs.cancel(session, job.tenant_id, job.job_id)


def requeue(job: Claim) -> None:
    with transaction() as session:
        assert jobs.release(session, job)


def succeed(job: Claim) -> None:
    with transaction() as session:
        assert jobs.succeed(session, job, "sla_met", {})


@pytest.mark.parametrize("leave", [cancel, requeue, succeed])
def test_a_job_that_does_not_run_has_no_pieces_to_compute(
    job: Claim, leave: Callable[[Claim], None]
) -> None:
    claim = taken(job)
    leave(job)
    assert beat(claim) is Signal.CANCEL
    assert helped(job) is None
    assert own(job) is None
    with transaction() as session:
        assert pieces.waiting(session, job.job_id) == 0
        assert not pieces.add(session, job, PIECES)
    assert sweep() == []


def test_a_void_claim_takes_no_piece_away(job: Claim) -> None:
    requeue(job)
    second = claimed_job(job.job_id)
    with transaction() as session:
        assert not pieces.drop(session, job, KEYS)
        assert not pieces.add(session, job, PIECES)
        assert pieces.waiting(session, job.job_id) == len(KEYS)
        assert pieces.drop(session, second, KEYS)
        assert pieces.waiting(session, job.job_id) == 0


def test_pieces_of_a_final_job_are_swept_away(job: Claim) -> None:
    sweep()
    assert len(states(job)) == 4
    succeed(job)
    sweep()
    assert states(job) == []


def test_the_sweep_names_running_jobs_whose_pieces_wait(job: Claim) -> None:
    assert sweep() == [job.job_id]
    claims = [taken(job) for _ in PIECES]
    assert sweep() == []
    silence(claims[0])
    assert sweep() == [job.job_id]


def test_many_sweeps_at_once_agree(job: Claim, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20, 40):
        keep(job.tenant_id, number, "1234567890")
    succeed(job)
    limit(monkeypatch, 50)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: sweep(), range(4)))
    with reading() as session:
        left = session.scalar(select(func.count()).select_from(KeptResult))
    assert left == 5
