"""A receiver of OTLP over HTTP, in a thread of the test's process: it decodes what a collector would be sent."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """A span as it came."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    attributes: Mapping[str, Any]
    links: tuple[str, ...]
    is_error: bool
    start_ns: int
    end_ns: int
    service: str
    events: tuple[str, ...] = ()


@dataclass
class Receiver:
    """What came until now."""

    url: str = ""
    spans: list[Received] = field(default_factory=list[Received])
    #: by name: the histogram's points
    metrics: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    #: answers this status
    status: int = 200

    def take_spans(self, body: bytes) -> None:
        """Take a request for spans."""
        request = ExportTraceServiceRequest.FromString(body)
        for each in request.resource_spans:
            service = _values(each.resource.attributes).get("service.name", "")
            self.spans += [_received(span, service) for scope in each.scope_spans for span in scope.spans]

    def take_metrics(self, body: bytes) -> None:
        """Take a request for figures."""
        request = ExportMetricsServiceRequest.FromString(body)
        for each in request.resource_metrics:
            for metric in (one for scope in each.scope_metrics for one in scope.metrics):
                self.metrics[metric.name] = list(metric.histogram.data_points)

    def one(self, name: str) -> Received:
        """Return the only span of that name."""
        (found,) = [each for each in self.spans if each.name == name]
        return found

    def parent(self, span: Received) -> str:
        """Return the name of a span's parent; empty: it has none, or none that came."""
        return next((each.name for each in self.spans if each.span_id == span.parent_id), "")

    def tree(self) -> set[tuple[str, str]]:
        """Return the spans by name and parent's name."""
        return {(each.name, self.parent(each)) for each in self.spans}


def values(attributes: Any) -> dict[str, Any]:
    """Return attributes as Python has them."""
    return _values(attributes)


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


def _received(span: Any, service: str) -> Received:
    return Received(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=span.kind,
        attributes=_values(span.attributes),
        links=tuple(each.span_id.hex() for each in span.links),
        is_error=span.status.code == 2,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        service=service,
        events=tuple(each.name for each in span.events),
    )


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Receive until the block is left."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if receiver.status == 200:
                take = {"/v1/traces": receiver.take_spans, "/v1/metrics": receiver.take_metrics}[
                    self.path.partition("?")[0]
                ]
                take(body)
            self.send_response(receiver.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            receiver.url = f"http://127.0.0.1:{server.server_port}"
            yield receiver
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def receiving_by_environment(patch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """Receive what is sent where the environment says, until the block is left."""
    with receiving() as found:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
        yield found


@contextmanager
def closed_port() -> Iterator[str]:
    """Hold a port at which connections are refused; gives host and port."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and nobody listens
        yield f"127.0.0.1:{held.getsockname()[1]}"
