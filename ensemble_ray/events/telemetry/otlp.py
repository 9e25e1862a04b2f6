"""Exporters to an OTLP/HTTP receiver. An unreachable one is logged once (S-INT-34)."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, Self
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from opentelemetry.environment_variables import OTEL_METRICS_EXPORTER, OTEL_TRACES_EXPORTER
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_METRICS_ENDPOINT,
    OTEL_EXPORTER_OTLP_PROTOCOL,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
    OTEL_SDK_DISABLED,
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from ensemble_ray.events.telemetry import conventions as gen_ai
from ensemble_ray.events.telemetry.spans import SpanData
from ensemble_ray.process.config import package_version
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.trace import LlmInteraction, RunTracing, TraceParent

_log = bounded_logger(__name__)
_EXPORTER_LOGS = "opentelemetry.exporter"
_TRACES_PATH = "/v1/traces"
_DEFAULT_RECEIVER = "http://localhost:4318"
#: Shorter secrets would match any word.
_SHORTEST_SECRET = 6
_BATCH = 512


def processor_here() -> BatchSpanProcessor | None:
    """Return the span processor that the environment configures, or None."""
    if _says(OTEL_TRACES_EXPORTER) == "none":
        return None
    if _says(OTEL_EXPORTER_OTLP_PROTOCOL) not in ("", "http/protobuf"):
        _log.warning("Spans are sent by http/protobuf; %s asks for another protocol", OTEL_EXPORTER_OTLP_PROTOCOL)
    return BatchSpanProcessor(_SpanExporter())


def meters_here(resource: Resource) -> MeterProvider | None:
    """Return the meter provider that the environment configures, or None."""
    if _says(OTEL_METRICS_EXPORTER) == "none":
        return None
    reader = PeriodicExportingMetricReader(_MetricExporter())
    return MeterProvider([reader], resource=resource, shutdown_on_exit=False)


class UnsentError(Exception):
    """A receiver cannot be reached or refuses spans."""


def receiver_here(of: str = OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) -> str:
    """Return the receiver's URL for spans, or for that variable's data. It may contain secrets."""
    named = (os.environ.get(each) for each in (of, OTEL_EXPORTER_OTLP_ENDPOINT))
    return next((url for url in named if url), _DEFAULT_RECEIVER)


def send_spans(spans: Sequence[ReadableSpan], url: str | None) -> None:
    """Send spans to a receiver, by default the environment's; `/v1/traces` is added.

    Raises:
        UnsentError: the receiver cannot be reached or refuses the spans.
    """
    endpoint = None
    if url is not None:
        parts = urlsplit(url)
        endpoint = urlunsplit(parts._replace(path=parts.path.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH))
    exporter = OTLPSpanExporter(endpoint=endpoint)
    try:
        for first in range(0, len(spans), _BATCH):
            with _Quiet() as said:
                result = exporter.export(spans[first : first + _BATCH])
            if result is not SpanExportResult.SUCCESS:
                raise UnsentError(_hide_secrets(said.text, url or receiver_here()).rstrip(".") or "it did not say why")
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]  # the SDK's


def _hide_secrets(text: str, url: str) -> str:
    """Return a text without the parts of a URL that may be secret."""
    parts = urlsplit(url)
    user, _, _ = parts.netloc.rpartition("@")
    values = (each for _, each in parse_qsl(parts.query))
    whole = [each for each in (parts.query, user) if each]
    for secret in (*whole, *(each for each in (parts.password or "", *values) if len(each) >= _SHORTEST_SECRET)):
        text = text.replace(secret, "***")
    return text


def _says(variable: str) -> str:
    return os.environ.get(variable, "").strip().lower()


class _OutageNotice:
    """Logs an unreachable receiver, once per outage."""

    def __init__(self, what: str, receiver: str) -> None:
        self._what = what
        self._receiver = receiver
        self._is_given = False

    def note(self, why: str, *, is_sent: bool) -> None:
        if not is_sent and not self._is_given:
            why = _hide_secrets(why, self._receiver) or "they were refused"
            _log.warning("%s cannot be sent, and are lost until they can: %s", self._what, why)
        self._is_given = not is_sent


class _SpanExporter(OTLPSpanExporter):
    def __init__(self) -> None:
        super().__init__()
        self._outage_notice = _OutageNotice("Spans", receiver_here())

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with _Quiet() as said:
            result = super().export(spans)
        self._outage_notice.note(said.text, is_sent=result is SpanExportResult.SUCCESS)
        return result


class _MetricExporter(OTLPMetricExporter):
    def __init__(self) -> None:
        super().__init__()
        self._outage_notice = _OutageNotice("Metrics", receiver_here(OTEL_EXPORTER_OTLP_METRICS_ENDPOINT))

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        with _Quiet() as said:
            result = super().export(metrics_data, timeout_millis, **kwargs)
        self._outage_notice.note(said.text, is_sent=result is MetricExportResult.SUCCESS)
        return result


class _Lines(threading.local):
    #: None: lines are logged
    taken: list[str] | None = None


_lines = _Lines()
_filtered: set[str] = set()


class _Quiet:
    """Collects the SDK's log lines on this thread during a block, instead of logging them."""

    def __init__(self) -> None:
        self._taken: list[str] = []

    @property
    def text(self) -> str:
        return str(one_line(self._taken[-1])) if self._taken else ""

    def __enter__(self) -> Self:
        for name in list(logging.Logger.manager.loggerDict):
            if name.startswith(_EXPORTER_LOGS) and name not in _filtered:
                _filtered.add(name)
                # Before the SDK's filter of repeated lines. Filters do not apply to child loggers.
                logging.getLogger(name).filters.insert(0, _Filter())
        _lines.taken = self._taken
        return self

    def __exit__(self, *_: object) -> None:
        _lines.taken = None


