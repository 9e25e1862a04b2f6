"""WebSocketStreamingListener: sends what happens in runs to the pages of a dashboard.

In: events, each run's on a thread of its own. Out: messages to the hub. One listener for all runs of a dashboard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ensemble_ray.events import EnsembleCompletedEvent, EnsembleStartedEvent
from ensemble_ray.events.delivery import EnsembleListener
from ensemble_ray.events.messages import RunMessages
from ensemble_ray.process.forks import SystemClock, new_lock
from ensemble_ray.record.following import LiveEvents
from ensemble_ray.values.outputs import ExitReason

if TYPE_CHECKING:
    from datetime import timedelta

    from ensemble_ray.events import Event, LlmIterationStartedEvent, TokenEvent
    from ensemble_ray.studio.dashboard.hub import MessageHub


class WebSocketStreamingListener(EnsembleListener):
    """Tells the pages of a dashboard of every event; `WebDashboard.streaming_listener` gives it."""

    def __init__(self, hub: MessageHub) -> None:
        """Make one that sends its messages to a hub."""
        self._hub = hub
        self._clock = SystemClock()
        self._lock = new_lock()
        self._runs: dict[str, RunMessages] = {}
        #: the run that began last: events that name none are of that
        self._latest = ""
        #: what comes of runs that go on, for those who follow one of them
        self._live: dict[str, LiveEvents] = {}

    def live_of(self, run_id: str) -> LiveEvents | None:
        """Return what happens just now in a run; None where it does not go on here. From any thread."""
        return self._live.get(run_id)

    def on_ensemble_started(self, ensemble_id: str, workflow: str, total_tasks: int) -> None:
        """Tell that a run begins."""
        with self._lock:
            self._latest = ensemble_id
            self._live[ensemble_id] = LiveEvents()
        self._send(
            EnsembleStartedEvent(
                run_id=ensemble_id, ensemble_id=ensemble_id, workflow=workflow, total_tasks=total_tasks
            )
        )

    def on_ensemble_completed(self, ensemble_id: str, total_duration: object, exit_reason: object) -> None:
        """Tell that a run is over."""
        self._send(
            EnsembleCompletedEvent(
                run_id=ensemble_id,
                ensemble_id=ensemble_id,
                total_duration=cast("timedelta", total_duration),
                exit_reason=ExitReason(str(exit_reason)),
            )
        )

    def on_run_ended(self, run_id: str, exit_reason: ExitReason) -> None:
        """Tell that a run is over, where that was not told, since it failed; forget it."""
        with self._lock:
            run, live = self._runs.pop(run_id, None), self._live.pop(run_id, None)
        if live is not None:
            live.close()
        if run is not None and (message := run.end(exit_reason.value, self._clock.now())) is not None:
            self._hub.publish(run_id, message)

    def on_llm_iteration_started(self, event: LlmIterationStartedEvent) -> None:
        """Send it, also to pages that follow its run alone."""
        if (live := self._live.get(event.run_id)) is not None:
            live.begin_answer(event)
        self._send(event)

    def on_token(self, event: TokenEvent) -> None:
        """Send it, also to pages that follow its run alone."""
        if (live := self._live.get(event.run_id)) is not None:
            live.on_token(event)
        self._send(event)

    def _send(self, event: Event) -> None:
        """Send it."""
        with self._lock:
            run_id = event.run_id or self._latest
            run = self._runs.setdefault(run_id, RunMessages(run_id))
        if (message := run.apply(event, self._clock.now())) is not None:
            self._hub.publish(run_id, message)

    on_task_start = on_task_input = on_task_complete = on_task_failed = on_tool_call = _send
    on_llm_iteration_completed = on_loop_iteration_completed = on_graph_state_completed = _send
    on_delegation_started = on_delegation_completed = on_delegation_failed = _send
