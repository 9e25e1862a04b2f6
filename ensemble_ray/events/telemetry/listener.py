"""OpenTelemetryListener: sends the spans and figures of runs as they happen.

In: executions and runs that are over. Out: their spans, handed to a processor of OpenTelemetry's SDK, which sends them in batches on its
own thread. Must never happen: a run that waits for a receiver, or that fails because of one.
"""

from __future__ import annotations

import atexit
import os
import weakref
from typing import TYPE_CHECKING

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.events.telemetry.flushing import Flusher, flush_all
from ensemble_ray.events.telemetry.spans import (
    Content,
    UnitTimes,
    content_mode,
    new_interactions,
    run_spans,
    task_spans,
)
from ensemble_ray.process.forks import new_lock

if TYPE_CHECKING:
    from collections.abc import Iterable

    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.trace import SpanProcessor

    from ensemble_ray.events.telemetry.spans import SpanData
    from ensemble_ray.events.tracing import RunTracedEvent, TaskTracedEvent
    from ensemble_ray.values.trace import TraceParent


#: How long the end of a process waits for what has not been sent.
FLUSH_S = 5.0


def missing_packages(error: ModuleNotFoundError) -> ValidationError:
    """Return what tells that OpenTelemetry's packages are not installed."""
    return ValidationError(
        f"Sending spans needs packages that are not installed ({error.name}). What to do: pip install 'ensemble-ray[otel]'"
    )


class OpenTelemetryListener(EnsembleListener):
    """Sends each run to an OpenTelemetry receiver as spans and figures of the conventions for generative AI.

    Where to, as whom and how many is said by the variables `OTEL_*`. Needs the extra `otel`.

    Args:
        content: Whether prompts, answers, arguments and results are sent; None: as
            `OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT` says, else not.
        span_processor: What takes the spans, in place of what sends them by OTLP/HTTP where the environment says.
        meter_provider: What takes the figures, likewise.

    Raises:
        ValidationError: the packages are not installed, a variable is wrong, or `content` is.
    """

    def __init__(
        self,
        *,
        content: bool | str | None = None,
        span_processor: SpanProcessor | None = None,
        meter_provider: MeterProvider | None = None,
    ) -> None:
        self._content: Content = content_mode(content, os.environ)
        self._processor, self._meters = span_processor, meter_provider
        try:
            from ensemble_ray.events.telemetry import otlp as sdk

            self._sdk = sdk
            self._is_off = sdk.is_switched_off()
            self._resource = sdk.own_resource()
            if not self._is_off:
                sdk.samples("", None)  # no run is to be the first that hears of a wrong variable
                self._fill_in()
        except ModuleNotFoundError as error:
            raise missing_packages(error) from error
        except ValueError as error:
            raise ValidationError(
                f"A variable OTEL_* is wrong: {message_of(error).rstrip('.')}. What to do: correct it, or unset it"
            ) from error
        self._figures = None if self._is_off or self._meters is None else sdk.Figures(self._meters)
        #: of runs that go on
        self._units: dict[str, UnitTimes] = {}
        self._lock = new_lock()
        self._is_closed = False
        #: sends what waits
        self._flusher = Flusher([each for each in (self._processor, self._meters) if each is not None])
        # A listener that nobody holds any more has sent what it had, and is collected. The SDK's threads of one that was not closed stay.
        _open.add(self._flusher)

    def _fill_in(self) -> None:
        """Take what the environment says where the user has nothing of it."""
        if self._processor is not None and self._meters is not None:
            return
        from ensemble_ray.events.telemetry import otlp

        self._processor = self._processor or otlp.processor_here()
        self._meters = self._meters or otlp.meters_here(self._resource)

    def samples(self, run_id: str, caller: TraceParent | None, /) -> bool:
        """Return whether the spans of a run are sent, as `OTEL_TRACES_SAMPLER` says."""
        return self._sends and self._sdk.samples(run_id, caller)

    def on_task_traced(self, event: TaskTracedEvent, /) -> None:
        """Send the spans of an execution that is over."""
        if not self._sends:
            return
        with self._lock:
            self._units.setdefault(event.run_id, UnitTimes()).add(event)
        self._send(task_spans(event, self._content))
        if self._figures is not None:
            for interaction in new_interactions(event):
                self._figures.add(interaction)

    def on_run_traced(self, event: RunTracedEvent, /) -> None:
        """Send the span of a run that is over, and those of its units; nobody waits until they have arrived."""
        if not self._sends:
            return
        with self._lock:
            units = self._units.pop(event.run_id, None) or UnitTimes()
        self._send(run_spans(event, units, self._content))
        self._flusher.ask()

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Send what has not been sent; return whether that was done in time. The end of the process does so by itself.

        A closed listener sends nothing.
        """
        return not self._is_closed and self._flusher.wait(self._flusher.ask(), timeout_s)

    def close(self, timeout_s: float = FLUSH_S) -> bool:
        """Send what has not been sent, and end the threads that send; return whether that was done in time.

        What takes longer goes on beside the program. What is traced later is not sent.
        """
        self._is_closed = True
        _open.discard(self._flusher)
        return self._flusher.close(timeout_s)

    @property
    def _sends(self) -> bool:
        return not self._is_off and not self._is_closed

    def _send(self, spans: Iterable[SpanData]) -> None:
        self._flusher.begin()
        if self._processor is not None:
            for span in spans:
                self._processor.on_end(self._sdk.readable(span, self._resource))


#: Of listeners that were not closed.
_open = weakref.WeakSet[Flusher]()


@atexit.register
def flush_at_exit() -> None:
    """Send what no listener has sent; all of them together wait for `FLUSH_S`."""
    flush_all(list(_open), FLUSH_S)
