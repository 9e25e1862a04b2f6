"""Events for listeners that trace runs, such as `OpenTelemetryListener`.

Event streams do not contain them, and they are built only if a listener traces the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from ensemble_ray.events import Event
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.trace import RunTracing, TaskTrace, TraceParent


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskTracedEvent(Event):
    """An execution of a task ended, with any status; delegated work has its own event."""

    method: ClassVar[str] = "on_task_traced"
    tracing: RunTracing
    trace: TaskTrace
    #: `completed`, `failed`, `exited` or `cancelled`
    status: str
    #: class of the error; empty if the task did not fail
    error_type: str = ""
    #: text of the error
    error_message: str = ""
    #: the models' ids of their tool requests, by model call and request
    call_ids: Sequence[Sequence[str]] = ()
    #: whether a function executed the task instead of an agent
    is_handler: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTracedEvent(Event):
    """A run ended. It follows the events of all tasks; a refused run has none."""

    method: ClassVar[str] = "on_run_traced"
    tracing: RunTracing
    workflow: str
    #: name of the team; empty if it has none
    name: str
    #: start of this beginning of the run, Unix time, s
    started_at: float
    ended_at: float
    exit_reason: ExitReason
    error_type: str = ""
    error_message: str = ""


#: Listener method -> event type, for the events that streams do not contain.
TRACED_EVENTS: Mapping[str, type[Event]] = {each.method: each for each in (TaskTracedEvent, RunTracedEvent)}


@runtime_checkable
class RunTracer(Protocol):
    """A listener that traces runs (S-INT-30)."""

    def samples(self, run_id: str, caller: TraceParent | None, /) -> bool:
        """Return whether to send the spans of a run."""
        ...

    def on_task_traced(self, event: TaskTracedEvent, /) -> object:
        """Receive the end of an execution."""
        ...

    def on_run_traced(self, event: RunTracedEvent, /) -> object:
        """Receive the end of a run."""
        ...
