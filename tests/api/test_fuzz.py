"""schemathesis against the running service: all checks, thousands of requests.

No answer is a failure of ours, every error is a problem document, and everything else
is as the description says, with a key and without one.
"""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from api import auth, db
from tests.api import tenancy
from tests.api.serving import Served, served

CONFIG = Path(__file__).parent / "fuzz" / "schemathesis.toml"
ROOM = {  # so that requests end for what they say and not for how many there were
    "PRECISION_REQUESTS_PER_MINUTE": "0",
    "PRECISION_CREATES_PER_MINUTE": "0",
    "PRECISION_REFUSALS_PER_MINUTE": "0",
    "PRECISION_MAX_QUEUED": "100000",
    "PRECISION_LOG_LEVEL": "error",
}
WITH_KEY, WITHOUT_KEY = 4_500, 500  # requests at least
SECONDS = 560  # usually 90; on two cores that others use as well

pytestmark = [pytest.mark.service, pytest.mark.slow, pytest.mark.timeout(SECONDS)]


def fuzz(url: str, *options: str, **there: str) -> None:
    """Run schemathesis with ids of what is there. Fails with all that it found."""
    program = Path(sys.executable).with_name("schemathesis")
    command = [str(program), "--config-file", str(CONFIG), "run"]
    command += [f"{url}/openapi.json", "--workers", "2", "--no-color", *options]
    environment = {**os.environ, "FUZZ_IDS": json.dumps(there)}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]


def statuses(service: Served) -> Counter[str]:
    """Return how often the service answered each status, by its own count."""
    text = service.get("/metrics").text
    line = r'precision_http_request_duration_seconds_count{.*status="(\d+)".*} (\S+)'
    found: Counter[str] = Counter()
    for status, count in re.findall(line, text):
        found[status] += int(float(count))
    return found


def test_with_a_key_all_is_as_the_description_says(tiny: Path, key: str) -> None:
    with db.transaction() as session:
        there = tenancy.furnish(session, auth.tenant_named(session, "acme").id)
    del there["name"]  # of an artifact, a device, a format
    with served(**ROOM) as service:
        bearer = f"Authorization: Bearer {key}"
        fuzz(service.url, "--header", bearer, "--max-examples", "50", **there)
        found = statuses(service)
    assert found.total() >= WITH_KEY
    assert [status for status in found if status.startswith("5")] == []
    assert found["200"] + found["201"] + found["202"] > WITH_KEY / 20  # it got inside


def test_without_a_key_nobody_gets_in(sqlite: Path) -> None:
    with served(**ROOM) as service:
        fuzz(service.url, "--max-examples", "12", "--phases", "examples,fuzzing")
        found = statuses(service)
    assert found.total() >= WITHOUT_KEY
    assert [status for status in found if status.startswith("5")] == []
    assert found["201"] == found["202"] == found["204"] == 0
