"""Messages about a run as the events that its progress is made of. Pure.

In: messages as a follower reads them from a record, in order. Out: events, with what messages tell; the rest is empty.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, TypedDict

from ensemble_ray.errors import EnsembleError
from ensemble_ray.events import (
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    EnsembleStartedEvent,
    Event,
    GraphStateCompletedEvent,
    LlmIterationCompletedEvent,
    LoopIterationCompletedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskStartEvent,
    ToolCallEvent,
)
from ensemble_ray.facts.lenient import as_text
from ensemble_ray.values.delegation import DelegationRequest, DelegationResponse, DelegationStatus
from ensemble_ray.values.metrics import TaskMetrics
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.events.messages import WireEvent

_Data = Mapping[str, object]


class FollowedEvents:
    """Makes events of one run's messages."""

    def __init__(self) -> None:
        #: input and output tokens of tasks that run, by instance
        self._tokens: defaultdict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        #: ids of delegations that somebody was asked for
        self._asked: set[str] = set()

    def event_of(self, message: WireEvent) -> Event | None:
        """Return the event of a message; None where no progress is made of it."""
        data = message.data
        match message.type:
            case "ensemble_started":
                return EnsembleStartedEvent(
                    ensemble_id=as_text(data.get("ensemble_id")),
                    workflow=as_text(data.get("workflow")),
                    total_tasks=_number(data, "total_tasks"),
                )
            case "task_started":
                return TaskStartEvent(**_task(data))
            case "task_completed":
                return self._complete(data)
            case "task_failed":
                reason = EnsembleError(as_text(data.get("reason")))
                return TaskFailedEvent(**_task(data), cause=reason, duration=timedelta())
            case "llm_iteration_completed":
                return self._answer(data)
            case "tool_called":
                return _tool_call(data)
            case "delegation_started" | "delegation_completed" | "delegation_failed" as kind:
                return self._delegation(kind, data)
            case "loop_iteration_completed":
                return LoopIterationCompletedEvent(
                    instance=as_text(data.get("instance")),
                    loop_name=as_text(data.get("loop_name")),
                    iteration_number=_number(data, "iteration_number"),
                    max_iterations=_number(data, "max_iterations"),
                    iteration_outputs={},
                    iteration_duration=_duration(data, "iteration_duration_ms"),
                )
            case "graph_state_completed":
                return GraphStateCompletedEvent(
                    instance=as_text(data.get("instance")),
                    graph_name=as_text(data.get("graph_name")),
                    state_name=as_text(data.get("state_name")),
                    step_number=_number(data, "step_number"),
                    max_steps=_number(data, "max_steps"),
                    output=_output(data),
                    next_state=as_text(data.get("next_state")),
                    step_duration=_duration(data, "step_duration_ms"),
                )
            case _:
                return None

    def _complete(self, data: _Data) -> TaskCompleteEvent:
        sent, received = self._tokens.pop(as_text(data.get("instance")), (0, 0))
        metrics = TaskMetrics.EMPTY.replace(input_tokens=sent, output_tokens=received)
        return TaskCompleteEvent(
            **_task(data), task_output=_output(data, metrics), duration=_duration(data, "duration_ms")
        )

    def _answer(self, data: _Data) -> LlmIterationCompletedEvent:
        instance = as_text(data.get("instance"))
        sent, received = _number(data, "input_tokens"), _number(data, "output_tokens")
        before = self._tokens[instance]
        self._tokens[instance] = (before[0] + sent, before[1] + received)
        return LlmIterationCompletedEvent(
            instance=instance,
            agent_role=as_text(data.get("agent_role")),
            task_description=as_text(data.get("task_description")),
            iteration_index=_number(data, "iteration_index"),
            response_type="tool_calls" if data.get("response_type") == "tool_calls" else "final_answer",
            response_text=None,
            tool_requests=(),
            input_tokens=sent,
            output_tokens=received,
            latency=_duration(data, "latency_ms"),
        )

    def _delegation(self, kind: str, data: _Data) -> Event:
        delegation_id, worker = as_text(data.get("delegation_id")), as_text(data.get("worker_role"))
        parties = {
            "instance": as_text(data.get("instance")),
            "delegation_id": delegation_id,
            "delegating_agent_role": as_text(data.get("delegating_agent_role")),
            "worker_role": worker,
        }
        duration = _duration(data, "duration_ms")
        if kind == "delegation_started":
            self._asked.add(delegation_id)
            work = as_text(data.get("task_description"))
            request = DelegationRequest(task_id=delegation_id, agent_role=worker, task_description=work)
            return DelegationStartedEvent(**parties, task_description=work, delegation_depth=1, request=request)
        is_success = kind == "delegation_completed"
        status = DelegationStatus.SUCCESS if is_success else DelegationStatus.FAILURE
        response = DelegationResponse(task_id=delegation_id, status=status, worker_role=worker, duration=duration)
        was_asked = delegation_id in self._asked
        self._asked.discard(delegation_id)
        if is_success:
            return DelegationCompletedEvent(**parties, response=response, duration=duration)
        reason = as_text(data.get("reason"))
        cause = EnsembleError(reason) if was_asked else None
        return DelegationFailedEvent(
            **parties, failure_reason=reason, cause=cause, response=response, duration=duration
        )


class _TaskFields(TypedDict):
    """What all events about a task have."""

    instance: str
    task_description: str
    agent_role: str
    task_index: int
    total_tasks: int


def _task(data: _Data) -> _TaskFields:
    return {
        "instance": as_text(data.get("instance")),
        "task_description": as_text(data.get("task_description")),
        "agent_role": as_text(data.get("agent_role")),
        "task_index": _number(data, "task_index"),
        "total_tasks": _number(data, "total_tasks"),
    }


def _tool_call(data: _Data) -> ToolCallEvent:
    return ToolCallEvent(
        instance=as_text(data.get("instance")),
        tool_name=as_text(data.get("tool_name")),
        tool_arguments=as_text(data.get("tool_arguments")),
        tool_result="",
        agent_role=as_text(data.get("agent_role")),
        duration=_duration(data, "duration_ms"),
        task_index=_number(data, "task_index"),
        outcome="success" if data.get("outcome") == "success" else "failure",
    )


def _output(data: _Data, metrics: TaskMetrics = TaskMetrics.EMPTY) -> TaskOutput:
    """Return an output without its text, which messages about its task do not have."""
    return TaskOutput(
        raw="",
        task_description=as_text(data.get("task_description")),
        agent_role=as_text(data.get("agent_role")),
        completed_at=utc_of(0),
        duration=_duration(data, "duration_ms"),
        metrics=metrics,
    )


def _number(data: _Data, name: str) -> int:
    value = data.get(name)
    return value if isinstance(value, int) else 0


def _duration(data: _Data, name: str) -> timedelta:
    return timedelta(milliseconds=_number(data, name))
