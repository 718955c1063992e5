"""What is written together: all of it, or what is right of it; nothing twice."""

import asyncio
import threading

import pytest
from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.orm import Session

from api import auth, db, ids, jobs
from api.crew import Act, Crew, Look, alone, together
from api.errors import Invalid, QuotaExceeded
from api.models import Job, JobEvent, Tenant
from optimizer.spec import OptimizeSpec

SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100-sxm")


@pytest.fixture
def tenant_id(database: str) -> str:
    """A tenant that may queue three jobs."""
    with db.transaction() as session:
        tenant = auth.tenant_named(session, "acme")
        tenant.max_queued = 3
        session.flush()
        return tenant.id


def asking(tenant_id: str, pointer: str = "") -> Look[str]:
    def act(session: Session) -> str:
        return jobs.submit(session, tenant_id, SPEC).id

    def look(session: Session) -> Act[str]:
        if pointer:
            raise Invalid(pointer, "no such thing")
        return act

    return look


def test_one_that_is_refused_takes_no_other_down(tenant_id: str) -> None:
    looks = [asking(tenant_id, p) for p in ("", "", "/model", "", "", "")]
    done = together(looks)
    kinds = [type(came) for came in done]
    assert kinds == [str, str, Invalid, str, QuotaExceeded, QuotaExceeded]
    with db.reading() as session:
        assert set(session.scalars(select(Job.id))) == {
            came for came in done if isinstance(came, str)
        }
        counted = select(JobEvent.job_id, func.max(JobEvent.seq), func.count())
        events = session.execute(counted.group_by(JobEvent.job_id))
        assert [row[1:] for row in events] == [(2, 2)] * 3


def test_what_the_database_refuses_takes_no_other_down(tenant_id: str) -> None:
    def clash(session: Session) -> str:
        session.add(Tenant(id=ids.new("ten"), name="acme"))  # there is one
        session.flush()
        return "never"

    looks: list[Look[str]] = [asking(tenant_id), lambda _: clash, asking(tenant_id)]
    first, refused, last = together(looks)
    assert isinstance(refused, IntegrityError)
    with db.reading() as session:
        assert set(session.scalars(select(Job.id))) == {first, last}


def test_a_database_that_is_away_is_asked_once(tenant_id: str) -> None:
    asked = []

    def away(session: Session) -> str:
        asked.append(session)
        raise OperationalError("INSERT", None, Exception("database is locked"))

    looks: list[Look[str]] = [lambda _: away] * 5
    assert [type(came) for came in together(looks)] == [OperationalError] * 5
    assert len(asked) == 1


def test_what_the_thread_itself_raises_is_heard(
    tenant_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise RuntimeError("no session")

    monkeypatch.setattr(db, "glancing", broken)
    with pytest.raises(RuntimeError, match="no session"):
        asyncio.run(Crew[str](32, 60.0).do(asking(tenant_id)))


def test_alone_it_raises(tenant_id: str) -> None:
    with pytest.raises(Invalid):
        alone(asking(tenant_id, "/model"))


def test_who_comes_in_the_meantime_goes_together(tenant_id: str) -> None:
    threads: list[int] = []
    sessions: list[Session] = []

    def look(_: Session) -> Act[None]:
        threads.append(threading.get_ident())
        return sessions.append

    async def ask() -> None:
        crew: Crew[None] = Crew(32, 60.0)
        await asyncio.gather(*(crew.do(look) for _ in range(9)))
        await crew.do(look)

    asyncio.run(ask())
    assert len(threads) == len(sessions) == 10
    assert [len({*map(id, sessions[:9])}), sessions[9] is sessions[0]] == [1, False]


def test_who_looks_for_long_holds_nobody_up(tenant_id: str) -> None:
    leave = threading.Event()

    def slow(_: Session) -> Act[str]:
        assert leave.wait(60)
        return lambda _: "slow"

    async def ask() -> list[str]:
        crew: Crew[str] = Crew(32, 0.05)
        first = asyncio.create_task(crew.do(slow))
        await asyncio.sleep(0.1)
        second = await crew.do(lambda _: lambda _: "quick")
        assert not first.done()
        leave.set()
        return [second, await first]

    assert asyncio.run(ask()) == ["quick", "slow"]


def test_what_one_raises_others_do_not_hear(tenant_id: str) -> None:
    async def ask() -> list[str | BaseException]:
        crew: Crew[str] = Crew(32, 60.0)
        looks = [asking(tenant_id), asking(tenant_id, "/model"), asking(tenant_id)]
        asked = (crew.do(look) for look in looks)
        return await asyncio.gather(*asked, return_exceptions=True)

    kinds = [type(came) for came in asyncio.run(ask())]
    assert kinds == [str, Invalid, str]
