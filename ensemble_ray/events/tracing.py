"""What whoever traces runs hears of them: how each execution went, and how the run did. Pure values.

They are for listeners that have these methods, such as `OpenTelemetryListener`; streams of events do not have them, and nothing
of them is made where nobody traces.
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
    """An execution of a task is over, however it ended; work that was handed on has one of its own."""

    method: ClassVar[str] = "on_task_traced"
    tracing: RunTracing
    trace: TaskTrace
    #: `completed`, `failed`, `exited` or `cancelled`
    status: str
    #: class of the error; empty: it did not fail
    error_type: str = ""
    #: what it says
    error_message: str = ""
    #: the models' own ids of their tool requests, by model call and request
    call_ids: Sequence[Sequence[str]] = ()
    #: whether a function did it, and no agent
    is_handler: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTracedEvent(Event):
    """A run is over, behind all of its tasks; one that was refused has none."""

    method: ClassVar[str] = "on_run_traced"
    tracing: RunTracing
    workflow: str
    #: what its team is called; empty: it has no name
    name: str
    #: of this beginning, Unix time, s
    started_at: float
    ended_at: float
    exit_reason: ExitReason
    error_type: str = ""
    error_message: str = ""


#: Listener method -> event type, of those that streams do not have.
TRACED_EVENTS: Mapping[str, type[Event]] = {each.method: each for each in (TaskTracedEvent, RunTracedEvent)}


@runtime_checkable
class RunTracer(Protocol):
    """A listener that traces runs (S-INT-30)."""

    def samples(self, run_id: str, caller: TraceParent | None, /) -> bool:
        """Return whether the spans of a run are to be sent."""
        ...

    def on_task_traced(self, event: TaskTracedEvent, /) -> object:
        """Take the end of an execution."""
        ...

    def on_run_traced(self, event: RunTracedEvent, /) -> object:
        """Take the end of a run."""
        ...
