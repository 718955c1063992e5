"""Webhooks on their way to real receivers, from rows in both databases."""

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime, timedelta

import pytest
from sqlalchemy.orm import Session
from standardwebhooks import Webhook, WebhookVerificationError

from api import outbox, transitions, webhooks
from api.db import reading, transaction
from api.models import DeliveryState, WebhookDelivery, WebhookEndpoint
from api.settings import settings
from tests.api.hooks import (
    deliveries,
    endpoint,
    finish,
    submitted,
    tenant_named,
    types,
)
from tests.receiver import Receiver, after, in_turn, receiver, status
from tests.service import eventually
from workers import outgoing
from workers.postman import AT_ONCE, JITTER, RETRY_S, Postman, retry_at


class Clock:
    """The database's clock, put forward."""

    def __init__(self) -> None:
        self.ahead = timedelta()

    def __call__(self, session: Session) -> datetime:
        return transitions.now(session) + self.ahead


@pytest.fixture
def tenant(database: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tenant of an operator who allows receivers on this machine."""
    monkeypatch.setenv("PRECISION_WEBHOOK_ALLOW", "127.0.0.0/8")
    settings.cache_clear()
    return tenant_named("acme")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def postman(tenant: str, clock: Clock) -> Postman:
    return Postman(clock)


@pytest.fixture
def site() -> Iterator[Receiver]:
    with receiver() as started:
        yield started


def hooked(tenant: str, site: Receiver) -> WebhookEndpoint:
    return endpoint(tenant, url=site.url())


def go(postman: Postman) -> int:
    """Send what is due, and return how many letters that were."""
    carriers = postman.round()
    for carrier in carriers:
        carrier.join()
    return len(carriers)


def only(endpoint_id: str) -> WebhookDelivery:
    (delivery,) = deliveries(endpoint_id)
    return delivery


def read(endpoint_id: str) -> WebhookEndpoint:
    with reading() as session:
        found = session.get(WebhookEndpoint, endpoint_id)
    assert found is not None
    return found


# -- signatures ------------------------------------------------------------------


def test_a_receiver_verifies_the_bytes_that_came(
    postman: Postman, tenant: str, site: Receiver
) -> None:
    hook = hooked(tenant, site)
    job_id = submitted(tenant, {"model": "tiny", "metadata": {"city": "Zürich"}})
    finish(job_id)
    assert go(postman) == 1
    (got,) = site.received
    body = Webhook(hook.secret).verify(got.body, got.headers)
    assert body["data"]["job_id"] == job_id
    assert body["data"]["metadata"] == {"city": "Zürich"}
    assert got.body == only(hook.id).payload.encode()
    assert got.headers["content-type"] == "application/json"
    assert got.headers["user-agent"].startswith("precision/")
    assert got.headers["webhook-id"] == only(hook.id).message_id
    with pytest.raises(WebhookVerificationError):
        Webhook(hook.secret).verify(got.body + b" ", got.headers)
    assert only(hook.id).state is DeliveryState.DELIVERED
    assert go(postman) == 0


def test_during_a_rotation_both_secrets_verify_and_then_the_new_one_alone(
    postman: Postman, tenant: str, site: Receiver, clock: Clock
) -> None:
    old = hooked(tenant, site).secret
    with transaction() as session:
        (row,), _ = webhooks.page(session, tenant, 10)
        webhooks.rotate(session, "tester", row)
    new = read(row.id).secret
    finish(submitted(tenant))
    go(postman)
    (got,) = site.received
    assert len(got.headers["webhook-signature"].split(" ")) == 2
    for secret in (old, new):
        Webhook(secret).verify(got.body, got.headers)
    clock.ahead = timedelta(days=1, seconds=1)
    finish(submitted(tenant))
    go(postman)
    assert len(site.received[1].headers["webhook-signature"].split(" ")) == 1


def test_each_attempt_has_its_own_time_and_the_same_id(
    postman: Postman, tenant: str, site: Receiver, clock: Clock
) -> None:
    hook = hooked(tenant, site)
    site.answer = in_turn(status(503), status(204))
    finish(submitted(tenant))
    go(postman)
    assert go(postman) == 0  # it waits for five seconds
    clock.ahead = timedelta(seconds=6)
    go(postman)
    first, second = site.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    stamps = [int(got.headers["webhook-timestamp"]) for got in (first, second)]
    assert stamps[1] - stamps[0] >= 5
    assert first.body == second.body
    for got in (first, second):
        Webhook(hook.secret).verify(got.body, got.headers)
    log = only(hook.id).log
    assert [(entry["status"], entry["error"]) for entry in log] == [
        (503, "the receiver answered 503"),
        (204, None),
    ]
    assert all(0 < entry["duration_s"] < 5 for entry in log)


# -- the schedule ----------------------------------------------------------------


def test_the_schedule_of_standard_webhooks_is_followed_to_its_end(
    postman: Postman, tenant: str, site: Receiver, clock: Clock
) -> None:
    site.answer = status(500)
    hook = hooked(tenant, site)
    finish(submitted(tenant))
    waits_s = []
    while only(hook.id).state is DeliveryState.PENDING:
        due = only(hook.id).next_attempt_at
        with reading() as session:
            clock.ahead = due - transitions.now(session) + timedelta(milliseconds=1)
        assert go(postman) == 1
        waits_s.append((only(hook.id).next_attempt_at - due).total_seconds())
    for waited_s, wait_s in zip(waits_s, RETRY_S, strict=False):
        assert wait_s * (1 - JITTER) <= waited_s <= wait_s * (1 + JITTER) + 1
    row = only(hook.id)
    assert row.state is DeliveryState.FAILED
    assert len(row.log) == len(site.received) == 10
    assert len({got.headers["webhook-id"] for got in site.received}) == 1
    assert read(hook.id).enabled  # three days, not five
    with transaction() as session:
        outbox.replay(session, tenant, row.id, clock(session))
    site.answer = status(200)
    go(postman)
    assert only(hook.id).state is DeliveryState.DELIVERED
    assert len({got.headers["webhook-id"] for got in site.received}) == 1


def test_the_waits_are_those_of_the_specification() -> None:
    at = datetime.fromisoformat("2026-01-01T00:00:00+00:00")
    hours = [2, 5, 10, 14, 20, 24]
    assert list(RETRY_S) == [5, 300, 1800, *(hour * 3600 for hour in hours)]
    assert retry_at(10, at) is None
    spread = {retry_at(1, at) for _ in range(50)}
    assert len(spread) > 40


# -- what is no arrival ----------------------------------------------------------


def test_a_redirect_is_a_failure_and_is_not_followed(
    postman: Postman, tenant: str, site: Receiver
) -> None:
    site.answer = status(307, Location=site.url(path="/elsewhere"))
    hook = hooked(tenant, site)
    finish(submitted(tenant))
    go(postman)
    assert [got.path for got in site.received] == ["/hook"]
    row = only(hook.id)
    assert row.state is DeliveryState.PENDING
    assert "redirect" in row.log[0]["error"]


def test_a_receiver_that_is_gone_gets_nothing_more(
    postman: Postman, tenant: str, site: Receiver
) -> None:
    site.answer = status(410)
    hook = hooked(tenant, site)
    with receiver() as other:
        told = endpoint(tenant, url=other.url())
        for _ in range(2):
            finish(submitted(tenant))
        while go(postman):
            pass
        assert len(site.received) == 1
        assert not read(hook.id).enabled
        kinds = {json.loads(got.body)["type"] for got in other.received}
        assert kinds == {"job.succeeded", "webhook_endpoint.disabled"}
        assert types(told.id).count("webhook_endpoint.disabled") == 1


def test_five_days_of_failures_disable_the_endpoint(
    postman: Postman, tenant: str, site: Receiver, clock: Clock
) -> None:
    site.answer = status(500)
    hook = hooked(tenant, site)
    finish(submitted(tenant))
    go(postman)
    clock.ahead = timedelta(days=4.9)
    go(postman)
    assert read(hook.id).enabled
    clock.ahead = timedelta(days=5.1)
    go(postman)
    assert "nothing arrived for 5" in str(read(hook.id).disabled_reason)
    assert only(hook.id).state is DeliveryState.FAILED


def test_a_target_that_is_no_longer_allowed_is_not_reached(
    postman: Postman, tenant: str, site: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = hooked(tenant, site)
    finish(submitted(tenant))
    monkeypatch.setenv("PRECISION_WEBHOOK_ALLOW", "")
    settings.cache_clear()
    go(postman)
    assert site.received == []
    assert "refused" in only(hook.id).log[0]["error"]


# -- many at once ----------------------------------------------------------------


def drain(postman: Postman, done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not done():
        assert time.monotonic() < end
        postman.round()
        time.sleep(0.005)


def test_a_slow_receiver_holds_up_nobody_but_himself(
    postman: Postman, tenant: str, site: Receiver
) -> None:
    release = threading.Event()
    with receiver() as slow:

        def wait(handler: object) -> None:
            release.wait(8)
            status(200)(handler)  # type: ignore[arg-type]

        slow.answer = wait
        lazy, quick = endpoint(tenant, url=slow.url()), hooked(tenant, site)
        for _ in range(6):
            finish(submitted(tenant))
        began = time.monotonic()
        drain(postman, lambda: len(site.received) == 6)
        assert time.monotonic() - began < 7
        assert len(slow.received) == 1  # one at a time
        release.set()
        drain(postman, lambda: len(slow.received) == 6)
        arrived = lambda: all(  # noqa: E731
            d.state is DeliveryState.DELIVERED
            for hook in (lazy, quick)
            for d in deliveries(hook.id)
        )
        assert eventually(arrived, 10)


def test_two_postmen_send_each_letter_once(
    tenant: str, clock: Clock, site: Receiver
) -> None:
    hooks = [hooked(tenant, site) for _ in range(3)]
    for _ in range(5):
        finish(submitted(tenant))

    def work() -> None:
        drain(Postman(clock), lambda: len(site.received) >= 15)

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    keys = [
        (got.headers["webhook-id"], got.headers["webhook-signature"])
        for got in site.received
    ]
    assert len(keys) == len(set(keys)) == 15
    settled = lambda: all(  # noqa: E731
        d.state is DeliveryState.DELIVERED
        for hook in hooks
        for d in deliveries(hook.id)
    )
    assert eventually(settled, 10)


def test_no_more_than_a_few_are_on_the_way(
    postman: Postman, clock: Clock, site: Receiver
) -> None:
    site.answer = after(0.5, status(200))
    for number in range(AT_ONCE + 3):
        owner = tenant_named(f"team-{number}")
        hooked(owner, site)
        finish(submitted(owner))
    carriers = postman.round()
    assert len(carriers) == AT_ONCE
    assert postman.round() == []
    for carrier in carriers:
        carrier.join()
    assert go(postman) == 3


# -- crashes ---------------------------------------------------------------------


def die_after_sending(url: str, body: bytes, headers: dict[str, str]) -> int:
    outgoing.post(url, body, headers)
    os._exit(9)


def deliver_and_die() -> None:
    for carrier in Postman(post=die_after_sending).round():
        carrier.join()


def test_what_was_sent_and_not_written_down_is_sent_again_under_its_id(
    postman: Postman, tenant: str, site: Receiver, clock: Clock
) -> None:
    hook = hooked(tenant, site)
    finish(submitted(tenant))
    child = multiprocessing.get_context("spawn").Process(target=deliver_and_die)
    child.start()
    child.join(60)
    assert child.exitcode == 9
    assert len(site.received) == 1
    assert only(hook.id).state is DeliveryState.PENDING
    assert go(postman) == 0  # the dead one may be slow
    clock.ahead = timedelta(seconds=outbox.CLAIM_S + 1)
    assert go(postman) == 1
    first, second = site.received
    assert first.headers["webhook-id"] == second.headers["webhook-id"]
    assert (only(hook.id).state, only(hook.id).attempts) == (
        DeliveryState.DELIVERED,
        2,
    )


def test_the_round_goes_on_where_the_database_was_away(
    postman: Postman, tenant: str, site: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`run` in a thread of its own, through one failure of each kind."""
    monkeypatch.setenv("PRECISION_WEBHOOK_POLL_S", "0.02")
    settings.cache_clear()
    hook = hooked(tenant, site)
    rounds, broken = [0], threading.Event()
    usual = postman.round

    def flaky() -> list[threading.Thread]:
        rounds[0] += 1
        if rounds[0] == 1:
            raise ConnectionError("the database is away")
        if broken.is_set():
            raise SystemExit
        return usual()

    monkeypatch.setattr(postman, "round", flaky)

    def run() -> None:
        with suppress(SystemExit):  # how the test ends what has no end
            postman.run()

    runner = threading.Thread(target=run, daemon=True)
    runner.start()
    finish(submitted(tenant))
    assert eventually(lambda: only(hook.id).state is DeliveryState.DELIVERED, 10)
    broken.set()
    runner.join(10)
    assert len(site.received) == 1


def test_the_parent_that_delivers_has_no_torch() -> None:
    ask = "import sys, workers.postman; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
