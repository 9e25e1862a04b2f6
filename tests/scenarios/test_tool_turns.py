"""Several tool calls in one turn, long outputs, blank answers and odd models, on both runtimes."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from ensemble_ray import (
    AgentExecutionError,
    AgentTool,
    ChatResponse,
    Ensemble,
    Runtime,
    TaskExecutionError,
    ToolCallEvent,
    ToolConfigurationError,
    ToolResult,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import Marks, Watcher, told_by_us
from tests.scenarios.test_tool_loop import Echo, Misconfigured, add, results_of


class Meet(AgentTool):
    """Waits until all who are expected have come."""

    name = "meet"
    description = "Meets others."

    def __init__(self, marks: Marks, *expected: str) -> None:
        self._marks = marks
        self._expected = expected

    def execute(self, text: str, /) -> ToolResult:
        self._marks.add(text)
        for name in self._expected:
            self._marks.wait(name)
        return ToolResult.success(f"met {text}")


class Relay(AgentTool):
    """Each waits for the next one, so that the last one to be asked is the first to be done."""

    name = "relay"
    description = "Ends in reverse order."

    def __init__(self, marks: Marks, last: int) -> None:
        self._marks = marks
        self._last = last

    async def execute(self, text: str, /) -> ToolResult:  # type: ignore[override]
        number = int(text)
        if number < self._last:
            await asyncio.to_thread(self._marks.wait, f"done {number + 1}")
        self._marks.add(f"done {number}")
        return ToolResult.failure("second fails") if number == 1 else ToolResult.success(f"result {number}")


def test_requests_of_one_turn_run_at_the_same_time(runtime: Runtime, tmp_path: Path) -> None:
    """S-TOOL-80: three meet, which one after the other could never do; a sync tool does not hold the loop (S-CONV-16)."""
    marks = Marks(tmp_path / "marks")
    names = ["a", "b", "c"]
    model = ScriptedModel([call("meet", f'{{"input": "{name}"}}', number=n) for n, name in enumerate(names)], "done")
    Ensemble(tasks=[task("go", agent(model, tools=[Meet(marks, *names)]))]).run(runtime=runtime)
    assert results_of(model) == ["met a", "met b", "met c"]


def test_results_are_in_request_order_whatever_finishes_first(inline_runtime: Runtime, tmp_path: Path) -> None:
    """S-TOOL-81, S-TOOL-82, S-TRC-21: also events and trace; a failure does not disturb the others."""
    marks = Marks(tmp_path / "marks")
    model = ScriptedModel([call("relay", f'{{"input": "{n}"}}', number=n) for n in range(3)], "done")
    watcher = Watcher()
    output = Ensemble(tasks=[task("go", agent(model, tools=[Relay(marks, last=2)]))], listeners=[watcher]).run(
        runtime=inline_runtime
    )
    assert marks.lines == ["done 2", "done 1", "done 0"]
    texts = ["result 0", "Error: second fails", "result 2"]
    assert results_of(model) == texts
    assert [event.tool_result for event in watcher.of(ToolCallEvent)] == texts
    assert output.trace is not None
    (turn, _) = output.trace.task_traces[0].llm_interactions
    assert [traced.result for traced in turn.tool_calls] == texts
    assert [traced.outcome for traced in turn.tool_calls] == ["success", "failure", "success"]


def test_configuration_error_among_several_fails_the_task(inline_runtime: Runtime) -> None:
    """S-TOOL-85, S-TOOL-82."""
    model = ScriptedModel([call("echo", number=1), call("misconfigured", number=2)], "never")
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", agent(model, tools=[Echo(), Misconfigured()]))]).run(runtime=inline_runtime)
    assert caught.value.__cause__ is not None
    assert isinstance(caught.value.__cause__.__cause__, ToolConfigurationError)


# What the model sees of a long text.


@tool
def digits(count: int) -> str:
    """Give that many digits."""
    return ("0123456789" * 10)[:count]


@pytest.mark.parametrize(
    ("limit", "count", "sent"),
    [
        (10, 10, "0123456789"),
        (10, 11, "0123456789... [truncated, full length: 11 chars]"),
        (0, 3, "... [truncated, full length: 3 chars]"),
        (-1, 30, "0123456789" * 3),
    ],
)
def test_long_tool_outputs_are_cut_for_the_model_only(
    inline_runtime: Runtime, limit: int, count: int, sent: str
) -> None:
    """S-ENG-70, S-ENG-71: events and trace carry the full text."""
    model, watcher = ScriptedModel(call("digits", f'{{"count": {count}}}'), "done"), Watcher()
    output = Ensemble(
        tasks=[task("go", agent(model, tools=[digits]))], listeners=[watcher], max_tool_output_length=limit
    ).run(runtime=inline_runtime)
    assert results_of(model) == [sent]
    full = ("0123456789" * 10)[:count]
    assert watcher.of(ToolCallEvent)[0].tool_result == full
    assert output.trace is not None
    assert output.trace.task_traces[0].llm_interactions[0].tool_calls[0].result == full


@pytest.mark.parametrize(("limit", "shown"), [(4, "0123..."), (-1, "0123456789" * 2), (0, "")])
def test_log_lines_are_cut_as_told(
    inline_runtime: Runtime, caplog: pytest.LogCaptureFixture, limit: int, shown: str
) -> None:
    """S-ENG-72: it does not touch what the model sees."""
    model = ScriptedModel(call("digits", '{"count": 20}'), "done")
    with caplog.at_level(logging.INFO, logger="ensemble_ray"):
        Ensemble(tasks=[task("go", agent(model, tools=[digits]))], tool_log_truncate_length=limit).run(
            runtime=inline_runtime
        )
    (line,) = [record.getMessage() for record in caplog.records if "Tool call: digits" in record.getMessage()]
    assert f"-> {shown} [" in line
    assert results_of(model) == ["0123456789" * 2]


# Answers that are not quite answers.


@pytest.mark.parametrize("blank", [None, "", "  \n"])
def test_blank_answer_is_an_empty_success(
    inline_runtime: Runtime, caplog: pytest.LogCaptureFixture, blank: str | None
) -> None:
    """S-ENG-34, S-ERR-35."""
    model = ScriptedModel(ChatResponse(text=blank))
    output = Ensemble(tasks=[task("go", agent(model))]).run(runtime=inline_runtime)
    assert output.raw == ""
    warnings = [record.getMessage() for record in told_by_us(caplog.records, logging.WARNING)]
    assert warnings == ["Agent 'Writer' returned empty response for task 'go'"]


def test_blank_answer_is_an_empty_success_everywhere(inline_runtime: Runtime) -> None:
    """S-ENG-34: with tools as well."""
    model = ScriptedModel(call("add", '{"a": 1, "b": 1}'), ChatResponse(text=None))
    output = Ensemble(tasks=[task("go", agent(model, tools=[add]))]).run(runtime=inline_runtime)
    assert (output.raw, output.is_complete) == ("", True)
    assert output.trace is not None
    assert output.trace.task_traces[0].final_output == ""


class Talkative:
    """A model that gives a text instead of a response."""

    def chat(self, messages: object, tools: object = ()) -> str:
        return "hello"


def test_malformed_response_fails_like_a_model_error(inline_runtime: Runtime) -> None:
    """S-ENG-57."""
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", agent(Talkative()))]).run(runtime=inline_runtime)
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert str(cause) == "Agent 'Writer': model returned str instead of a ChatResponse (TypeError)"
    assert isinstance(cause.__cause__, TypeError)


class SyncModel:
    """A synchronous model that says in which thread it works."""

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        return ChatResponse(text=threading.current_thread().name)


def test_sync_model_runs_beside_the_loop(inline_runtime: Runtime) -> None:
    """S-CONV-16, S-CONV-20, S-SET-48: in a daemon thread for user code."""
    assert Ensemble(tasks=[task("go", agent(SyncModel()))]).run(runtime=inline_runtime).raw == "ensemble-ray-user"
