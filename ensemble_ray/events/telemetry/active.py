"""The span that work in this process is part of.

In: a `traceparent`. Out: a block in which requests to models carry it, and in which spans that other libraries begin (a tool's own,
an instrumented HTTP client's) are its children, where OpenTelemetry's API is installed. Without tracing nothing is entered at all.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager

from ensemble_ray.errors import ValidationError
from ensemble_ray.events.tracing import RunTracer
from ensemble_ray.process.config import read_switch
from ensemble_ray.process.context import bounded_logger, current_traceparent, use_traceparent
from ensemble_ray.values.trace import RunTracing, TraceParent, parse_traceparent

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


def execution_span(tracing: RunTracing | None, instance: str) -> AbstractContextManager[None]:
    """Do the work of the block as part of the span of an execution; without tracing, do it as it is."""
    return _NOTHING if tracing is None else use_span(tracing.traceparent(tracing.execution_span(instance)))


def effect_span(tracing: RunTracing | None, name: str) -> AbstractContextManager[None]:
    """Do the work of the block as part of the span of an effect; without tracing, do it as it is."""
    return _NOTHING if tracing is None else use_span(tracing.traceparent(tracing.effect_span(name)))


@contextlib.contextmanager
def use_span(traceparent: str) -> Generator[None]:
    """Do the work of the block as part of that span; an empty or wrong `traceparent` changes nothing."""
    span = parse_traceparent(traceparent) if traceparent else None
    if span is None:
        yield
        return
    with use_traceparent(str(span)), _attach(span):
        yield


def caller_here() -> TraceParent | None:
    """Return the span that a run begun here is part of; None: there is none.

    It is the active one of OpenTelemetry, which in a tool of a run is the tool's or one that the tool began; else that of a request that
    asks for the run, or of a run in whose tool it begins where OpenTelemetry is not installed.
    """
    if "opentelemetry.trace" in sys.modules:  # else nobody has begun a span
        from opentelemetry import trace

        active = trace.get_current_span().get_span_context()
        if active.is_valid:
            flags = active.trace_flags
            return TraceParent(f"{active.trace_id:032x}", f"{active.span_id:016x}", is_sampled=flags.sampled)
    return parse_traceparent(current_traceparent())


@contextlib.contextmanager
def _attach(span: TraceParent) -> Generator[None]:
    """Make a span the active one of OpenTelemetry's API for the block, where that is installed."""
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
    """Return the listener that the environment adds to those of a run; none where one of them traces it already.

    It is the same for all runs of this process.

    Raises:
        ValidationError: the variable is neither on nor off.
    """
    if not read_switch(SWITCH, default=False) or any(isinstance(each, RunTracer) for each in listeners):
        return ()
    added = _make_exporter()
    return () if added is None else (added,)


@functools.cache
def _make_exporter() -> object | None:
    """Make it, once; what is wrong with it is told once, and concerns no run."""
    from ensemble_ray.events.telemetry.listener import OpenTelemetryListener

    try:
        return OpenTelemetryListener()
    except ValidationError as error:
        _log.warning("Runs are not sent: %s", error)
        return None
