"""A run's events as messages: the fields of each type, in their forms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ensemble_ray import (
    ChatMessage,
    DelegationCompletedEvent,
    DelegationFailedEvent,
    DelegationRequest,
    DelegationResponse,
    DelegationStartedEvent,
    EnsembleCompletedEvent,
    EnsembleStartedEvent,
    Event,
    ExitReason,
    FileChangedEvent,
    GraphStateCompletedEvent,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    LoopIterationCompletedEvent,
    TaskCompleteEvent,
    TaskFailedEvent,
    TaskInputEvent,
    TaskMetrics,
    TaskOutput,
    TaskStartEvent,
    TokenEvent,
    ToolCall,
    ToolCallEvent,
)
from ensemble_ray.events.messages import RunMessages, milliseconds

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
AT = NOON.timestamp()
WHO: Mapping[str, Any] = {"run_id": "run", "instance": "draft#0"}
TASK: Mapping[str, Any] = {**WHO, "task_description": "Draft", "agent_role": "Writer", "task_index": 2}


def output(text: str = "done", tokens: int = 7) -> TaskOutput:
    """Return what a task gave."""
    metrics = TaskMetrics(total_tokens=tokens)
    return TaskOutput(
        raw=text,
        task_description="Draft",
        agent_role="Writer",
        completed_at=NOON,
        duration=timedelta(seconds=2),
        tool_call_count=3,
        metrics=metrics,
    )


def told(event: Event, *before: Event) -> tuple[str, dict[str, object]]:
    """Return the message of an event behind others; it must be JSON data."""
    run = RunMessages("run")
    for each in before:
        run.apply(each, AT)
    message = run.apply(event, AT)
    assert message is not None
    json.dumps(message.data, allow_nan=False)
    return message


STARTED = EnsembleStartedEvent(run_id="run", ensemble_id="run", workflow="sequential", total_tasks=3)
ASKED: dict[str, Any] = {
    "delegation_id": "d",
    "delegating_agent_role": "Lead",
    "worker_role": "Writer",
}
RESPONSE = DelegationResponse(task_id="d", status="success", worker_role="Writer", raw_output="done")  # type: ignore[arg-type]
REQUEST = DelegationRequest(task_id="d", agent_role="Writer", task_description="Write")

MESSAGES: list[tuple[Event, str, dict[str, object]]] = [
    (
        STARTED,
        "ensemble_started",
        {"ensemble_id": "run", "started_at": "2026-01-02T12:00:00Z", "total_tasks": 3, "workflow": "sequential"},
    ),
    (
        TaskStartEvent(**TASK, total_tasks=3),
        "task_started",
        {
            "task_index": 2,
            "total_tasks": 3,
            "task_description": "Draft",
            "agent_role": "Writer",
            "instance": "draft#0",
            "started_at": "2026-01-02T12:00:00Z",
        },
    ),
    (
        TaskInputEvent(
            **TASK,
            expected_output="a text",
            agent_goal="write",
            agent_background=None,
            tool_names=("search",),
            assembled_context="of others",
        ),
        "task_input",
        {
            "task_index": 2,
            "task_description": "Draft",
            "expected_output": "a text",
            "agent_role": "Writer",
            "agent_goal": "write",
            "agent_background": None,
            "tool_names": ["search"],
            "assembled_context": "of others",
            "context_cuts": [],
            "sent_at": "2026-01-02T12:00:00Z",
            "instance": "draft#0",
        },
    ),
    (
        TaskCompleteEvent(**TASK, total_tasks=3, task_output=output(), duration=timedelta(seconds=1.5)),
        "task_completed",
        {
            "task_index": 2,
            "total_tasks": 3,
            "task_description": "Draft",
            "agent_role": "Writer",
            "instance": "draft#0",
            "completed_at": "2026-01-02T12:00:00Z",
            "duration_ms": 1500,
            "token_count": 7,
            "tool_call_count": 3,
        },
    ),
    (
        TaskFailedEvent(**TASK, total_tasks=3, cause=ValueError("broke"), duration=timedelta()),
        "task_failed",
        {
            "task_index": 2,
            "task_description": "Draft",
            "agent_role": "Writer",
            "instance": "draft#0",
            "failed_at": "2026-01-02T12:00:00Z",
            "reason": "broke",
        },
    ),
    (
        ToolCallEvent(
            **WHO,
            tool_name="search",
            tool_arguments='{"q": 1}',
            tool_result="Error: no",
            structured_result={"at": NOON},
            agent_role="Writer",
            duration=timedelta(milliseconds=20),
            task_index=2,
            outcome="failure",
        ),
        "tool_called",
        {
            "agent_role": "Writer",
            "task_index": 2,
            "tool_name": "search",
            "duration_ms": 20,
            "outcome": "failure",
            "tool_arguments": '{"q": 1}',
            "tool_result": "Error: no",
            "structured_result": {"at": "2026-01-02T12:00:00Z"},
            "instance": "draft#0",
        },
    ),
    (
        DelegationStartedEvent(**WHO, **ASKED, task_description="Write", delegation_depth=1, request=REQUEST),
        "delegation_started",
        {**ASKED, "instance": "draft#0", "task_description": "Write"},
    ),
    (
        DelegationCompletedEvent(**WHO, **ASKED, response=RESPONSE, duration=timedelta(seconds=1)),
        "delegation_completed",
        {**ASKED, "instance": "draft#0", "duration_ms": 1000},
    ),
    (
        DelegationFailedEvent(
            **WHO, **ASKED, failure_reason="refused", cause=None, response=RESPONSE, duration=timedelta()
        ),
        "delegation_failed",
        {**ASKED, "instance": "draft#0", "duration_ms": 0, "reason": "refused"},
    ),
    (
        LlmIterationStartedEvent(
            **WHO,
            agent_role="Writer",
            task_description="Draft",
            iteration_index=1,
            messages=[ChatMessage("user", "hi"), ChatMessage("assistant", None, [ToolCall("1", "search", "{}")])],
        ),
        "llm_iteration_started",
        {
            "agent_role": "Writer",
            "task_description": "Draft",
            "iteration_index": 1,
            "messages": [
                {"role": "user", "content": "hi", "tool_calls": [], "tool_call_id": None, "name": None},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "name": "search", "arguments": "{}"}],
                    "tool_call_id": None,
                    "name": None,
                },
            ],
            "total_message_count": 2,
            "instance": "draft#0",
        },
    ),
    (
        LlmIterationCompletedEvent(
            **WHO,
            agent_role="Writer",
            task_description="Draft",
            iteration_index=1,
            response_type="tool_calls",
            response_text=None,
            tool_requests=[ToolCall("1", "search", "{}")],
            input_tokens=0,
            output_tokens=4,
            latency=timedelta(seconds=0.25),
        ),
        "llm_iteration_completed",
        {
            "agent_role": "Writer",
            "task_description": "Draft",
            "iteration_index": 1,
            "response_type": "tool_calls",
            "response_text": None,
            "tool_requests": [{"name": "search", "arguments": "{}"}],
            "input_tokens": 0,
            "output_tokens": 4,
            "latency_ms": 250,
            "instance": "draft#0",
        },
    ),
    (
        TokenEvent(**WHO, token="do", agent_role="Writer", task_description="Draft", iteration=1),  # noqa: S106  a fragment
        "token",
        {
            "token": "do",
            "agent_role": "Writer",
            "task_description": "Draft",
            "iteration_index": 1,
            "sent_at": "2026-01-02T12:00:00Z",
            "instance": "draft#0",
        },
    ),
    (
        TokenEvent(**WHO, token="hm", agent_role="Writer", task_description="Draft", is_reasoning=True),  # noqa: S106
        "token",
        {
            "token": "hm",
            "agent_role": "Writer",
            "task_description": "Draft",
            "iteration_index": 0,
            "sent_at": "2026-01-02T12:00:00Z",
            "instance": "draft#0",
            "is_reasoning": True,
        },
    ),
    (
        LoopIterationCompletedEvent(
            run_id="run",
            instance="loop:refine#0",
            loop_name="refine",
            iteration_number=1,
            max_iterations=3,
            iteration_outputs={"draft": output("a draft")},
            iteration_duration=timedelta(seconds=1),
        ),
        "loop_iteration_completed",
        {
            "loop_name": "refine",
            "iteration_number": 1,
            "max_iterations": 3,
            "iteration_outputs": {"draft": "a draft"},
            "iteration_duration_ms": 1000,
            "instance": "loop:refine#0",
        },
    ),
    (
        GraphStateCompletedEvent(
            run_id="run",
            instance="graph:g#0",
            graph_name="g",
            state_name="check",
            step_number=1,
            max_steps=9,
            output=output("checked"),
            next_state="END",
            step_duration=timedelta(seconds=1),
        ),
        "graph_state_completed",
        {
            "graph_name": "g",
            "state_name": "check",
            "step_number": 1,
            "max_steps": 9,
            "output": "checked",
            "next_state": "END",
            "step_duration_ms": 1000,
            "instance": "graph:g#0",
        },
    ),
]


@pytest.mark.parametrize(("event", "kind", "data"), MESSAGES, ids=[kind for _, kind, _ in MESSAGES])
def test_the_message_of_an_event(event: Event, kind: str, data: dict[str, object]) -> None:
    """S-WEB-30, S-WEB-32, S-WEB-34, S-WEB-36: its fields, and nothing else."""
    assert told(event) == (kind, data)


class SilentError(Exception):
    """An error without a text."""


@pytest.mark.parametrize(
    ("cause", "reason"),
    [(ValueError("broke"), "broke"), (SilentError(), "SilentError"), (None, "unknown error")],
)
def test_why_a_task_failed(cause: Any, reason: str) -> None:
    """S-WEB-35: the message of the cause, without one its class, without a cause what can be said."""
    event = TaskFailedEvent(**TASK, total_tasks=3, cause=cause, duration=timedelta())
    assert told(event)[1]["reason"] == reason


def completed(tokens: int) -> TaskCompleteEvent:
    """Return that a task succeeded."""
    return TaskCompleteEvent(**TASK, total_tasks=3, task_output=output(tokens=tokens), duration=timedelta())


@pytest.mark.parametrize(("tokens", "total"), [((7, 5), 16), ((7, -1), -1), ((-1, 7), -1)])
def test_the_end_of_a_run(tokens: tuple[int, int], total: int) -> None:
    """S-WEB-33, S-WEB-34, S-MET-38: what tasks used, one that failed or was delegated included; -1 where a count is not known."""
    ended = EnsembleCompletedEvent(
        run_id="run", ensemble_id="run", total_duration=timedelta(seconds=9), exit_reason=ExitReason.USER_EXIT_EARLY
    )
    answered = next(event for event, kind, _ in MESSAGES if kind == "llm_iteration_completed")
    of_other = replace(answered, instance="other#0")
    assert told(ended, STARTED, answered, *map(completed, tokens), of_other) == (
        "ensemble_completed",
        {
            "ensemble_id": "run",
            "completed_at": "2026-01-02T12:00:00Z",
            "duration_ms": 9000,
            "exit_reason": "user_exit_early",
            "total_tokens": total,
            "total_tool_calls": 7,
        },
    )


def test_a_run_ends_once() -> None:
    """S-WEB-33: also one that failed, which no event tells; one that never began does not."""
    run = RunMessages("run")
    assert run.end("error", AT) is None
    run.apply(STARTED, AT)
    ended = run.end("error", AT + 2)
    assert ended is not None
    assert (ended.type, ended.data["exit_reason"], ended.data["duration_ms"]) == ("ensemble_completed", "error", 2000)
    assert run.end("error", AT) is None


def test_events_that_pages_are_not_told() -> None:
    """S-WEB-32: a file that was changed is no message of the protocol."""
    event = FileChangedEvent(
        **WHO,
        agent_role="Writer",
        file_path="a",
        change_type="created",
        lines_added=1,
        lines_removed=0,
        timestamp=NOON,
    )
    assert RunMessages("run").apply(event, AT) is None


@pytest.mark.parametrize("seconds", [0.0014996, 0.0005004, 0.0025, 1.2345678])
def test_duration_has_the_same_milliseconds_whole_and_in_microseconds(seconds: float) -> None:
    """S-MET-39: a record has all digits of a duration, an event those of a `timedelta`."""
    assert milliseconds(seconds) == milliseconds(timedelta(seconds=seconds).total_seconds())
