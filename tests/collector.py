"""A real receiver of OTLP over HTTP, which reads what it gets."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as Sent

from tests.receiver import Receiver, receiver

KINDS = {1: "internal", 2: "server", 3: "client", 5: "consumer"}


@dataclass(frozen=True)
class Span:
    """A span as it arrived."""

    service: str
    name: str
    kind: str
    trace: str
    id: str
    parent: str
    error: str | None  # None: it went well
    begun: int  # ns
    ended: int
    said: dict[str, Any]


@dataclass(frozen=True)
class Collector:
    """Where it listens, and what came."""

    receiver: Receiver

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.receiver.port}"

    def spans(self, **wanted: str) -> list[Span]:
        """Return what came so far and has these fields, in the order of its beginning."""
        found = [span for came in self.receiver.received for span in _read(came.body)]
        found.sort(key=lambda span: span.begun)
        return [s for s in found if all(getattr(s, k) == v for k, v in wanted.items())]


def _read(body: bytes) -> Iterator[Span]:
    request = ExportTraceServiceRequest.FromString(body)
    for resource in request.resource_spans:
        about = _plain(resource.resource.attributes)
        for scope in resource.scope_spans:
            for sent in scope.spans:
                yield _span(about["service.name"], sent)


def _span(service: str, sent: Sent) -> Span:
    return Span(
        service,
        sent.name,
        KINDS[sent.kind],
        sent.trace_id.hex(),
        sent.span_id.hex(),
        sent.parent_span_id.hex(),
        sent.status.message if sent.status.code == 2 else None,
        sent.start_time_unix_nano,
        sent.end_time_unix_nano,
        _plain(sent.attributes),
    )


def _plain(attributes: Any) -> dict[str, Any]:
    return {a.key: a.value.string_value or a.value.int_value for a in attributes}


@contextmanager
def collecting() -> Iterator[Collector]:
    """Listen until the block ends."""
    with receiver() as listening:
        yield Collector(listening)
