"""Exporters to an OTLP/HTTP receiver, by the SDK's. Package: telemetry.

They read where the receiver is from `OTEL_EXPORTER_OTLP_*`. Must never happen: a line in the log for each attempt that failed; that the
receiver cannot be had is told once (S-INT-34).
"""

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
)
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.text.foreign_text import one_line

__all__ = ["UnsentError", "meters_here", "processor_here", "receiver_here", "send_spans"]

_log = bounded_logger(__name__)
_EXPORTER_LOGS = "opentelemetry.exporter"
_TRACES_PATH = "/v1/traces"
_DEFAULT_RECEIVER = "http://localhost:4318"
#: Characters of a value that is looked for in what others say: a shorter one would be found in any word.
_SHORTEST_SECRET = 6
#: Spans in one request of a record that is sent.
_BATCH = 512


def processor_here() -> BatchSpanProcessor | None:
    """Return what sends spans where the environment says; None: it says nowhere."""
    if _says(OTEL_TRACES_EXPORTER) == "none":
        return None
    if _says(OTEL_EXPORTER_OTLP_PROTOCOL) not in ("", "http/protobuf"):
        _log.warning("Spans are sent by http/protobuf; %s asks for another protocol", OTEL_EXPORTER_OTLP_PROTOCOL)
    return BatchSpanProcessor(_SpanExporter())


def meters_here(resource: Resource) -> MeterProvider | None:
    """Return what sends figures where the environment says; None: it says nowhere."""
    if _says(OTEL_METRICS_EXPORTER) == "none":
        return None
    reader = PeriodicExportingMetricReader(_MetricExporter())
    return MeterProvider([reader], resource=resource, shutdown_on_exit=False)


class UnsentError(Exception):
    """A receiver cannot be reached or refuses spans; says why."""


def receiver_here(of: str = OTEL_EXPORTER_OTLP_TRACES_ENDPOINT) -> str:
    """Return where the environment sends spans, or what that variable is of; it may hold a user, a password and a key."""
    named = (os.environ.get(each) for each in (of, OTEL_EXPORTER_OTLP_ENDPOINT))
    return next((url for url in named if url), _DEFAULT_RECEIVER)


def send_spans(spans: Sequence[ReadableSpan], url: str | None) -> None:
    """Send spans now, and return when the receiver has them.

    Args:
        spans: What is sent.
        url: Of the receiver, with or without `/v1/traces`; None: where the environment says.

    Raises:
        UnsentError: it cannot be reached, or refuses them.
    """
    exporter = OTLPSpanExporter(endpoint=None if url is None else _traces_url(url))
    try:
        for first in range(0, len(spans), _BATCH):
            with _Quiet() as said:
                result = exporter.export(spans[first : first + _BATCH])
            if result is not SpanExportResult.SUCCESS:
                raise UnsentError(_hide_secrets(said.text, url or receiver_here()).rstrip(".") or "it did not say why")
    finally:
        exporter.shutdown()  # type: ignore[no-untyped-call]  # the SDK's


def _traces_url(url: str) -> str:
    parts = urlsplit(url)
    path = parts.path.rstrip("/").removesuffix(_TRACES_PATH)
    return urlunsplit(parts._replace(path=path + _TRACES_PATH))


def _hide_secrets(text: str, url: str) -> str:
    """Return what was said of a request without what may be secret in its URL."""
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
    """Logs that a receiver cannot be reached, once until it can again."""

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
    """Sends spans."""

    def __init__(self) -> None:
        super().__init__()
        self._outage_notice = _OutageNotice("Spans", receiver_here())

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send a batch."""
        with _Quiet() as said:
            result = super().export(spans)
        self._outage_notice.note(said.text, is_sent=result is SpanExportResult.SUCCESS)
        return result


class _MetricExporter(OTLPMetricExporter):
    """Sends figures."""

    def __init__(self) -> None:
        super().__init__()
        self._outage_notice = _OutageNotice("Metrics", receiver_here(OTEL_EXPORTER_OTLP_METRICS_ENDPOINT))

    def export(
        self, metrics_data: MetricsData, timeout_millis: float | None = 10_000, **kwargs: Any
    ) -> MetricExportResult:
        """Send what was counted."""
        with _Quiet() as said:
            result = super().export(metrics_data, timeout_millis, **kwargs)
        self._outage_notice.note(said.text, is_sent=result is MetricExportResult.SUCCESS)
        return result


class _Lines(threading.local):
    #: where lines of this thread go; None: into the log
    taken: list[str] | None = None


_lines = _Lines()
_filtered: set[str] = set()


class _Quiet:
    """Keeps what the SDK's exporters log on this thread out of the log, for a block, and remembers it."""

    def __init__(self) -> None:
        self._taken: list[str] = []

    @property
    def text(self) -> str:
        """What was said last, as one line."""
        return str(one_line(self._taken[-1])) if self._taken else ""

    def __enter__(self) -> Self:
        _filter_loggers()
        _lines.taken = self._taken
        return self

    def __exit__(self, *_: object) -> None:
        _lines.taken = None


class _Filter(logging.Filter):
    """Takes lines of exporters that work for us; those of others pass."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _lines.taken is None:
            return True
        _lines.taken.append(record.getMessage())
        return False


def _filter_loggers() -> None:
    """Have each logger of the exporters filtered, once; a filter of a logger does not concern those below it."""
    for name in list(logging.Logger.manager.loggerDict):
        if name.startswith(_EXPORTER_LOGS) and name not in _filtered:
            _filtered.add(name)
            # Before the SDK's own filter, which drops what was said a moment ago.
            logging.getLogger(name).filters.insert(0, _Filter())
