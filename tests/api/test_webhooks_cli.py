"""`precision webhooks`, against the real API."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import structlog
from fastapi.testclient import TestClient

from api import webhooks_cli
from api.cli import main
from api.client import Client
from tests.api.hooks import take, tell

Run = Callable[..., tuple[int, str, str]]
URL = "https://hooks.example.com/a"


@pytest.fixture
def precision(
    client: TestClient,
    key: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Run]:
    """Run `precision webhooks` as a shell would; gives code, stdout, stderr."""

    def serve(request: httpx.Request) -> httpx.Response:
        answer = client.request(
            request.method,
            str(request.url),
            headers=dict(request.headers),
            content=request.content,
        )
        return httpx.Response(answer.status_code, content=answer.content)

    def connect(url: str | None, given: str | None, data_dir: Path) -> Client:
        transport = httpx.MockTransport(serve)
        return Client("http://testserver", key, transport=transport)

    monkeypatch.setattr(webhooks_cli, "connect", connect)
    monkeypatch.setenv("COLUMNS", "200")
    # The service's own log goes to stdout, which is what we test.
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(("webhooks", *arguments))
        printed = capsys.readouterr()
        return int(end.value.code or 0), printed.out, printed.err

    yield run
    structlog.reset_defaults()


def test_an_endpoint_from_its_addition_to_its_end(precision: Run) -> None:
    code, out, err = precision(
        "add", URL, "--event", "job.started", "--event", "job.failed"
    )
    assert code == 0, err
    endpoint, secret = out.split()
    assert secret.startswith("whsec_")
    _, out, _ = precision("list")
    assert all(word in out for word in (endpoint, URL, "ok", "job.failed, job.started"))
    assert secret not in out
    _, delivery, _ = precision("test", endpoint)
    (letter,) = take()
    tell(letter, 500)
    _, out, _ = precision("deliveries", endpoint)
    (line,) = [line for line in out.splitlines() if delivery.strip() in line]
    assert "webhook.test" in line
    assert "failed" in line
    assert "1: 500" in line
    _, out, _ = precision("deliveries", endpoint, "--state", "delivered", "--json")
    assert json.loads(out) == []
    assert precision("delete", endpoint)[:2] == (0, f"deleted {endpoint}\n")
    _, out, _ = precision("list", "--json")
    assert json.loads(out) == []


def test_what_the_service_refuses_is_said(precision: Run) -> None:
    code, _, err = precision("add", "https://10.0.0.1/")
    assert code == 1
    assert "not a public address" in err
    code, _, err = precision("test", "we_unknown")
    assert code == 1
    assert "we_unknown" in err
