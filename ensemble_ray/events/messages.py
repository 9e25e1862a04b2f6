"""Messages of file 27 about runs, from live events or records. Instants are ISO-8601 in UTC, durations whole milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple, Self, cast

from msgspec import Struct

from ensemble_ray import events
from ensemble_ray.errors import message_of
from ensemble_ray.values.messages import ToolCall
from ensemble_ray.values.metrics import add_tokens
from ensemble_ray.values.trace import jsonable
from ensemble_ray.values.value import utc_of

_UNKNOWN = "unknown error"


class Message(NamedTuple):
    """One message about a run."""

    #: such as `task_started`
    type: str
    data: dict[str, object]


class ShownTask(Struct, frozen=True, kw_only=True):
    """Fields of messages that describe a task."""

    index: int
    total: int
    description: str
    agent_role: str
    instance: str

    @property
    def data(self) -> dict[str, object]:
        """The fields by their names in messages."""
        return {
            "task_index": self.index,
            "total_tasks": self.total,
            "task_description": self.description,
            "agent_role": self.agent_role,
            "instance": self.instance,
        }


def instant(at: float) -> str:
    """Render a Unix time, s."""
    return utc_of(at).isoformat().replace("+00:00", "Z")


def milliseconds(seconds: float) -> int:
    """Round a duration, by way of whole microseconds: traces and events have no smaller part of it."""
    return max(0, round(timedelta(seconds=seconds) / timedelta(milliseconds=1)))


def ensemble_started(run_id: str, *, at: float, total_tasks: int, workflow: str) -> Message:
    """Report that a run started."""
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
    """Report that a run ended, with any result."""
    data: dict[str, object] = {
        "ensemble_id": run_id,
        "completed_at": instant(at),
        "duration_ms": milliseconds(duration_s),
        "exit_reason": exit_reason,
        "total_tokens": total_tokens,
        "total_tool_calls": total_tool_calls,
    }
    return Message("ensemble_completed", data)


def task_started(task: ShownTask, *, at: float) -> Message:
    """Report that a task started."""
    return Message("task_started", {**task.data, "started_at": instant(at)})


def task_completed(task: ShownTask, *, at: float, duration_s: float, token_count: int, tool_call_count: int) -> Message:
    """Report that a task succeeded; `token_count` is -1 if unknown (S-WEB-34)."""
    data = {
        **task.data,
        "completed_at": instant(at),
        "duration_ms": milliseconds(duration_s),
        "token_count": token_count,
        "tool_call_count": tool_call_count,
    }
    return Message("task_completed", data)


def task_failed(task: ShownTask, *, at: float, reason: str) -> Message:
    """Report that a task failed (S-WEB-35)."""
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
    """Report that a tool was called (S-WEB-36)."""
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
    reused: str = "",
    cached_tokens: int = 0,
) -> Message:
    """Report that a model answered; unknown token counts are 0 (S-EVT-16)."""
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
        **({"reused": reused} if reused else {}),
        **({"cached_tokens": cached_tokens} if cached_tokens > 0 else {}),
    }
    return Message("llm_iteration_completed", data)


def delegation_started(asked: Mapping[str, object], *, task_description: str) -> Message:
    """Report that work was delegated. `asked` has the id, both roles and the instance."""
    return Message("delegation_started", {**asked, "task_description": task_description})


def delegation_completed(asked: Mapping[str, object], *, duration_s: float) -> Message:
    """Report that a worker answered."""
    return Message("delegation_completed", {**asked, "duration_ms": milliseconds(duration_s)})


def delegation_failed(asked: Mapping[str, object], *, duration_s: float, reason: str) -> Message:
    """Report that a delegation was refused or its worker failed."""
    data = {**asked, "duration_ms": milliseconds(duration_s), "reason": reason or _UNKNOWN}
    return Message("delegation_failed", data)


def loop_iteration_completed(
    *, name: str, number: int, most: int, outputs: Mapping[str, str], duration_s: float, instance: str
) -> Message:
    """Report that a loop finished an iteration (S-LOOP-107), with texts by body key."""
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
    """Report that a graph finished a step and chose the next state (S-GRAPH-75)."""
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


def batch_progress(event: events.BatchProgressEvent) -> Message:
    """Report that a batch has another state, or more answers (S-BAT-42)."""
    names = ("batch", "state", "status", "total", "answered", "failed", "provider_batch")
    return Message("batch_progress", {name: getattr(event, name) for name in names})


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
    """Report that a review was requested. Fields that are None are omitted."""
    timeout_ms = None if timeout_s is None else milliseconds(timeout_s)
    optional = {"prompt": prompt, "timeout_ms": timeout_ms, "required_role": required_role}
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
    """Report that a review timed out, with the resulting action."""
    return Message("review_timed_out", {"review_id": review_id, "action": action})


def review_decided(review_id: str, decision: str, by: str) -> Message:
    """Report the decision `approve`, `edit` or `exit`."""
    return Message("review_decided", {"review_id": review_id, "decision": decision, "by": by})


#: The type that ends every stream.
LAST_TYPE = "ensemble_completed"
#: A message without data: a follower of some types sends it in place of the others, so that its reader has their cursor.
SKIPPED_TYPE = "skipped"
#: Types of the messages that a follower of a run reads.
FOLLOWED_TYPES = frozenset({
    "ensemble_started", "task_started", "task_completed", "task_failed", "tool_called", "llm_iteration_completed", "token",
    "delegation_started", "delegation_completed", "delegation_failed", "review_requested", "review_timed_out",
    "review_decided", "loop_iteration_completed", "graph_state_completed", "batch_progress", LAST_TYPE,
})  # fmt: skip


class Cursor(NamedTuple):
    """The last event that a reader received, as text `12.1`."""

    seq: int = 0
    #: from 1, among the events of the fact
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the cursor that a reader sent back, or raise `ValueError`."""
        seq, _, number = text.partition(".")
        if not (text.isascii() and seq.isdecimal() and number.isdecimal() and len(text) < 40):  # noqa: PLR2004  far above any record
            raise ValueError(f"'{text[:40]}' is no cursor of a run's events")
        return cls(int(seq), int(number))

    def __str__(self) -> str:
        return f"{self.seq}.{self.number}"


