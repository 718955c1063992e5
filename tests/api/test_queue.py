import time

import pytest

from api import queue, settings

pytestmark = pytest.mark.usefixtures("data_dir")


def test_the_message_is_a_name_and_an_id() -> None:
    queue.ring("job_1")
    with queue.producer().connection_for_read() as connection:
        message = connection.SimpleQueue("celery").get(timeout=1)
    assert message.headers["task"] == queue.RUN_JOB
    assert message.payload[0] == ["job_1"]


def test_a_broker_that_is_away_costs_little_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECISION_BROKER_URL", "redis://:secret@127.0.0.1:1/0")
    settings.settings.cache_clear()
    queue.producer.cache_clear()
    began = time.monotonic()
    queue.ring("job_1")
    assert not queue.reachable()
    assert time.monotonic() - began < 4 * queue.PATIENCE_S


def test_help_is_asked_for_by_another_name() -> None:
    queue.ring_for_help("job_1")
    with queue.producer().connection_for_read() as connection:
        message = connection.SimpleQueue("celery").get(timeout=1)
    assert message.headers["task"] == queue.RUN_PIECES
    assert message.payload[0] == ["job_1"]


def test_bells_of_a_device_with_workers_of_its_own_ring_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRECISION_HARDWARE_QUEUES", "h100")
    settings.settings.cache_clear()
    assert queue.names() == ["celery", "hw.h100"]
    assert not queue.rings("h100")
    queue.ring("job_1", "h100")
    assert queue.rings("h100")
    assert not queue.rings("l4")
    with queue.producer().connection_for_read() as connection:
        assert connection.SimpleQueue("hw.h100").get(timeout=1).payload[0] == ["job_1"]


def test_a_broker_that_is_away_has_no_bells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRECISION_BROKER_URL", "redis://127.0.0.1:1/0")
    settings.settings.cache_clear()
    queue.producer.cache_clear()
    assert not queue.rings("h100")
