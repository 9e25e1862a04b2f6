"""Listeners: who wants to know. Layer: above ports.

Callbacks run in the driver process, each listener on a delivery thread of its own (`delivery.py`).
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ensemble_ray.events import (
    EVENT_TYPES,
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    EnsembleCompletedEvent,
    EnsembleStartedEvent,
    Event,
    FileChangedEvent,
    GraphStateCompletedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    LoopIterationCompletedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskInputEvent,
    TaskReflectedEvent,
    TaskStartEvent,
    TokenEvent,
    ToolCallEvent,
)
from ensemble_ray.events.tracing import TRACED_EVENTS
from ensemble_ray.values.outputs import ExitReason

__all__ = ["EnsembleListener", "RunEndListener", "call_listener", "wanted_by"]


class EnsembleListener:
    """Override what you need; every method does nothing by default.

    Methods may be `async`; they then run on the delivery thread's loop. An attribute `trace_id`, when not None, is
    put on the run's trace.
    """

    def on_ensemble_started(self, ensemble_id: str, workflow: str, total_tasks: int) -> object:
        """React to the start of the run."""

    def on_ensemble_completed(self, ensemble_id: str, total_duration: object, exit_reason: object) -> object:
        """React to the end of a run without failure."""

    def on_task_start(self, event: TaskStartEvent) -> object:
        """React to the start of a task."""

    def on_task_complete(self, event: TaskCompleteEvent) -> object:
        """React to the success of a task."""

    def on_task_failed(self, event: TaskFailedEvent) -> object:
        """React to the failure of a task."""

    def on_tool_call(self, event: ToolCallEvent) -> object:
        """React to a tool call that was made."""

    def on_task_input(self, event: TaskInputEvent) -> object:
        """Prompts are built."""

    def on_llm_iteration_started(self, event: LlmIterationStartedEvent) -> object:
        """React to the start of a model call."""

    def on_llm_iteration_completed(self, event: LlmIterationCompletedEvent) -> object:
        """React to the end of a model call."""

    def on_token(self, event: TokenEvent) -> object:
        """React to a fragment of a streamed answer."""

    def on_delegation_started(self, event: DelegationStartedEvent) -> object:
        """React to the start of a delegation."""

    def on_delegation_completed(self, event: DelegationCompletedEvent) -> object:
        """React to the answer of a worker."""

    def on_delegation_failed(self, event: DelegationFailedEvent) -> object:
        """React to a delegation that was refused, or whose worker failed."""

    def on_file_changed(self, event: FileChangedEvent) -> object:
        """React to a file that a file tool wrote."""

    def on_loop_iteration_completed(self, event: LoopIterationCompletedEvent) -> object:
        """React to the end of an iteration of a loop, before its predicate is asked."""

    def on_graph_state_completed(self, event: GraphStateCompletedEvent) -> object:
        """React to the end of a step of a graph, after the next state is chosen."""

    def on_task_reflected(self, event: TaskReflectedEvent) -> object:
        """React to a reflection on a task's output that was stored."""


@runtime_checkable
class RunEndListener(Protocol):
    """A listener that wants to know when nothing of a run comes any more, also where it failed (S-EVT-23)."""

    def on_run_ended(self, run_id: str, exit_reason: ExitReason, /) -> object:
        """Take notice that the run is over, behind all of its events."""
        ...


def wanted_by(listener: object) -> frozenset[str]:
    """Return the listener methods that it overrides or has; events of other types need not be built for it."""
    wanted: set[str] = set()
    for method in EVENT_TYPES:
        own = getattr(type(listener), method, None) or getattr(listener, method, None)
        if own is not None and own is not getattr(EnsembleListener, method):
            wanted.add(method)
    wanted.update(method for method in TRACED_EVENTS if hasattr(listener, method))
    return frozenset(wanted)


def call_listener(listener: object, event: Event) -> object:
    """Call the listener's method for that event; gives what it returned (perhaps an awaitable)."""
    method = getattr(listener, event.method)
    if isinstance(event, EnsembleStartedEvent):
        return method(event.ensemble_id, event.workflow, event.total_tasks)
    if isinstance(event, EnsembleCompletedEvent):
        return method(event.ensemble_id, event.total_duration, event.exit_reason)
    return method(event)
