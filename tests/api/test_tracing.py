"""Spans are off unless asked for, cost nothing then, and never stop the service."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from api import settings, tracing
from api.app import create_app
from api.serve import Options, ServeError, serve
from tests.collector import Collector, collecting

NOT_INSTALLED = """
import sys
class Gone:
    def find_spec(self, name, path=None, target=None):
        if name == {package!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Gone())
{then}
"""
OFF = """
import sys
from fastapi.testclient import TestClient
from api.app import create_app
with TestClient(create_app()) as client:
    client.get("/v1/jobs")
import workers.tasks
from api import tracing
tracing.start("worker")
with tracing.span("x", "internal") as span:
    span.say({"a": 1})
    span.name("y")
    span.failed("z")
    assert span.traceparent is None
tracing.flush()
# redis looks for the sdk's metrics by itself where it is installed.
ours = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "opentelemetry.proto")
print([name for name in sys.modules if name.startswith(ours)])
"""


@pytest.fixture
def collector(sqlite: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Have spans sent to a receiver."""
    with collecting() as listening:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", listening.url)
        yield listening
        tracing.stop()


def run(program: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-W", "ignore", "-c", program]
    return subprocess.run(command, capture_output=True, text=True)


def test_nothing_is_loaded_while_spans_are_off(sqlite: Path) -> None:
    done = run(OFF)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_standard_variable_is_enough(collector: Collector, key: str) -> None:
    with TestClient(create_app(), headers={"Authorization": f"Bearer {key}"}) as client:
        assert client.get("/v1/jobs").status_code == 200
        assert client.get("/livez").status_code == 200
    (span,) = (
        collector.spans()
    )  # it is sent at the end of the application at the latest
    assert (span.name, span.kind, span.parent) == ("GET /v1/jobs", "server", "")
    assert span.said["precision.request_id"].startswith("req_")


def test_an_error_is_its_class_and_not_its_message(collector: Collector) -> None:
    tracing.start("worker")
    with (
        pytest.raises(ValueError, match="secret"),
        tracing.span("outer", "internal") as outer,
        tracing.span("inner", "internal", outer.traceparent, {"a": 1, "b": None}),
    ):
        raise ValueError("a secret")
    tracing.flush()
    above, inner = collector.spans()
    assert (inner.parent, inner.trace) == (above.id, above.trace)
    assert (above.error, inner.error) == ("ValueError", "ValueError")
    assert inner.said == {"a": 1}
    assert b"secret" not in collector.receiver.received[0].body


@pytest.mark.parametrize("package", ["opentelemetry.sdk", "opentelemetry.exporter"])
@pytest.mark.parametrize(
    "then", ["from api.app import create_app; create_app()", "import workers.app"]
)
def test_without_the_packages_the_start_says_what_to_install(
    sqlite: Path, monkeypatch: pytest.MonkeyPatch, package: str, then: str
) -> None:
    program = NOT_INSTALLED.format(package=package, then=then)
    assert run(program).returncode == 0
    monkeypatch.setenv("PRECISION_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    done = run(program)
    assert done.returncode == 1
    assert "pip install 'precision[otel]'" in done.stderr.splitlines()[-1]


def test_serve_says_so_too(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_installed", lambda package: False)
    monkeypatch.setenv("PRECISION_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    settings.settings.cache_clear()
    with pytest.raises(ServeError, match=r"precision\[otel\]"):
        serve(Options(tmp_path, port=0), print, lambda address: None)


@pytest.mark.parametrize("url", ["collector:4318", "ftp://x", "http://x/?key=1"])
def test_an_address_that_is_none_is_refused(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("PRECISION_OTLP_ENDPOINT", url)
    settings.settings.cache_clear()
    with pytest.raises(ValueError, match="otlp_endpoint"):
        settings.settings()


def test_a_receiver_that_is_away_holds_nobody_up(
    sqlite: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # it accepts, and is silent
        monkeypatch.setenv(
            "OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}"
        )
        headers = {"Authorization": f"Bearer {key}"}
        with TestClient(create_app(), headers=headers) as client:
            began = time.monotonic()
            assert client.get("/v1/jobs").status_code == 200
            assert time.monotonic() - began < tracing.SEND_S
            began = time.monotonic()
            tracing.flush()
            assert time.monotonic() - began < 3 * tracing.SEND_S
    tracing.stop()


def test_the_sdk_can_be_switched_off(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert tracing.on()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not tracing.on()
