"""The active span of this process, for `traceparent` of model requests and as parent of OpenTelemetry's spans."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager

from ensemble_ray.errors import ValidationError
from ensemble_ray.events import RunTracer
from ensemble_ray.process.config import read_switch
from ensemble_ray.process.context import bounded_logger, current_traceparent, use_traceparent
from ensemble_ray.values.trace import RunTracing, TraceParent, parse_traceparent

#: The span of a block without tracing.
NO_SPAN: AbstractContextManager[None] = contextlib.nullcontext()


def execution_span(tracing: RunTracing | None, instance: str) -> AbstractContextManager[None]:
    """Run the block within the span of an execution, if there is tracing."""
    return NO_SPAN if tracing is None else use_span(tracing.traceparent(tracing.execution_span(instance)))


def effect_span(tracing: RunTracing | None, name: str) -> AbstractContextManager[None]:
    """Run the block within the span of an effect, if there is tracing."""
    return NO_SPAN if tracing is None else use_span(tracing.traceparent(tracing.effect_span(name)))


@contextlib.contextmanager
def use_span(traceparent: str) -> Generator[None]:
    """Run the block within that span; an empty or invalid `traceparent` has no effect."""
    span = parse_traceparent(traceparent) if traceparent else None
    if span is None:
        yield
        return
    with use_traceparent(str(span)), _attach(span):
        yield


def caller_here() -> TraceParent | None:
    """Return the parent span of a run that starts here, or None.

    This is OpenTelemetry's active span, such as that of a tool, else the span of the request or of the run whose tool starts this run.
    """
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import trace

        active = trace.get_current_span().get_span_context()
        if active.is_valid:
            flags = active.trace_flags
            return TraceParent(f"{active.trace_id:032x}", f"{active.span_id:016x}", is_sampled=flags.sampled)
    return parse_traceparent(current_traceparent())


@contextlib.contextmanager
def _attach(span: TraceParent) -> Generator[None]:
    """Activate a span in OpenTelemetry's API for the block, if the API is installed."""
    try:
        from opentelemetry import context, trace
    except ImportError:
        yield
        return
    made = trace.SpanContext(
        trace_id=int(span.trace_id, 16),
        span_id=int(span.span_id, 16),
        is_remote=False,
        trace_flags=trace.TraceFlags(trace.TraceFlags.SAMPLED if span.is_sampled else trace.TraceFlags.DEFAULT),
    )
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(made)))
    try:
        yield
    finally:
        context.detach(token)


SWITCH = "ENSEMBLE_RAY_OTEL"
_log = bounded_logger(__name__)


def tracers_here(listeners: Sequence[object]) -> tuple[object, ...]:
    """Return the listener that the environment adds to a run, unless a listener already traces it.

    All runs of this process share it.
    """
    if not read_switch(SWITCH, default=False) or any(isinstance(each, RunTracer) for each in listeners):
        return ()
    added = _make_exporter()
    return () if added is None else (added,)


@functools.cache
def _make_exporter() -> object | None:
    """Create the listener once. Its error is logged and affects no run."""
    from ensemble_ray.events.telemetry.listener import OpenTelemetryListener

    try:
        return OpenTelemetryListener()
    except ValidationError as error:
        _log.warning("Runs are not sent: %s", error)
        return None
