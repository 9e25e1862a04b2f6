"""The messages of file 27, type by type: which fields each has, and in what form. Package: events. Pure.

In: what happened, as events or records have it. Out: a type and JSON data. One place for both ways to a page: as it happens, and read
from a record. Instants are ISO-8601 in UTC, durations whole milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ensemble_ray.values.messages import ToolCall
from ensemble_ray.values.value import utc_of

__all__ = [
    "Message",
    "ShownTask",
    "delegation_completed",
    "delegation_failed",
    "delegation_started",
    "ensemble_completed",
    "ensemble_started",
    "graph_state_completed",
    "instant",
    "llm_iteration_completed",
    "loop_iteration_completed",
    "milliseconds",
    "review_decided",
    "review_requested",
    "review_timed_out",
    "task_completed",
    "task_failed",
    "task_started",
    "tool_called",
]

_UNKNOWN = "unknown error"


class Message(NamedTuple):
    """One message about a run."""

    #: such as `task_started`
    type: str
    #: JSON data
    data: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownTask:
    """What messages say of a task."""

    index: int
    total: int
    description: str
    agent_role: str
    instance: str

    @property
    def data(self) -> dict[str, object]:
        """Its fields in messages."""
        return {
            "task_index": self.index,
            "total_tasks": self.total,
            "task_description": self.description,
            "agent_role": self.agent_role,
            "instance": self.instance,
        }


def instant(at: float) -> str:
    """Return a time, Unix time in s, as messages say it."""
    return utc_of(at).isoformat().replace("+00:00", "Z")


def milliseconds(seconds: float) -> int:
    """Return a duration as messages say it."""
    return max(0, round(seconds * 1000))


# Runs.


def ensemble_started(run_id: str, *, at: float, total_tasks: int, workflow: str) -> Message:
    """Return that a run begins."""
    data: dict[str, object] = {
        "ensemble_id": run_id,
        "started_at": instant(at),
        "total_tasks": total_tasks,
        "workflow": workflow,
    }
    return Message("ensemble_started", data)


def ensemble_completed(
    run_id: str, *, at: float, duration_s: float, exit_reason: str, total_tokens: int, total_tool_calls: int
) -> Message:
    """Return that a run is over, whatever became of it."""
    data: dict[str, object] = {
        "ensemble_id": run_id,
        "completed_at": instant(at),
        "duration_ms": milliseconds(duration_s),
        "exit_reason": exit_reason,
        "total_tokens": total_tokens,
        "total_tool_calls": total_tool_calls,
    }
    return Message("ensemble_completed", data)


# Tasks.


def task_started(task: ShownTask, *, at: float) -> Message:
    """Return that a task begins."""
    return Message("task_started", {**task.data, "started_at": instant(at)})


def task_completed(task: ShownTask, *, at: float, duration_s: float, token_count: int, tool_call_count: int) -> Message:
    """Return that a task succeeded; `token_count` is -1 where it is unknown (S-WEB-34)."""
    data = {
        **task.data,
        "completed_at": instant(at),
        "duration_ms": milliseconds(duration_s),
        "token_count": token_count,
        "tool_call_count": tool_call_count,
    }
    return Message("task_completed", data)


def task_failed(task: ShownTask, *, at: float, reason: str) -> Message:
    """Return that a task failed (S-WEB-35)."""
    data = task.data
    del data["total_tasks"]
    return Message("task_failed", {**data, "failed_at": instant(at), "reason": reason or _UNKNOWN})


def tool_called(
    *,
    agent_role: str,
    task_index: int,
    tool_name: str,
    duration_s: float,
    is_success: bool,
    arguments: str,
    result: str,
    structured_result: object,
    instance: str,
) -> Message:
    """Return that a tool was called (S-WEB-36)."""
    data: dict[str, object] = {
        "agent_role": agent_role,
        "task_index": task_index,
        "tool_name": tool_name,
        "duration_ms": milliseconds(duration_s),
        "outcome": "success" if is_success else "failure",
        "tool_arguments": arguments,
        "tool_result": result,
        "structured_result": structured_result,
        "instance": instance,
    }
    return Message("tool_called", data)


def llm_iteration_completed(
    *,
    agent_role: str,
    task_description: str,
    iteration_index: int,
    text: str | None,
    tool_calls: Sequence[ToolCall],
    input_tokens: int,
    output_tokens: int,
    latency_s: float,
    instance: str,
    reasoning: str | None = None,
) -> Message:
    """Return that a model answered; unknown token counts are 0 (S-EVT-16)."""
    data: dict[str, object] = {
        "agent_role": agent_role,
        "task_description": task_description,
        "iteration_index": iteration_index,
        "response_type": "tool_calls" if tool_calls else "final_answer",
        "response_text": text,
        "tool_requests": [{"name": each.name, "arguments": each.arguments} for each in tool_calls],
        "input_tokens": max(0, input_tokens),
        "output_tokens": max(0, output_tokens),
        "latency_ms": milliseconds(latency_s),
        "instance": instance,
        **({} if reasoning is None else {"reasoning": reasoning}),
    }
    return Message("llm_iteration_completed", data)


# Work that is handed on.


def delegation_started(asked: Mapping[str, object], *, task_description: str) -> Message:
    """Return that a worker is asked; `asked` has the id, both roles and the asking instance."""
    return Message("delegation_started", {**asked, "task_description": task_description})


def delegation_completed(asked: Mapping[str, object], *, duration_s: float) -> Message:
    """Return that a worker answered."""
    return Message("delegation_completed", {**asked, "duration_ms": milliseconds(duration_s)})


def delegation_failed(asked: Mapping[str, object], *, duration_s: float, reason: str) -> Message:
    """Return that a worker was refused, or failed."""
    data = {**asked, "duration_ms": milliseconds(duration_s), "reason": reason or _UNKNOWN}
    return Message("delegation_failed", data)


# Rounds of units.


def loop_iteration_completed(
    *, name: str, number: int, most: int, outputs: Mapping[str, str], duration_s: float, instance: str
) -> Message:
    """Return that a loop finished an iteration (S-LOOP-107); outputs are texts by body key."""
    data: dict[str, object] = {
        "loop_name": name,
        "iteration_number": number,
        "max_iterations": most,
        "iteration_outputs": dict(outputs),
        "iteration_duration_ms": milliseconds(duration_s),
        "instance": instance,
    }
    return Message("loop_iteration_completed", data)


def graph_state_completed(
    *, name: str, state: str, number: int, most: int, output: str, next_state: str, duration_s: float, instance: str
) -> Message:
    """Return that a graph finished a step and chose the next state (S-GRAPH-75)."""
    data: dict[str, object] = {
        "graph_name": name,
        "state_name": state,
        "step_number": number,
        "max_steps": most,
        "output": output,
        "next_state": next_state,
        "step_duration_ms": milliseconds(duration_s),
        "instance": instance,
    }
    return Message("graph_state_completed", data)


# Reviews.


def review_requested(
    *,
    review_id: str,
    task_description: str,
    task_output: str,
    timing: str,
    prompt: str | None,
    timeout_s: float | None,
    on_timeout: str,
    required_role: str | None,
) -> Message:
    """Return that somebody is asked; what is None is left out."""
    optional = {
        "prompt": prompt,
        "timeout_ms": None if timeout_s is None else milliseconds(timeout_s),
        "required_role": required_role,
    }
    data: dict[str, object] = {
        "review_id": review_id,
        "task_description": task_description,
        "task_output": task_output,
        "timing": timing,
        "on_timeout": on_timeout,
        **{name: value for name, value in optional.items() if value is not None},
    }
    return Message("review_requested", data)


def review_timed_out(review_id: str, action: str) -> Message:
    """Return that nobody answered in time, and what follows."""
    return Message("review_timed_out", {"review_id": review_id, "action": action})


def review_decided(review_id: str, decision: str, by: str) -> Message:
    """Return what was decided: `approve`, `edit` or `exit`."""
    return Message("review_decided", {"review_id": review_id, "decision": decision, "by": by})
