"""`precision webhooks`, against the real API."""

import json

import pytest

from tests.api.conftest import Run
from tests.api.hooks import take, tell

URL = "https://hooks.example.com/a"


def test_an_endpoint_from_its_addition_to_its_end(
    precision: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = precision(
        "webhooks", "add", URL, "--event", "job.started", "--event", "job.failed"
    )
    assert code == 0, err
    endpoint, secret = out.split()
    assert secret.startswith("whsec_")
    _, out, _ = precision("webhooks", "list")
    assert all(word in out for word in (endpoint, URL, "ok", "job.failed, job.started"))
    assert secret not in out
    _, delivery, _ = precision("webhooks", "test", endpoint)
    (letter,) = take()
    tell(letter, 500)
    _, out, _ = precision("webhooks", "deliveries", endpoint)
    (line,) = [line for line in out.splitlines() if delivery.strip() in line]
    assert "webhook.test" in line
    assert "failed" in line
    assert "1: 500" in line
    _, out, _ = precision(
        "webhooks", "deliveries", endpoint, "--state", "delivered", "--json"
    )
    assert json.loads(out) == []
    code, _, err = precision("webhooks", "delete", endpoint)
    assert (code, err) == (0, f"deleted {endpoint}\n")
    _, out, _ = precision("webhooks", "list", "--json")
    assert json.loads(out) == []


def test_what_the_service_refuses_is_said(precision: Run) -> None:
    code, _, err = precision("webhooks", "add", "https://10.0.0.1/")
    assert code == 1
    assert "not a public address" in err
    code, _, err = precision("webhooks", "test", "we_unknown")
    assert code == 1
    assert "we_unknown" in err
