"""Spans and figures as OpenTelemetry's SDK has them. Package: telemetry; it and `otlp` know the SDK, and nothing else does.

In: plain spans and model calls. Out: the SDK's spans, histograms, and what its sampler says. The variables `OTEL_*` are read by the SDK.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from opentelemetry.sdk.environment_variables import OTEL_SDK_DISABLED
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
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
from ensemble_ray.process.config import package_version
from ensemble_ray.values.tracing import RunTracing, TraceParent

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider

    from ensemble_ray.events.telemetry.span import SpanData
    from ensemble_ray.values.trace import LlmInteraction

__all__ = ["Figures", "is_switched_off", "own_resource", "readable", "samples"]

_KINDS = {"internal": SpanKind.INTERNAL, "client": SpanKind.CLIENT}
_US, _NS_PER_US = 1_000_000, 1_000
#: What the SDK calls a service that nobody names, with the process behind it.
_UNNAMED = "unknown_service"
_SCOPE = InstrumentationScope("ensemble_ray", package_version())


def is_switched_off() -> bool:
    """Return whether the environment switches the SDK off."""
    return os.environ.get(OTEL_SDK_DISABLED, "").strip().lower() == "true"


def own_resource() -> Resource:
    """Return what sends spans, as the environment says; without a name it is this library."""
    named = Resource.create()
    name = str(named.attributes.get(SERVICE_NAME, "")).strip()
    if name and not name.startswith(_UNNAMED):
        return named
    return named.merge(Resource({SERVICE_NAME: "ensemble-ray"}))


def samples(run_id: str, caller: TraceParent | None) -> bool:
    """Return whether the environment's sampler wants the spans of a run (`OTEL_TRACES_SAMPLER`)."""
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
    """Return a span as the SDK's exporters take it."""

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
    """Convert the time since the epoch, to microseconds as traces have it: a span must not end after a parent of the same time."""
    return round(seconds * _US) * _NS_PER_US


class Figures:
    """The histograms of the conventions: tokens of model calls, and how long those took (S-INT-35)."""

    def __init__(self, provider: MeterProvider) -> None:
        """Make them; the provider sends them."""
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
        """Count a call of a model."""
        named = {gen_ai.OPERATION: gen_ai.CHAT, gen_ai.PROVIDER: interaction.provider or "_OTHER"}
        if interaction.model:
            named[gen_ai.REQUEST_MODEL] = interaction.model
        for kind, tokens in (("input", interaction.input_tokens), ("output", interaction.output_tokens)):
            if tokens >= 0:
                self._tokens.record(tokens, {**named, gen_ai.TOKEN_TYPE: kind})
        self._durations.record(interaction.latency.total_seconds(), named)
