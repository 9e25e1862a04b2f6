"""Who traces a run, and what its spans have in common.

In: the listeners of a run, what the environment says, who asks for it. Out: the context that every process of the run gets, and its
beginning and end for whoever traces it. A run that nobody traces has no context, and pays nothing.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ensemble_ray.errors import message_of
from ensemble_ray.events.telemetry.active import caller_here
from ensemble_ray.events.tracing import RunTracedEvent, RunTracer
from ensemble_ray.runs.showing import exit_reason_of
from ensemble_ray.values.trace import RunTracing, parse_traceparent

if TYPE_CHECKING:
    from ensemble_ray.runs.launching import Resumption
    from ensemble_ray.runs.run_events import RunEvents
    from ensemble_ray.values.outputs import RunState


class TracedRun:
    """One run, as those see it who trace it; made where the run is asked for.

    Attributes:
        context: What its spans have in common; None: nobody traces it.
        traceparent: The span that asked for it, also where nobody traces it now; None: none did.
    """

    def __init__(self, run_id: str, events: RunEvents, *, name: str, resumption: Resumption | None) -> None:
        """Find out who traces it, and who asks for it.

        Args:
            run_id: The run's id.
            events: Its listeners.
            name: What its team is called.
            resumption: That it goes on; then it stays part of the trace of who asked for it first.
        """
        caller = caller_here() if resumption is None else parse_traceparent(resumption.header.traceparent or "")
        tracers = [each for each in events.listeners if isinstance(each, RunTracer)]
        self.traceparent = None if caller is None else str(caller)
        self.context: RunTracing | None = None
        if tracers:
            self.context = RunTracing(
                run_id=run_id,
                caller=caller,
                is_sampled=any(each.samples(run_id, caller) for each in tracers),
                beginning=0 if resumption is None else resumption.beginning,
                told_until=0.0 if resumption is None else resumption.told_until,
            )
        self._events = events
        self._name = name
        self._workflow = ""
        #: Unix time, s; None: it has not begun
        self._started_at: float | None = None
        self._failure: BaseException | None = None

    def begin(self, workflow: str) -> None:
        """Note that it has begun."""
        self._started_at, self._workflow = time.time(), workflow

    def answer(self) -> None:
        """Note that the record answered it: nothing was done now."""
        self._started_at = None

    def fail(self, error: BaseException) -> None:
        """Note what it fails with."""
        self._failure = error

    def end(self, state: RunState) -> None:
        """Tell that it is over, behind all of its tasks (S-INT-31)."""
        if self.context is None or self._started_at is None:
            return
        failure = self._failure
        self._events.emit(
            RunTracedEvent(
                run_id=self.context.run_id,
                tracing=self.context,
                workflow=self._workflow,
                name=self._name,
                started_at=self._started_at,
                ended_at=max(time.time(), self._started_at),
                exit_reason=exit_reason_of(state),
                error_type="" if failure is None else type(failure).__name__,
                error_message="" if failure is None else message_of(failure),
            )
        )
