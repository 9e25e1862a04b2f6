"""Events of a run, rebuilt from the messages of its record."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ensemble_ray import events
from ensemble_ray.errors import EnsembleError
from ensemble_ray.events import Event
from ensemble_ray.facts.fact import as_text
from ensemble_ray.values.delegation import DelegationRequest, DelegationResponse, DelegationStatus
from ensemble_ray.values.metrics import TaskMetrics
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.events.messages import WireEvent

_EVENTS: Mapping[str, type[Event]] = {
    "ensemble_started": events.EnsembleStartedEvent,
    "task_started": events.TaskStartEvent,
    "task_completed": events.TaskCompleteEvent,
    "task_failed": events.TaskFailedEvent,
    "tool_called": events.ToolCallEvent,
    "llm_iteration_completed": events.LlmIterationCompletedEvent,
    "delegation_started": events.DelegationStartedEvent,
    "delegation_completed": events.DelegationCompletedEvent,
    "delegation_failed": events.DelegationFailedEvent,
    "loop_iteration_completed": events.LoopIterationCompletedEvent,
    "graph_state_completed": events.GraphStateCompletedEvent,
    "batch_progress": events.BatchProgressEvent,
}
# Defaults by the field's type.
_EMPTY: Mapping[object, object] = {"str": "", "int": 0, "timedelta": timedelta(), "Sequence[ToolCallRequest]": ()}


def event_of(message: WireEvent) -> Event | None:
    """Return None if progress ignores the event."""
    event_type = _EVENTS.get(message.type)
    if event_type is None:
        return None
    data, found = message.data, dict[str, Any]()
    for field in fields(event_type):
        if (make := _CONVERTED.get(field.name)) is not None:
            found[field.name] = make(data)
        elif f"{field.name}_ms" in data:
            found[field.name] = _duration(data, field.name)
        else:
            found[field.name] = data.get(field.name, _EMPTY.get(field.type))
    return event_type(**found)


def _duration(data: Mapping[str, object], name: str = "duration") -> timedelta:
    value = data.get(f"{name}_ms")
    return timedelta(milliseconds=value if isinstance(value, int) else 0)


def _output(data: Mapping[str, object]) -> TaskOutput:
    """Messages lack the text."""
    task, role = as_text(data.get("task_description")), as_text(data.get("agent_role"))
    took, at, counts = _duration(data), utc_of(0), TaskMetrics.EMPTY
    return TaskOutput(raw="", task_description=task, agent_role=role, completed_at=at, duration=took, metrics=counts)


# Fields that messages have in another form or lack.
_CONVERTED: Mapping[str, Callable[[Mapping[str, object]], object]] = {
    "task_output": _output,
    "output": _output,
    "iteration_outputs": lambda _: {},
    "cause": lambda data: EnsembleError(as_text(data.get("reason"))),
    "failure_reason": lambda data: as_text(data.get("reason")),
    "delegation_depth": lambda _: 1,
    "request": lambda data: DelegationRequest(
        task_id=as_text(data.get("delegation_id")),
        agent_role=as_text(data.get("worker_role")),
        task_description=as_text(data.get("task_description")),
    ),
    "response": lambda data: DelegationResponse(
        task_id=as_text(data.get("delegation_id")),
        status=DelegationStatus.FAILURE if "reason" in data else DelegationStatus.SUCCESS,
        worker_role=as_text(data.get("worker_role")),
        duration=_duration(data),
    ),
}
