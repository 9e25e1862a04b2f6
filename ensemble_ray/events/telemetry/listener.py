"""OpenTelemetryListener sends the spans and metrics of runs live, through a span processor of OpenTelemetry's SDK.

The SDK sends batches on its own thread: no run waits for a receiver or fails because of one.
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


#: How long process exit waits for unsent spans and metrics, s.
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
        self._content: Content = content_mode(content, os.environ)
        self._processor, self._meters = span_processor, meter_provider
        try:
            from ensemble_ray.events.telemetry import otlp as sdk

            self._sdk = sdk
            self._is_off = sdk.is_switched_off()
            self._resource = sdk.own_resource()
            if not self._is_off:
                sdk.samples("", None)  # fail here, and not in the first run, if a variable is invalid
                self._fill_in()
        except ModuleNotFoundError as error:
            raise missing_packages(error) from error
        except ValueError as error:
            raise ValidationError(
                f"A variable OTEL_* is wrong: {message_of(error).rstrip('.')}. What to do: correct it, or unset it"
            ) from error
        self._figures = None if self._is_off or self._meters is None else sdk.Figures(self._meters)
        #: of running runs, by run id
        self._units: dict[str, UnitTimes] = {}
        self._lock = new_lock()
        self._is_closed = False
        #: sends pending spans and metrics
        self._flusher = Flusher([each for each in (self._processor, self._meters) if each is not None])
        # Weak: an unreferenced listener flushes and is collected. If it was not closed, the SDK's threads stay.
        _open.add(self._flusher)

    def _fill_in(self) -> None:
        """Use the environment's exporters if the user passed none."""
        if self._processor is not None and self._meters is not None:
            return
        from ensemble_ray.events.telemetry import otlp

        self._processor = self._processor or otlp.processor_here()
        self._meters = self._meters or otlp.meters_here(self._resource)

    def samples(self, run_id: str, caller: TraceParent | None, /) -> bool:
        """Return whether `OTEL_TRACES_SAMPLER` samples a run."""
        return self._sends and self._sdk.samples(run_id, caller)

    def on_task_traced(self, event: TaskTracedEvent, /) -> None:
        """Send the spans of an execution that ended."""
        if not self._sends:
            return
        with self._lock:
            self._units.setdefault(event.run_id, UnitTimes()).add(event)
        self._send(task_spans(event, self._content))
        if self._figures is not None:
            for interaction in new_interactions(event):
                self._figures.add(interaction)

    def on_run_traced(self, event: RunTracedEvent, /) -> None:
        """Send the spans of a run that ended and of its units, without waiting for the receiver."""
        if not self._sends:
            return
        with self._lock:
            units = self._units.pop(event.run_id, None) or UnitTimes()
        self._send(run_spans(event, units, self._content))
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

    def _send(self, spans: Iterable[SpanData]) -> None:
        self._flusher.begin()
        if self._processor is not None:
            for span in spans:
                self._processor.on_end(self._sdk.readable(span, self._resource))


#: Flushers of listeners that are not closed.
_open = weakref.WeakSet[Flusher]()


@atexit.register
def flush_at_exit() -> None:
    """Flush all open listeners, within `FLUSH_S` in total."""
    flush_all(list(_open), FLUSH_S)
