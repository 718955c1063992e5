"""A worker's lines are JSON and say which job, and which request, they are about."""

import json
import subprocess
import sys
from typing import Any

import pytest
import structlog

from api.transitions import Claim
from optimizer.spec import OptimizeSpec
from tests.service import eventually
from workers import logs
from workers.beat import Beat

SPEC = OptimizeSpec("tiny", "/models/tiny", "0" * 64, "h100")
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
CLAIM = Claim("job_1", "ten_1", 2, SPEC, request_id="req_1", traceparent=TRACE)

CODE = """
import logging, threading, structlog
from tests.workers.test_logs import CLAIM
from workers import logs
logs.configure("info")
logger = logging.getLogger("workers.x")
with logs.of(CLAIM):
    logger.warning("job %s", 7)
    structlog.get_logger().info("ours", n=1)
    try:
        1 / 0
    except ZeroDivisionError:
        logger.exception("failed")
logger.debug("not this")
logger.info("after")
"""


def lines() -> list[dict[str, Any]]:
    end = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, check=True
    )
    return [json.loads(line) for line in end.stderr.splitlines()]


def test_every_line_is_json_with_the_ids_of_the_job() -> None:
    library, ours, failure, after = lines()
    ids = {"job_id": "job_1", "attempt": 2, "request_id": "req_1", "traceparent": TRACE}
    for line in (library, ours, failure):
        assert ids.items() <= line.items()
    assert (library["event"], library["level"]) == ("job 7", "warning")
    assert (ours["event"], ours["n"]) == ("ours", 1)
    assert "ZeroDivisionError" in failure["exception"]
    assert "job_id" not in after


def test_the_thread_of_the_beat_knows_the_job(
    sqlite: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any]] = []

    def note(*_: object) -> None:
        seen.append(structlog.contextvars.get_contextvars())

    monkeypatch.setattr(Beat, "_lose_patience", note)
    with logs.of(CLAIM), Beat(CLAIM, leave=lambda code: None):
        eventually(lambda: seen)
    assert seen[0]["job_id"] == "job_1"
