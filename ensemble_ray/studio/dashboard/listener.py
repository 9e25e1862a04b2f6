"""A listener that sends the events of all runs to the pages of a dashboard. Every run delivers on a separate thread."""

from __future__ import annotations

from datetime import timedelta
from typing import cast

from ensemble_ray import events
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.events.messages import RunMessages
from ensemble_ray.process.concurrency import SystemClock, new_lock
from ensemble_ray.record.following import LiveEvents
from ensemble_ray.studio.dashboard.hub import MessageHub
from ensemble_ray.values.outputs import ExitReason


class WebSocketStreamingListener(EnsembleListener):
    """Sends every event to the pages of a dashboard, as `WebDashboard.streaming_listener`."""

    def __init__(self, hub: MessageHub) -> None:
        self._hub = hub
        self._clock = SystemClock()
        self._lock = new_lock()
        self._runs: dict[str, RunMessages] = {}
        self._latest = ""  # the run of events without a run id
        self._live: dict[str, LiveEvents] = {}  # of active runs

    def live_of(self, run_id: str) -> LiveEvents | None:
        """Return the live events of an active run. Thread-safe."""
        return self._live.get(run_id)

    def on_ensemble_started(self, ensemble_id: str, workflow: str, total_tasks: int) -> None:
        """Report the start of a run."""
        with self._lock:
            self._latest = ensemble_id
            self._live[ensemble_id] = LiveEvents()
        ids = {"run_id": ensemble_id, "ensemble_id": ensemble_id}
        self._send(events.EnsembleStartedEvent(**ids, workflow=workflow, total_tasks=total_tasks))

    def on_ensemble_completed(self, ensemble_id: str, total_duration: object, exit_reason: object) -> None:
        """Report the end of a run."""
        ids = {"run_id": ensemble_id, "ensemble_id": ensemble_id}
        took, reason = cast("timedelta", total_duration), ExitReason(str(exit_reason))
        self._send(events.EnsembleCompletedEvent(**ids, total_duration=took, exit_reason=reason))

    def on_run_ended(self, run_id: str, exit_reason: ExitReason) -> None:
        """Remove a run, and report its end if no event did, since it failed."""
        with self._lock:
            run, live = self._runs.pop(run_id, None), self._live.pop(run_id, None)
        if live is not None:
            live.close()
        if run is not None and (message := run.end(exit_reason.value, self._clock.now())) is not None:
            self._hub.publish(run_id, message)

    def on_llm_iteration_started(self, event: events.LlmIterationStartedEvent) -> None:
        """Send an event to the pages, and to the followers of its run."""
        if (live := self._live.get(event.run_id)) is not None:
            live.begin_answer(event)
        self._send(event)

    def on_token(self, event: events.TokenEvent) -> None:
        """Send an event to the pages, and to the followers of its run."""
        if (live := self._live.get(event.run_id)) is not None:
            live.on_token(event)
        self._send(event)

    def _send(self, event: events.Event) -> None:
        """Send an event to the pages."""
        with self._lock:
            run_id = event.run_id or self._latest
            run = self._runs.setdefault(run_id, RunMessages(run_id))
        if (message := run.apply(event, self._clock.now())) is not None:
            self._hub.publish(run_id, message)

    on_task_start = on_task_input = on_task_complete = on_task_failed = on_tool_call = _send
    on_llm_iteration_completed = on_loop_iteration_completed = on_graph_state_completed = _send
    on_delegation_started = on_delegation_completed = on_delegation_failed = _send
