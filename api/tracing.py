"""Spans for OpenTelemetry, where the operator has somewhere to send them.

    request       server    GET /v1/jobs/{job_id}
      └ job       consumer  precision.run_job: its row keeps the request's `traceparent`
          └ phase internal  load, calibrate, sweep, …
    webhook       client    POST, continued by the receiver

Without `PRECISION_OTLP_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` every span is `NONE`,
and nothing of OpenTelemetry is loaded. Spans have ids of requests and jobs, and neither
what callers wrote nor messages of errors. A process calls `start` once, after it was
forked or spawned: the thread that sends does not survive a fork.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from api.settings import settings

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
TIMEOUTS = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
SEND_S = 3.0  # a worker whose receiver is away waits so long after a job

Kind = Literal["server", "consumer", "client", "internal"]
Attributes = Mapping[str, str | int | None]


class NotInstalled(RuntimeError):
    """Spans are asked for, and what makes them is not there."""


@dataclass(frozen=True, slots=True)
class Span:
    """One span, or none: then nothing that is said is kept."""

    made: Any = None

    def name(self, name: str) -> None:
        """Call it so: the route of a request is known late."""
        if self.made is not None:
            self.made.update_name(name)

    def say(self, attributes: Mapping[str, str | int | None]) -> None:
        """Add attributes; None is none."""
        if self.made is not None:
            known = {k: v for k, v in attributes.items() if v is not None}
            self.made.set_attributes(known)

    def failed(self, why: str) -> None:
        """Say that it went wrong: `why` is a code, never a message."""
        if self.made is not None:
            from opentelemetry.trace import Status, StatusCode

            self.made.set_status(Status(StatusCode.ERROR, why))

    @property
    def traceparent(self) -> str | None:
        """Where it is in its trace, W3C: for whoever goes on with it."""
        if self.made is None:
            return None
        at = self.made.get_span_context()
        return f"00-{at.trace_id:032x}-{at.span_id:016x}-{int(at.trace_flags):02x}"

    @property
    def headers(self) -> dict[str, str]:
        """What a request has that goes on with it; {} where there is no span."""
        own = self.traceparent
        return {} if own is None else {"traceparent": own}


NONE = Span()


class _Sender:
    """What makes this process's spans, and sends them. None: not started, or off."""

    def __init__(self) -> None:
        self.provider: Any = None


_sender = _Sender()


def on() -> bool:
    """Return whether the operator has somewhere to send spans."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return False
    named = any(os.environ.get(name) for name in ENDPOINTS)
    return bool(settings().otlp_endpoint) or named


def require() -> None:
    """Raise NotInstalled where spans are asked for, and what makes them is not there."""
    if on() and not all(map(_installed, PACKAGES)):
        raise NotInstalled(
            "spans are to be sent (PRECISION_OTLP_ENDPOINT or "
            "OTEL_EXPORTER_OTLP_ENDPOINT), and OpenTelemetry is not installed: "
            "pip install 'precision[otel]', or unset both"
        )


def _installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # nor what it is a part of
        return False


def start(part: str) -> None:
    """Send spans from now on, as a part of the service: `api`, `worker`.

    Raises NotInstalled. Harmless where spans are off, or were started.
    """
    require()
    if not on() or _sender.provider is not None:
        return
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create(_named(part))  # OTEL_RESOURCE_ATTRIBUTES add to it
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    _sender.provider = provider


def _named(part: str) -> dict[str, str]:
    from api.metrics import service_version

    own = os.environ.get("OTEL_SERVICE_NAME") or f"precision-{part}"
    return {"service.name": own, "service.version": service_version()}


def _exporter() -> Any:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    base = settings().otlp_endpoint.rstrip("/")
    said = any(os.environ.get(name) for name in TIMEOUTS)
    return OTLPSpanExporter(
        endpoint=f"{base}/v1/traces" if base else None,
        timeout=None if said else SEND_S,
    )


def flush() -> None:
    """Send what has ended. Called before a process goes, which may be at any moment."""
    if _sender.provider is not None:
        _sender.provider.force_flush(int(SEND_S * 1000))


def stop() -> None:
    """Send what has ended, and no more after it."""
    provider, _sender.provider = _sender.provider, None
    if provider is not None:
        provider.shutdown()


@contextmanager
def span(
    name: str,
    kind: Kind,
    parent: str | None = None,
    attributes: Attributes | None = None,
) -> Iterator[Span]:
    """Make a span of the block, in the trace of `parent`, W3C; None: a trace of its own.

    An error that leaves the block is its class's name in the span.
    """
    if _sender.provider is None:
        yield NONE
        return
    from opentelemetry.trace import SpanKind

    tracer = _sender.provider.get_tracer("precision")
    how = {"context": _context(parent), "kind": SpanKind[kind.upper()]}
    made = Span(tracer.start_span(name, **how))
    made.say(attributes or {})
    try:
        yield made
    except BaseException as error:
        made.failed(type(error).__name__)
        raise
    finally:
        made.made.end()


def _context(parent: str | None) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import (
        TraceContextTextMapPropagator,
    )

    # A context of its own: no span of somebody else's becomes the parent.
    said = {} if parent is None else {"traceparent": parent}
    return TraceContextTextMapPropagator().extract(said, Context())
