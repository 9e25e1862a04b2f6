"""How many tool requests an agent gets, and what happens beyond."""

from __future__ import annotations

import logging

import pytest

from ensemble_ray import (
    Ensemble,
    MaxIterationsExceededError,
    Runtime,
    TaskExecutionError,
    ToolCallEvent,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import Watcher


@tool
def look(what: str = "") -> str:
    """Look at something."""
    return f"saw {what}"


def stop(limit: int) -> str:
    """The text that takes the place of a result."""
    return (
        f"STOP: Maximum tool iterations ({limit}) reached. "
        "You must provide your best final answer now based on information gathered so far."
    )


def requests(count: int) -> list[object]:
    """So many single requests, one per turn."""
    return [call("look", f'{{"what": "{n}"}}', number=n) for n in range(count)]


def results_of(model: ScriptedModel) -> list[str | None]:
    """What the model was sent as tool results, in order."""
    return [message.content for message in model.calls[-1].messages if message.role == "tool"]


def failed_run(
    runtime: Runtime, model: ScriptedModel, *, limit: int
) -> tuple[MaxIterationsExceededError, TaskExecutionError, Watcher]:
    """A run whose agent goes on calling tools."""
    watcher = Watcher()
    worker = agent(model, tools=[look], max_iterations=limit)
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("find it", worker)], listeners=[watcher]).run(runtime=runtime)
    assert isinstance(caught.value.__cause__, MaxIterationsExceededError)
    return caught.value.__cause__, caught.value, watcher


@pytest.mark.parametrize("limit", [1, 3])
def test_task_fails_at_the_third_stop(runtime: Runtime, limit: int) -> None:
    """S-ENG-40, S-ENG-41, S-ENG-43, S-ENG-46, S-ENG-47, S-ENG-48, S-ERR-16, S-DOM-11: max + 3 model calls in all."""
    model = ScriptedModel(*requests(limit + 4))
    error, _, watcher = failed_run(runtime, model, limit=limit)
    assert len(model.calls) == limit + 3
    assert results_of(model) == [*(f"saw {n}" for n in range(limit)), stop(limit), stop(limit)]
    assert str(error) == (
        f"Agent 'Writer' exceeded maximum iterations ({limit}). Tool calls made: {limit + 3}. Task: 'find it'. "
        "Consider increasing max_iterations or simplifying the task."
    )
    assert (error.agent_role, error.task_description) == ("Writer", "find it")
    assert (error.max_iterations, error.tool_calls_made) == (limit, limit + 3)
    assert len(watcher.of(ToolCallEvent)) == limit


def test_trace_of_the_failed_task_shows_skipped_requests(runtime: Runtime) -> None:
    """S-ENG-48, S-TRC-31, S-MET-16: also the third, whose stop text is never sent."""
    _, error, _ = failed_run(runtime, ScriptedModel(*requests(4)), limit=1)
    assert error.trace is not None
    (traced,) = error.trace.task_traces
    outcomes = [tool.outcome for turn in traced.llm_interactions for tool in turn.tool_calls]
    assert outcomes == ["success", *["skipped_max_iterations"] * 3]
    assert traced.llm_interactions[1].tool_calls[0].result == stop(1)
    assert traced.metrics.tool_call_count == 4


@pytest.mark.parametrize("stops", [1, 2])
def test_text_after_a_stop_is_accepted(inline_runtime: Runtime, stops: int) -> None:
    """S-ENG-45, S-ENG-46, S-MET-16: the count goes on over the limit."""
    model = ScriptedModel(*requests(2 + stops), "best guess")
    output = Ensemble(tasks=[task("go", agent(model, tools=[look], max_iterations=2))]).run(runtime=inline_runtime)
    assert (output.raw, output.total_tool_calls) == ("best guess", 2 + stops)
    assert output.task_outputs[0].metrics.tool_call_count == 2 + stops
    assert results_of(model)[2:] == [stop(2)] * stops


def test_requests_of_one_turn_are_counted_in_order(inline_runtime: Runtime) -> None:
    """S-ENG-40, S-TOOL-84, S-ENG-44: those within the limit run, the others get the stop text."""
    model = ScriptedModel(requests(3), "done")
    output = Ensemble(tasks=[task("go", agent(model, tools=[look], max_iterations=2))]).run(runtime=inline_runtime)
    assert results_of(model) == ["saw 0", "saw 1", stop(2)]
    assert output.total_tool_calls == 3


def test_model_may_answer_when_one_answer_has_many_requests_over_the_limit(inline_runtime: Runtime) -> None:
    """S-ENG-44, S-ENG-46: the request within the limit runs, each other one is refused in words."""
    model = ScriptedModel(requests(5), "best guess")
    output = Ensemble(tasks=[task("go", agent(model, tools=[look], max_iterations=1))]).run(runtime=inline_runtime)
    assert (output.raw, output.total_tool_calls) == ("best guess", 5)
    assert results_of(model) == ["saw 0", *[stop(1)] * 4]


def test_task_fails_when_three_answers_go_over_the_limit(inline_runtime: Runtime) -> None:
    """S-ENG-43, S-ENG-44: the model insisted; what it was refused is counted."""
    model = ScriptedModel(requests(5), requests(3), requests(2), "never")
    error, _, watcher = failed_run(inline_runtime, model, limit=1)
    assert len(model.calls) == 3
    assert [event.tool_result for event in watcher.of(ToolCallEvent)] == ["saw 0"]
    assert error.tool_calls_made == 10


def test_each_stop_is_a_line_in_the_log(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-ENG-42."""
    with caplog.at_level(logging.WARNING, logger="ensemble_ray"):
        failed_run(inline_runtime, ScriptedModel(*requests(4)), limit=1)
    lines = [record.getMessage() for record in caplog.records if "Stop message" in record.getMessage()]
    assert lines == [
        f"Agent 'Writer' exceeded max iterations (1). Stop message sent ({count}/3)." for count in (1, 2, 3)
    ]


def test_counter_starts_anew_with_each_task(inline_runtime: Runtime) -> None:
    """S-ENG-40, S-DOM-12: one counter per task execution."""
    model = ScriptedModel(*requests(1), "one", *requests(1), "two")
    worker = agent(model, tools=[look], max_iterations=1)
    output = Ensemble(tasks=[task("a", worker), task("b", worker)]).run(runtime=inline_runtime)
    assert [each.tool_call_count for each in output.task_outputs] == [1, 1]
    assert results_of(model) == ["saw 0"]


def test_unknown_tools_count_against_the_limit(inline_runtime: Runtime) -> None:
    """S-ENG-55."""
    model = ScriptedModel(call("no_such"), *requests(1), "done")
    output = Ensemble(tasks=[task("go", agent(model, tools=[look], max_iterations=1))]).run(runtime=inline_runtime)
    assert results_of(model) == ["Error: Unknown tool 'no_such'", stop(1)]
    assert output.total_tool_calls == 2
