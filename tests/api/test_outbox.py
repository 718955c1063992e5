"""What is told to whom, on SQLite and on PostgreSQL, in the transaction that does it."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import update

from api import audit, jobs, outbox, webhooks
from api.db import reading, transaction
from api.errors import Invalid, InvalidState, NotFound, QuotaExceeded
from api.models import DeliveryState, Job, WebhookDelivery, WebhookEndpoint
from api.outbox import Attempt
from api.settings import settings
from api.transitions import now
from api.webhook_bodies import Format
from tests.api.hooks import (
    EVERY,
    SPEC,
    deliveries,
    endpoint,
    finish,
    submitted,
    take,
    tell,
    tenant_named,
    types,
)

pytestmark = pytest.mark.usefixtures("database")


@pytest.fixture
def tenant(database: str) -> str:
    return tenant_named("acme")


# -- what is written -------------------------------------------------------------


def test_an_endpoint_hears_of_final_states_and_of_what_it_asked_for(
    tenant: str,
) -> None:
    usual, curious = endpoint(tenant), endpoint(tenant, *EVERY)
    finish(submitted(tenant))
    assert types(usual.id) == ["job.succeeded"]
    heard = ["job.created", "job.queued", "job.started", "job.succeeded"]
    assert types(curious.id) == heard


def test_events_and_deliveries_roll_back_together(tenant: str) -> None:
    hook = endpoint(tenant, *EVERY)
    with pytest.raises(RuntimeError), transaction() as session:  # noqa: PT012
        jobs.submit(session, tenant, SPEC, {"model": "tiny"})
        assert session.query(WebhookDelivery).count() == 2
        raise RuntimeError("the request fails after all")
    assert deliveries(hook.id) == []


def test_a_job_may_name_the_one_endpoint_that_hears_of_it(tenant: str) -> None:
    one, other = endpoint(tenant), endpoint(tenant)
    job_id = submitted(tenant)
    with transaction() as session:
        session.execute(
            update(Job).where(Job.id == job_id).values(webhook_endpoint_id=one.id)
        )
    finish(job_id)
    assert (types(one.id), types(other.id)) == (["job.succeeded"], [])


def test_other_tenants_and_disabled_endpoints_hear_nothing(tenant: str) -> None:
    foreign = endpoint(tenant_named("other"))
    asleep = endpoint(tenant)
    with transaction() as session:
        held = webhooks.hold(session, tenant, asleep.id)
        webhooks.change(session, "tester", held, {"enabled": False})
    finish(submitted(tenant))
    assert deliveries(foreign.id) == deliveries(asleep.id) == []


# -- taking and telling ----------------------------------------------------------


def test_a_letter_is_taken_once(tenant: str) -> None:
    hook = endpoint(tenant)
    finish(submitted(tenant))
    with ThreadPoolExecutor(4) as pool:
        taken = [
            letter for found in pool.map(lambda _: take(), range(8)) for letter in found
        ]
    assert [letter.endpoint_id for letter in taken] == [hook.id]
    assert taken[0].secrets == (hook.secret,)
    assert tell(taken[0], 200)
    assert deliveries(hook.id)[0].state is DeliveryState.DELIVERED
    assert take(later=timedelta(days=30)) == []


def test_a_silent_postmans_letter_is_taken_over_with_its_id_and_he_writes_nothing(
    tenant: str,
) -> None:
    hook = endpoint(tenant)
    finish(submitted(tenant))
    (first,) = take()
    assert take(later=timedelta(seconds=outbox.CLAIM_S - 1)) == []
    (second,) = take(later=timedelta(seconds=outbox.CLAIM_S + 1))
    assert second.message_id == first.message_id
    assert (first.attempt, second.attempt) == (1, 2)
    assert not tell(first, 200)
    assert deliveries(hook.id)[0].state is DeliveryState.PENDING
    assert tell(second, 200)
    (delivery,) = deliveries(hook.id)
    assert [entry["status"] for entry in delivery.log] == [200]


def test_one_at_a_time_for_an_endpoint_and_a_few_for_a_tenant(tenant: str) -> None:
    hooks = [endpoint(tenant) for _ in range(outbox.TENANT_AT_ONCE + 2)]
    other = endpoint(tenant_named("other"))
    for owner in (tenant, tenant, other.tenant_id):
        finish(submitted(owner))
    taken = take(100)
    mine = {letter.endpoint_id for letter in taken if letter.tenant_id == tenant}
    assert len(mine) == outbox.TENANT_AT_ONCE
    assert len(taken) == len(mine) + 1  # the other tenant waits for nobody
    rest = take(100, busy=tuple(mine))
    assert {letter.endpoint_id for letter in rest} == {h.id for h in hooks} - mine


def test_the_log_has_every_attempt(tenant: str) -> None:
    hook = endpoint(tenant)
    finish(submitted(tenant))
    (letter,) = take()
    tell(letter, None, datetime.now(UTC) - timedelta(seconds=1))
    (letter,) = take()
    tell(letter, 503, datetime.now(UTC) - timedelta(seconds=1))
    (letter,) = take()
    tell(letter, 204)
    (delivery,) = deliveries(hook.id)
    seen = [(e["status"], e["error"], e["duration_s"]) for e in delivery.log]
    assert seen == [(None, "no connection", 0.1), (503, None, 0.1), (204, None, 0.1)]
    times = [datetime.fromisoformat(entry["at"]) for entry in delivery.log]
    assert times == sorted(times)
    assert delivery.finished_at is not None


def test_what_failed_for_good_is_replayed_under_its_id(tenant: str) -> None:
    hook = endpoint(tenant)
    finish(submitted(tenant))
    (letter,) = take()
    tell(letter, 500)
    (failed,) = deliveries(hook.id)
    assert failed.state is DeliveryState.FAILED
    with transaction() as session:
        outbox.replay(session, tenant, failed.id, now(session))
    (again,) = take()
    assert (again.message_id, again.attempt) == (letter.message_id, 1)
    tell(again, 200)
    (delivery,) = deliveries(hook.id)
    assert delivery.state is DeliveryState.DELIVERED
    assert [entry["status"] for entry in delivery.log] == [500, 200]


def test_nobody_replays_what_is_anothers(tenant: str) -> None:
    hook = endpoint(tenant)
    finish(submitted(tenant))
    (delivery,) = deliveries(hook.id)
    other = tenant_named("other")
    with pytest.raises(NotFound), transaction() as session:
        outbox.replay(session, other, delivery.id, now(session))


# -- endpoints -------------------------------------------------------------------


def read(endpoint_id: str) -> WebhookEndpoint:
    with reading() as session:
        found = session.get(WebhookEndpoint, endpoint_id)
    assert found is not None
    return found


def audited(tenant: str) -> list[str]:
    with reading() as session:
        rows, _ = audit.page(session, tenant, 100)
    return [row.action.removeprefix("webhook_endpoint.") for row in reversed(rows)]


def test_an_endpoint_that_is_gone_is_disabled_and_the_others_are_told(
    tenant: str,
) -> None:
    gone, other = endpoint(tenant), endpoint(tenant)
    run = endpoint(tenant, shape=Format.PORT)
    foreign = endpoint(tenant_named("other"))
    for _ in range(2):
        finish(submitted(tenant))
    letter = next(found for found in take() if found.endpoint_id == gone.id)
    tell(letter, 410, datetime.now(UTC))
    row = read(gone.id)
    assert (row.enabled, row.disabled_reason) == (False, "it answered 410 Gone")
    assert {d.state for d in deliveries(gone.id)} == {DeliveryState.FAILED}
    *_, told = deliveries(other.id)
    body = json.loads(told.payload)
    assert body["type"] == "webhook_endpoint.disabled"
    assert body["data"]["endpoint_id"] == gone.id
    assert "webhook_endpoint.disabled" not in types(foreign.id) + types(run.id)
    assert audited(tenant)[-1] == "disabled"
    with pytest.raises(InvalidState), transaction() as session:
        outbox.replay(session, tenant, letter.id, now(session))
    with transaction() as session:  # its owner has mended it
        held = webhooks.hold(session, tenant, gone.id)
        webhooks.change(session, "tester", held, {"enabled": True})
        outbox.replay(session, tenant, letter.id, now(session))
    row = read(gone.id)
    assert (row.enabled, row.disabled_reason, row.failing_since) == (True, None, None)


def test_five_days_without_an_arrival_disable_and_one_arrival_forgives(
    tenant: str,
) -> None:
    hook = endpoint(tenant)
    finish(submitted(tenant))
    (letter,) = take()

    def told(days: float, status: int) -> WebhookEndpoint:
        at = letter.at + timedelta(days=days)
        with transaction() as session:
            then = replace(letter, at=at)
            row = webhooks.hold(session, tenant, hook.id)
            webhooks.note(session, row, then, Attempt(status, None, 0.1), at)
        return read(hook.id)

    assert told(0, 500).failing_since == letter.at
    assert told(4.9, 500).enabled
    assert told(4.95, 200).failing_since is None
    assert told(5.1, 500).enabled  # it fails since now
    assert told(10.0, 500).enabled
    row = told(10.2, 500)
    assert (row.enabled, row.disabled_reason) == (
        False,
        "nothing arrived for 5.1 days",
    )


def test_what_waits_for_a_disabled_endpoint_fails_even_if_it_came_later(
    tenant: str,
) -> None:
    hook = endpoint(tenant)
    finish(submitted(tenant))
    with transaction() as session:
        session.execute(update(WebhookEndpoint).values(enabled=False))
    assert take() == []
    assert deliveries(hook.id)[0].state is DeliveryState.FAILED


def test_a_rotated_secret_and_the_old_one_sign_until_its_time_is_over(
    tenant: str,
) -> None:
    hook = endpoint(tenant)
    with transaction() as session:
        held = webhooks.hold(session, tenant, hook.id)
        webhooks.rotate(session, "tester", held)
    new = read(hook.id).secret
    finish(submitted(tenant))
    assert take()[0].secrets == (new, hook.secret)
    assert take(later=timedelta(days=1, minutes=1))[0].secrets == (new,)
    assert audited(tenant) == ["created", "rotated"]


def test_there_is_a_limit_and_two_at_once_do_not_pass_it(
    tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRECISION_WEBHOOK_MAX_ENDPOINTS", "3")
    settings.cache_clear()

    def attempt(_: int) -> bool:
        try:
            endpoint(tenant)
        except QuotaExceeded:
            return False
        return True

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(attempt, range(6))) == 3
    endpoint(tenant_named("other"))


def test_a_url_that_leads_inside_is_refused(tenant: str) -> None:
    with pytest.raises(Invalid) as refused:
        endpoint(tenant, url="https://169.254.169.254/latest")
    assert refused.value.code == "url_refused"
    hook = endpoint(tenant)
    with transaction() as session:
        held = webhooks.hold(session, tenant, hook.id)
        with pytest.raises(Invalid):
            webhooks.change(session, "tester", held, {"url": "http://example.com/"})


def test_a_deleted_endpoint_takes_its_deliveries_along(tenant: str) -> None:
    hook = endpoint(tenant)
    finish(submitted(tenant))
    (letter,) = take()
    with transaction() as session:
        webhooks.delete(session, "tester", webhooks.hold(session, tenant, hook.id))
    assert deliveries(hook.id) == []
    assert not tell(letter, 200)  # it was on its way
    assert audited(tenant) == ["created", "deleted"]


def test_an_event_beside_a_deletion_is_neither_lost_nor_in_the_way(
    tenant: str,
) -> None:
    """The job goes on, whoever of the two is first."""
    hook = endpoint(tenant, *EVERY)
    with ThreadPoolExecutor(2) as pool:
        with transaction() as session:
            webhooks.delete(session, "tester", webhooks.hold(session, tenant, hook.id))
            submitting = pool.submit(submitted, tenant)
            time.sleep(0.2)  # it waits for us
        job_id = submitting.result(10)
        again = endpoint(tenant, *EVERY)
        with transaction() as session:
            jobs.cancel(session, tenant, job_id)
            deleting = pool.submit(deleted, tenant, again.id)
            time.sleep(0.2)
            assert not deleting.done()
        deleting.result(10)
    assert deliveries(again.id) == []
    with reading() as session:
        assert jobs.get(session, tenant, job_id).status == "cancelled"


def deleted(tenant: str, endpoint_id: str) -> None:
    with transaction() as session:
        row = webhooks.hold(session, tenant, endpoint_id)
        webhooks.delete(session, "tester", row)


# -- watching --------------------------------------------------------------------


def test_what_waits_and_what_ended_is_counted(tenant: str) -> None:
    endpoint(tenant)
    finish(submitted(tenant))
    with reading() as session:
        at = now(session)
        assert outbox.waiting(session, at - timedelta(hours=1)) == (0, 0.0)
        late = outbox.waiting(session, at + timedelta(minutes=1))
    assert late.letters == 1
    assert 60 <= late.oldest_s < 90
    (letter,) = take()
    tell(letter, 200)
    with reading() as session:
        assert outbox.waiting(session, now(session)).letters == 0
        ((state, log),) = outbox.ended_between(session, at, now(session))
        assert outbox.ended_between(session, now(session), now(session)) == []
    assert state is DeliveryState.DELIVERED
    assert log[-1]["duration_s"] == 0.1


def test_old_logs_are_purged_and_what_waits_is_not(tenant: str) -> None:
    hook = endpoint(tenant)
    for _ in range(2):
        finish(submitted(tenant))
    (letter,) = take()
    tell(letter, 200)
    with transaction() as session:
        assert outbox.purge(session, letter.at - timedelta(days=1)) == 0
        assert outbox.purge(session, now(session) + timedelta(days=1)) == 1
    assert [d.state for d in deliveries(hook.id)] == [DeliveryState.PENDING]
