"""A run's events as messages of file 27, as they happen. Package: events. Pure.

In: the events of one run, each with its time. Out: messages. Rules: an event is one message; a run begins and ends once; it ends also
where no event says so, since it failed. What a value has no JSON for is shown as its text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import message_of
from ensemble_ray.events import (
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationStartedEvent,
    EnsembleCompletedEvent,
    EnsembleStartedEvent,
    GraphStateCompletedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    LoopIterationCompletedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskInputEvent,
    TaskStartEvent,
    TokenEvent,
    ToolCallEvent,
    messages,
)
from ensemble_ray.events.messages import Message, ShownTask
from ensemble_ray.events.wire import render_token
from ensemble_ray.values.metrics import add_tokens
from ensemble_ray.values.trace import jsonable

if TYPE_CHECKING:
    from ensemble_ray.events import Event
    from ensemble_ray.values.messages import ChatMessage

__all__ = ["RunMessages"]


class RunMessages:
    """The messages about one run."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._started_at: float | None = None
        self._is_over = False
        self._tokens = 0
        self._tool_calls = 0
        #: tokens and tool calls by instance, of tasks that have not completed and of delegated work
        self._used: dict[str, tuple[int, int]] = {}

    def apply(self, event: Event, at: float) -> Message | None:
        """Take the next event, and return its message; None for an event that no page is told of.

        Args:
            event: What happened.
            at: When it was heard of, Unix time, s.
        """
        match event:
            case EnsembleStartedEvent():
                self._started_at, self._is_over = at, False
                return messages.ensemble_started(
                    event.ensemble_id, at=at, total_tasks=event.total_tasks, workflow=event.workflow
                )
            case EnsembleCompletedEvent():
                self._is_over = True
                return self._end(event.exit_reason.value, at, event.total_duration.total_seconds())
            case TaskStartEvent() | TaskInputEvent() | TaskCompleteEvent() | TaskFailedEvent():
                return self._of_task(event, at)
            case ToolCallEvent():
                return _tool_called(event)
            case DelegationStartedEvent() | DelegationCompletedEvent() | DelegationFailedEvent():
                return _of_delegation(event)
            case LoopIterationCompletedEvent() | GraphStateCompletedEvent():
                return _of_round(event)
            case LlmIterationStartedEvent() | LlmIterationCompletedEvent() | TokenEvent():
                if isinstance(event, LlmIterationCompletedEvent):
                    tokens, calls = self._used.get(event.instance, (0, 0))
                    tokens += event.input_tokens + event.output_tokens
                    self._used[event.instance] = (tokens, calls + len(event.tool_requests))
                return _of_model(event, at)
            case _:
                return None

    def end(self, exit_reason: str, at: float) -> Message | None:
        """Return the last message of a run that ended so; None where it has been given, or the run never began."""
        if self._started_at is None or self._is_over:
            return None
        self._is_over = True
        return self._end(exit_reason, at, at - self._started_at)

    def _end(self, exit_reason: str, at: float, duration_s: float) -> Message:
        used = self._used.values()
        return messages.ensemble_completed(
            self._run_id,
            at=at,
            duration_s=duration_s,
            exit_reason=exit_reason,
            total_tokens=add_tokens((self._tokens, *(tokens for tokens, _ in used))),
            total_tool_calls=self._tool_calls + sum(calls for _, calls in used),
        )

    def _of_task(
        self, event: TaskStartEvent | TaskInputEvent | TaskCompleteEvent | TaskFailedEvent, at: float
    ) -> Message:
        if isinstance(event, TaskInputEvent):
            return _task_input(event, at)
        task = ShownTask(
            index=event.task_index,
            total=event.total_tasks,
            description=event.task_description,
            agent_role=event.agent_role,
            instance=event.instance,
        )
        match event:
            case TaskStartEvent():
                return messages.task_started(task, at=at)
            case TaskFailedEvent():
                return messages.task_failed(task, at=at, reason=_reason_of(event.cause))
            case TaskCompleteEvent(task_output=output):
                tokens = output.metrics.total_tokens
                self._tokens = add_tokens((self._tokens, tokens))
                self._tool_calls += output.tool_call_count
                self._used.pop(event.instance, None)
                return messages.task_completed(
                    task,
                    at=output.completed_at.timestamp(),
                    duration_s=event.duration.total_seconds(),
                    token_count=tokens,
                    tool_call_count=output.tool_call_count,
                )


def _reason_of(cause: BaseException | None) -> str:
    return "" if cause is None else message_of(cause)


def _task_input(event: TaskInputEvent, at: float) -> Message:
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
        "sent_at": messages.instant(at),
        "instance": event.instance,
    }
    return Message("task_input", data)


def _tool_called(event: ToolCallEvent) -> Message:
    return messages.tool_called(
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


def _of_delegation(event: DelegationStartedEvent | DelegationCompletedEvent | DelegationFailedEvent) -> Message:
    asked: dict[str, object] = {
        "delegation_id": event.delegation_id,
        "delegating_agent_role": event.delegating_agent_role,
        "worker_role": event.worker_role,
        "instance": event.instance,
    }
    match event:
        case DelegationStartedEvent():
            return messages.delegation_started(asked, task_description=event.task_description)
        case DelegationCompletedEvent():
            return messages.delegation_completed(asked, duration_s=event.duration.total_seconds())
        case DelegationFailedEvent():
            reason = event.failure_reason or _reason_of(event.cause)
            return messages.delegation_failed(asked, duration_s=event.duration.total_seconds(), reason=reason)


def _of_round(event: LoopIterationCompletedEvent | GraphStateCompletedEvent) -> Message:
    match event:
        case LoopIterationCompletedEvent():
            return messages.loop_iteration_completed(
                name=event.loop_name,
                number=event.iteration_number,
                most=event.max_iterations,
                outputs={key: output.raw for key, output in event.iteration_outputs.items()},
                duration_s=event.iteration_duration.total_seconds(),
                instance=event.instance,
            )
        case GraphStateCompletedEvent():
            return messages.graph_state_completed(
                name=event.graph_name,
                state=event.state_name,
                number=event.step_number,
                most=event.max_steps,
                output=event.output.raw,
                next_state=event.next_state,
                duration_s=event.step_duration.total_seconds(),
                instance=event.instance,
            )


def _message_data(message: ChatMessage) -> object:
    """Return a message for pages, without what only its provider understands."""
    data = jsonable(message)
    if isinstance(data, dict):
        cast("dict[str, object]", data).pop("provider_fields", None)
    return data


def _of_model(event: LlmIterationStartedEvent | LlmIterationCompletedEvent | TokenEvent, at: float) -> Message:
    match event:
        case LlmIterationStartedEvent():
            data: dict[str, object] = {
                "agent_role": event.agent_role,
                "task_description": event.task_description,
                "iteration_index": event.iteration_index,
                "messages": [_message_data(each) for each in event.messages],
                "total_message_count": len(event.messages),
                "instance": event.instance,
            }
            return Message("llm_iteration_started", data)
        case LlmIterationCompletedEvent():
            return messages.llm_iteration_completed(
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
            )
        case TokenEvent():
            shown = render_token(event, at)
            return Message(shown.type, dict(shown.data))