class WireEvent(Struct, frozen=True, kw_only=True):
    """One message about a run."""

    #: such as `task_started`
    type: str
    data: Mapping[str, object]
    #: None if it is only sent live
    cursor: Cursor | None = None


def render_token(event: events.TokenEvent, at: float) -> WireEvent:
    """Return the message of a streamed fragment at a Unix time, s. It is not recorded."""
    data: dict[str, object] = {
        "token": event.token,
        "agent_role": event.agent_role,
        "task_description": event.task_description,
        "iteration_index": event.iteration,
        "sent_at": instant(at),
        "instance": event.instance,
        **({"is_reasoning": True} if event.is_reasoning else {}),
    }
    return WireEvent(type="token", data=data)


class RunMessages:
    """The messages about one run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._started_at: float | None = None
        self._is_over = False
        self._tokens = 0
        self._tool_calls = 0
        #: by instance, of open tasks and of delegated work
        self._used: dict[str, tuple[int, int]] = {}

    def apply(self, event: events.Event, at: float) -> Message | None:
        """Return the message of the next event, received at the Unix time `at`, s, or None."""
        match event:
            case events.EnsembleStartedEvent():
                self._started_at, self._is_over = at, False
                return ensemble_started(
                    event.ensemble_id, at=at, total_tasks=event.total_tasks, workflow=event.workflow
                )
            case events.EnsembleCompletedEvent():
                self._is_over = True
                return self._end(event.exit_reason.value, at, event.total_duration.total_seconds())
            case events.TaskInputEvent():
                return _task_input(event, at)
            case events.TaskStartEvent() | events.TaskCompleteEvent() | events.TaskFailedEvent():
                return self._of_task(event, at)
            case events.ToolCallEvent():
                return tool_called(
                    agent_role=event.agent_role,
                    task_index=event.task_index,
                    tool_name=event.tool_name,
                    duration_s=event.duration.total_seconds(),
                    is_success=event.outcome == "success",
                    arguments=event.tool_arguments,
                    result=event.tool_result,
                    structured_result=jsonable(event.structured_result),
                    instance=event.instance,
                )
            case events.DelegationStartedEvent() | events.DelegationCompletedEvent() | events.DelegationFailedEvent():
                return _of_delegation(event)
            case events.LoopIterationCompletedEvent():
                return loop_iteration_completed(
                    name=event.loop_name,
                    number=event.iteration_number,
                    most=event.max_iterations,
                    outputs={key: output.raw for key, output in event.iteration_outputs.items()},
                    duration_s=event.iteration_duration.total_seconds(),
                    instance=event.instance,
                )
            case events.GraphStateCompletedEvent():
                return graph_state_completed(
                    name=event.graph_name,
                    state=event.state_name,
                    number=event.step_number,
                    most=event.max_steps,
                    output=event.output.raw,
                    next_state=event.next_state,
                    duration_s=event.step_duration.total_seconds(),
                    instance=event.instance,
                )
            case events.LlmIterationStartedEvent() | events.LlmIterationCompletedEvent() | events.TokenEvent():
                return self._of_model(event, at)
            case _:
                return batch_progress(event) if isinstance(event, events.BatchProgressEvent) else None

    def end(self, exit_reason: str, at: float) -> Message | None:
        """Return the last message of a run that has started and not ended."""
        if self._started_at is None or self._is_over:
            return None
        self._is_over = True
        return self._end(exit_reason, at, at - self._started_at)

    def _end(self, exit_reason: str, at: float, duration_s: float) -> Message:
        used = self._used.values()
        return ensemble_completed(
            self._run_id,
            at=at,
            duration_s=duration_s,
            exit_reason=exit_reason,
            total_tokens=add_tokens((self._tokens, *(tokens for tokens, _ in used))),
            total_tool_calls=self._tool_calls + sum(calls for _, calls in used),
        )

    def _of_task(
        self, event: events.TaskStartEvent | events.TaskCompleteEvent | events.TaskFailedEvent, at: float
    ) -> Message:
        task = ShownTask(
            index=event.task_index,
            total=event.total_tasks,
            description=event.task_description,
            agent_role=event.agent_role,
            instance=event.instance,
        )
        match event:
            case events.TaskStartEvent():
                return task_started(task, at=at)
            case events.TaskFailedEvent():
                return task_failed(task, at=at, reason=_reason_of(event.cause))
            case events.TaskCompleteEvent(task_output=output):
                tokens = output.metrics.total_tokens
                self._tokens = add_tokens((self._tokens, tokens))
                self._tool_calls += output.tool_call_count
                self._used.pop(event.instance, None)
                return task_completed(
                    task,
                    at=output.completed_at.timestamp(),
                    duration_s=event.duration.total_seconds(),
                    token_count=tokens,
                    tool_call_count=output.tool_call_count,
                )

    def _of_model(
        self, event: events.LlmIterationStartedEvent | events.LlmIterationCompletedEvent | events.TokenEvent, at: float
    ) -> Message:
        match event:
            case events.LlmIterationStartedEvent():
                plain = [replace(each, attachments=()) for each in event.messages]
                shown = [cast("dict[str, object]", jsonable(each)) for each in plain]
                for each, message in zip(shown, event.messages, strict=True):
                    each.pop("provider_fields", None)
                    each.pop("attachments", None)
                    if message.attachments:
                        each["attachments"] = [one.to_json() for one in message.attachments]
                data: dict[str, object] = {
                    "agent_role": event.agent_role,
                    "task_description": event.task_description,
                    "iteration_index": event.iteration_index,
                    "messages": shown,
                    "total_message_count": len(shown),
                    "instance": event.instance,
                }
                return Message("llm_iteration_started", data)
            case events.LlmIterationCompletedEvent():
                tokens, calls = self._used.get(event.instance, (0, 0))
                tokens += event.input_tokens + event.output_tokens
                self._used[event.instance] = (tokens, calls + len(event.tool_requests))
                return llm_iteration_completed(
                    agent_role=event.agent_role,
                    task_description=event.task_description,
                    iteration_index=event.iteration_index,
                    text=event.response_text,
                    tool_calls=event.tool_requests,
                    input_tokens=event.input_tokens,
                    output_tokens=event.output_tokens,
                    latency_s=event.latency.total_seconds(),
                    instance=event.instance,
                    reasoning=event.reasoning,
                    reused=event.reused,
                    cached_tokens=event.cached_tokens,
                )
            case events.TokenEvent():
                token = render_token(event, at)
                return Message(token.type, dict(token.data))


def _reason_of(cause: BaseException | None) -> str:
    return "" if cause is None else message_of(cause)


def _task_input(event: events.TaskInputEvent, at: float) -> Message:
    data: dict[str, object] = {
        "task_index": event.task_index,
        "task_description": event.task_description,
        "expected_output": event.expected_output,
        "agent_role": event.agent_role,
        "agent_goal": event.agent_goal,
        "agent_background": event.agent_background,
        "tool_names": list(event.tool_names),
        "assembled_context": event.assembled_context,
        "context_cuts": list(event.context_cuts),
        **({"attachments": [each.to_json() for each in event.attachments]} if event.attachments else {}),
        "sent_at": instant(at),
        "instance": event.instance,
    }
    return Message("task_input", data)


def _of_delegation(
    event: events.DelegationStartedEvent | events.DelegationCompletedEvent | events.DelegationFailedEvent,
) -> Message:
    asked: dict[str, object] = {
        "delegation_id": event.delegation_id,
        "delegating_agent_role": event.delegating_agent_role,
        "worker_role": event.worker_role,
        "instance": event.instance,
    }
    match event:
        case events.DelegationStartedEvent():
            return delegation_started(asked, task_description=event.task_description)
        case events.DelegationCompletedEvent():
            return delegation_completed(asked, duration_s=event.duration.total_seconds())
        case events.DelegationFailedEvent():
            reason = event.failure_reason or _reason_of(event.cause)
            return delegation_failed(asked, duration_s=event.duration.total_seconds(), reason=reason)
