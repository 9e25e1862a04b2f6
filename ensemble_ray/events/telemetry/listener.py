"""The current span, and a listener that sends spans and metrics of runs through OpenTelemetry's SDK on its own thread."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.events import RunTracedEvent, RunTracer, TaskTracedEvent
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.events.telemetry import spans
from ensemble_ray.process.concurrency import new_lock, track
from ensemble_ray.process.config import read_switch
from ensemble_ray.process.context import bounded_logger, current_traceparent, use_traceparent
from ensemble_ray.values.trace import RunTracing, TraceParent, parse_traceparent

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import SpanProcessor


_log = bounded_logger(__name__)
#: How long process exit waits, s.
FLUSH_S = 5.0


def missing_packages(error: ModuleNotFoundError) -> ValidationError:
    """Return the error for missing OpenTelemetry packages."""
    return ValidationError(
        f"Sending spans needs packages that are not installed ({error.name}). What to do: pip install 'ensemble-ray[otel]'"
    )


class OpenTelemetryListener(EnsembleListener):
    """Sends each run to an OpenTelemetry receiver as spans and metrics of the conventions for generative AI.

    The variables `OTEL_*` configure the receiver, the service name and the sampling. Needs the extra `otel`.

    Args:
        content: Whether to send prompts, answers, arguments and results; None: as configured by
            `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT`, by default no.
        span_processor: Receives the spans, instead of the OTLP/HTTP exporter that the environment configures.
        meter_provider: Receives the metrics, instead of the exporter that the environment configures.

    Raises:
        ValidationError: the packages are not installed, or a variable or `content` is invalid.
    """

    def __init__(
        self,
        *,
        content: bool | str | None = None,
        span_processor: SpanProcessor | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._content: spans.Content = spans.content_mode(content, os.environ)
        self._processor, self._meters = span_processor, meter_provider
        try:
            from ensemble_ray.events.telemetry import otlp as sdk

            self._sdk = sdk
            self._is_off = sdk.is_switched_off()
            self._resource = sdk.own_resource()
            if not self._is_off:
                sdk.samples("", None)  # so that an invalid variable fails here
                self._processor = self._processor or sdk.processor_here()
                self._meters = self._meters or sdk.meters_here(self._resource)
        except ModuleNotFoundError as error:
            raise missing_packages(error) from error
        except ValueError as error:
            raise ValidationError(
                f"A variable OTEL_* is wrong: {message_of(error).rstrip('.')}. What to do: correct it, or unset it"
            ) from error
        self._figures = None if self._is_off or self._meters is None else sdk.Histograms(self._meters)
        self._units: dict[str, spans.UnitTimes] = {}
        self._lock = new_lock()
        self._is_closed = False
        self._flusher = Flusher([each for each in (self._processor, self._meters) if each is not None])
        # Weak: an unreferenced listener flushes and is collected.
        _open.add(self._flusher)

    def samples(self, run_id: str, caller: TraceParent | None, /) -> bool:
        """Return whether `OTEL_TRACES_SAMPLER` samples a run."""
        return self._sends and self._sdk.samples(run_id, caller)

    def on_task_traced(self, event: TaskTracedEvent, /) -> None:
        """Send the spans of an execution that ended."""
        if not self._sends:
            return
        with self._lock:
            self._units.setdefault(event.run_id, spans.UnitTimes()).add(event)
        self._send(spans.task_spans(event, self._content))
        if self._figures is not None:
            for interaction in spans.new_interactions(event):
                self._figures.add(interaction)

    def on_run_traced(self, event: RunTracedEvent, /) -> None:
        """Send the spans of a run that ended and of its units, without waiting for the receiver."""
        if not self._sends:
            return
        with self._lock:
            units = self._units.pop(event.run_id, None) or spans.UnitTimes()
        self._send(spans.run_spans(event, units, self._content))
        self._flusher.ask()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Send pending spans and metrics; return whether they were sent in time. Process exit does so automatically.

        A closed listener sends no spans and returns False.
        """
        return not self._is_closed and self._flusher.wait(self._flusher.ask(), timeout_s)

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Send pending spans and metrics and end the sending threads; return whether both finished in time.

        After the timeout, sending continues in the background. Later spans are not sent.
        """
        self._is_closed = True
        _open.discard(self._flusher)
        return self._flusher.close(timeout_s)

    @property
    def _sends(self) -> bool:
        return not self._is_off and not self._is_closed

    def _send(self, ended: Iterable[spans.SpanData]) -> None:
        self._flusher.begin()
        if self._processor is not None:
            for span in ended:
                self._processor.on_end(self._sdk.readable(span, self._resource))


class Flushable(Protocol):
    """A span processor or a meter provider."""

    def force_flush(self) -> object:
        """Send pending data."""
        ...

    def shutdown(self) -> object:
        """Stop permanently."""
        ...


class Flusher:
    """Flushes senders on its own thread; a request during a flush starts another one.

    The thread starts with `begin`, because none can start at process exit from Python 3.12 on. It ends when the flusher is closed or
    garbage-collected.
    """

    def __init__(self, senders: Sequence[Flushable]) -> None:
        """Create a flusher of these senders."""
        work = _Work(senders)
        self.begin, self.ask, self.wait, self.close = work.begin, work.ask, work.wait, work.close
        weakref.finalize(self, work.end).atexit = False


def flush_all(flushers: Sequence[Flusher], timeout_s: float) -> None:
    """Flush all of them in parallel and wait; a timeout is logged once."""
    ends_at = time.monotonic() + timeout_s
    wishes = [(each, each.ask()) for each in flushers]
    for flusher, number in wishes:
        left_s = max(0.0, ends_at - time.monotonic())
        if not flusher.wait(number, left_s) and time.monotonic() >= ends_at:
            return


class _Work:
    """The requests of a flusher and their thread, which does not refer to the listener."""

    def __init__(self, senders: Sequence[Flushable]) -> None:
        self._senders = senders
        self._changed = threading.Condition()
        self._asked = 0
        self._done = 0
        self._failed = 0
        self._thread: threading.Thread | None = None
        #: end after the last request
        self._is_ending = False
        #: request after which the senders are shut down
        self._last: int | None = None
        self._has_told = False
        track(self)

    def after_fork(self) -> None:
        self._changed = threading.Condition()
        self._done, self._thread = self._asked, None

    def ask(self) -> int:
        """Request a flush, and return its number."""
        with self._changed:
            self._asked += 1
            self._begin()
            self._changed.notify_all()
            return self._asked

    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait for a request; return whether its data was sent in time. A timeout is logged once."""
        with self._changed:
            if self._changed.wait_for(lambda: self._done >= number, timeout_s):
                return number > self._failed
            is_told, self._has_told = self._has_told, True
        if not is_told:
            _log.warning(
                "Spans or metrics have not been sent in time: their receiver does not answer. Pending data is sent in the background, "
                "and lost when the program ends. What to do: check the receiver and OTEL_EXPORTER_OTLP_ENDPOINT"
            )
        return False

    def end(self) -> None:
        with self._changed:
            self._is_ending = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> bool:
        ends_at = time.monotonic() + timeout_s
        with self._changed:
            if self._last is None:
                self._is_ending, self._last = True, self._asked + 1
                self.ask()
            number, thread = self._last, self._thread
        is_sent = self.wait(number, timeout_s)
        if thread is None:
            return is_sent
        thread.join(max(0.0, ends_at - time.monotonic()))
        return is_sent and not thread.is_alive()

    def begin(self) -> None:
        with self._changed:
            self._begin()

    def _begin(self) -> None:
        """Start the thread; at process exit, when none can start, serve the requests on this one."""
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._run, name="ensemble-ray-telemetry", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._fulfil(self._asked)
            if self._last is not None:
                self._try([each.shutdown for each in self._senders])
            return
        self._thread = thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._asked > self._done or self._is_ending)
                number = self._asked
                if number == self._done:
                    break
            self._fulfil(number)
        if self._last is not None:
            self._try([each.shutdown for each in self._senders])

    def _fulfil(self, number: int) -> None:
        is_sent = self._try([each.force_flush for each in self._senders])
        with self._changed:
            self._done = number
            self._failed = self._failed if is_sent else number
            self._changed.notify_all()

    def _try(self, calls: Sequence[Callable[[], object]]) -> bool:
        """Return whether no call failed. Failures are logged once until a success (S-INT-34)."""
        failure: Exception | None = None
        for each in calls:
            try:
                each()
            except Exception as error:  # noqa: BLE001  of the user or the SDK
                failure = failure or error
        if failure is not None and not self._has_told:
            _log.warning("Spans or metrics cannot be sent: %s: %s", type(failure).__name__, message_of(failure))
        self._has_told = failure is not None
        return failure is None


_open = weakref.WeakSet[Flusher]()


@atexit.register
def flush_at_exit() -> None:
    """Flush all open listeners, within `FLUSH_S` in total."""
    flush_all(list(_open), FLUSH_S)


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
    try:
        return OpenTelemetryListener()
    except ValidationError as error:
        _log.warning("Runs are not sent: %s", error)
        return None