class _Filter(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        if _lines.taken is None:
            return True
        _lines.taken.append(record.getMessage())
        return False


_KINDS = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT}
_US, _NS_PER_US = 1_000_000, 1_000
#: The SDK's name for an unnamed service.
_UNNAMED = "unknown_service"
_SCOPE = InstrumentationScope("ensemble_ray", package_version())


def is_switched_off() -> bool:
    """Return whether the environment switches the SDK off."""
    return _says(OTEL_SDK_DISABLED) == "true"


def own_resource() -> Resource:
    """Return the environment's resource; the default service name is `ensemble-ray`."""
    named = Resource.create()
    name = str(named.attributes.get(SERVICE_NAME, "")).strip()
    if name and not name.startswith(_UNNAMED):
        return named
    return named.merge(Resource({SERVICE_NAME: "ensemble-ray"}))


def samples(run_id: str, caller: TraceParent | None) -> bool:
    """Return whether the environment's sampler selects a run (`OTEL_TRACES_SAMPLER`)."""
    tracing = RunTracing(run_id=run_id, caller=caller)
    around = None
    if caller is not None:
        around = set_span_in_context(NonRecordingSpan(_context(caller, is_remote=True)))
    sampler = TracerProvider(shutdown_on_exit=False).sampler
    decided = sampler.should_sample(around, int(tracing.trace_id, 16), gen_ai.INVOKE_WORKFLOW)
    return decided.decision is Decision.RECORD_AND_SAMPLE


def _context(span: TraceParent, *, is_remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if span.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(span.trace_id, 16), int(span.span_id, 16), is_remote, flags)


def readable(span: SpanData, resource: Resource) -> ReadableSpan:
    """Convert a span for the SDK's exporters."""

    def named(span_id: str, *, is_remote: bool = False) -> SpanContext:
        return _context(TraceParent(span.trace_id, span_id, span.is_sampled), is_remote=is_remote)

    parent = None if span.parent_id is None else named(span.parent_id, is_remote=span.has_remote_parent)
    status = Status(StatusCode.ERROR, span.status_text or None) if span.is_error else Status(StatusCode.UNSET)
    return ReadableSpan(
        name=span.name,
        context=named(span.span_id),
        parent=parent,
        resource=resource,
        attributes=dict(span.attributes),
        events=[Event(each.name, dict(each.attributes), _nanoseconds(each.at)) for each in span.events],
        links=[Link(named(each)) for each in span.links],
        kind=_KINDS[span.kind],
        instrumentation_scope=_SCOPE,
        status=status,
        start_time=_nanoseconds(span.started_at),
        end_time=_nanoseconds(span.ended_at),
    )


def _nanoseconds(seconds: float) -> int:
    """Convert Unix time, rounded to microseconds, so that no span ends after its parent."""
    return round(seconds * _US) * _NS_PER_US


class Histograms:
    """The conventions' histograms of tokens and durations (S-INT-35)."""

    def __init__(self, provider: MeterProvider) -> None:
        """Create the histograms of a provider."""
        meter = provider.get_meter("ensemble_ray", package_version())
        self._tokens = meter.create_histogram(
            gen_ai.TOKEN_USAGE,
            unit="{token}",
            description="Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=gen_ai.TOKEN_BUCKETS,
        )
        self._durations = meter.create_histogram(
            gen_ai.OPERATION_DURATION,
            unit="s",
            description="GenAI operation duration.",
            explicit_bucket_boundaries_advisory=gen_ai.DURATION_BUCKETS,
        )

    def add(self, interaction: LlmInteraction) -> None:
        """Record a model call."""
        named = {gen_ai.OPERATION: gen_ai.CHAT, gen_ai.PROVIDER: interaction.provider or "_OTHER"}
        if interaction.model:
            named[gen_ai.REQUEST_MODEL] = interaction.model
        for kind, tokens in (("input", interaction.input_tokens), ("output", interaction.output_tokens)):
            if tokens >= 0:
                self._tokens.record(tokens, {**named, gen_ai.TOKEN_TYPE: kind})
        self._durations.record(interaction.latency.total_seconds(), named)
