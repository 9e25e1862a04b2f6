"""What a user's type checker sees of the face: mypy and pyright read this file, pytest runs it."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Iterator, Sequence
from datetime import timedelta
from decimal import Decimal
from typing import assert_type

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    AgentOutput,
    ChatModel,
    CostConfiguration,
    Ensemble,
    EnsembleError,
    EnsembleOutput,
    Event,
    EventStream,
    ExecutionMetrics,
    ExecutionTrace,
    ExitReason,
    InlineRuntime,
    Plan,
    RateLimit,
    Run,
    RunOptions,
    RunState,
    Task,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskHandlerContext,
    TaskOutput,
    ToolCallTrace,
    ToolResult,
    run,
    tool,
)
from ensemble_ray.testing import ScriptedModel


class Report(BaseModel):
    """What a typed task gives."""

    title: str
    words: int


@tool
def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


def handle(context: TaskHandlerContext) -> ToolResult:
    """A handler that reads what came before it."""
    assert_type(context.context_outputs, Sequence[TaskOutput])
    return ToolResult.success(context.description, Report(title=context.description, words=1))


TYPED = Task(name="typed", description="Say", expected_output="It", handler=handle, output_type=Report)


def test_a_decorated_function_is_what_it_was() -> None:
    """S-TOOL-16: callable with its own signature; the checkers refuse a call that does not fit it."""
    assert_type(word_count("one two"), int)
    assert word_count(text="one two") == 2


def test_the_model_of_an_agent_is_read_as_a_model() -> None:
    """S-CONV-19: written as a string or a model, read as a model."""
    agent = Agent(role="Writer", goal="Write", tools=[word_count], llm="openai:m", rate_limit=RateLimit.per_minute(60))
    assert_type(agent.llm, ChatModel)
    assert_type(agent.max_iterations, int)
    assert_type(agent.replace(role="Editor"), Agent)


def test_a_run_gives_an_output_with_typed_parts() -> None:
    """S-ENG-1: `run` gives an `EnsembleOutput`; its parts have types an editor completes."""
    output = Ensemble(tasks=[TYPED]).run(runtime=InlineRuntime())
    assert_type(output, EnsembleOutput)
    assert_type(output.raw, str)
    assert_type(output.exit_reason, ExitReason)
    assert_type(output.total_duration, timedelta)
    assert_type(output.metrics, ExecutionMetrics)
    assert_type(output.metrics.total_tokens, int)
    assert_type(output.trace, ExecutionTrace)
    assert_type(output.task_outputs[0], TaskOutput)
    assert_type(output.get_output(TYPED), TaskOutput[Report] | None)
    assert_type(output.task_outputs[0].get_parsed_output(Report), Report)
    assert output.task_outputs[0].get_parsed_output(Report).words == 1


def test_outputs_are_typed_by_their_task() -> None:
    """S-CONV-39: what `output_type` says is known of the task, of its output and of the parsed answer."""
    assert_type(TYPED, Task[Report])
    assert_type(TYPED.replace(name="other"), Task[Report])
    output = Ensemble(tasks=[TYPED, Task.of("Greet").replace(handler=handle)]).run(runtime=InlineRuntime())
    found = output.get_output(TYPED)
    assert found is not None
    assert_type(found.parsed, Report)
    assert_type(output[TYPED], TaskOutput[Report])
    assert_type(output[TYPED].parsed.words, int)
    assert output[TYPED].parsed == Report(title="Say", words=1)
    assert_type(output["task-2"], TaskOutput)
    assert_type(output[0], TaskOutput)
    assert (output["task-2"], output[-1]) == (output.task_outputs[1],) * 2


async def test_an_agent_gives_a_typed_answer() -> None:
    """S-CONV-39, S-DOM-79: `output_type` says what `parsed` is, in all four ways to ask."""
    model = ScriptedModel(otherwise='{"title": "Tides", "words": 2}')
    agent, runtime = Agent(role="Writer", goal="Write", llm=model), InlineRuntime()
    first = await agent.arun("Report the tides", output_type=Report, runtime=runtime)
    assert_type(first, AgentOutput[Report])
    assert_type(first.parsed, Report)
    assert_type(first.text, str)
    assert_type(first.tool_calls, tuple[ToolCallTrace, ...])
    async for item in agent.astream("And the moon?", output_type=Report, history=first, runtime=runtime):
        assert_type(item, Event | AgentOutput[Report])
    assert_type(agent.stream("And the sun?", runtime=runtime), Iterator[Event | AgentOutput])
    assert_type(agent.to_ensemble("And the stars?"), Ensemble)
    assert first.parsed.words == 2


def test_type_of_an_answer_is_for_type_checkers_alone() -> None:
    """S-CONV-39: at run time there is one class of tasks and one of outputs, however they are written."""
    annotated: Task[Report] = Task[Report](description="Say", expected_output="It", output_type=Report)
    assert type(annotated) is Task
    assert (Task[Report], TaskOutput[Report]) == (Task, TaskOutput)
    assert pickle.loads(pickle.dumps(annotated)) == annotated  # noqa: S301  its own
    assert annotated.replace(name="a") != annotated
    assert "Report" in repr(annotated)


async def test_a_run_of_async_code_gives_the_same() -> None:
    """S-CONV-15: `arun` has the contract of `run`; `stream` gives events, then the output."""
    runtime = InlineRuntime()
    ensemble = Ensemble(tasks=[TYPED])
    assert_type(
        await ensemble.arun({"a": 1}, runtime=runtime, options=RunOptions(max_tool_output_length=10)), EnsembleOutput
    )
    by_name = await ensemble.arun(runtime=runtime, tags={"for": "docs"}, durability="off", max_tokens=None)
    assert_type(by_name.text, str)
    stream = ensemble.stream(runtime=runtime, max_tokens=1000)
    assert_type(stream, AsyncIterator[Event | EnsembleOutput])
    items = [item async for item in stream]
    assert isinstance(items[-1], EnsembleOutput)


def test_a_started_run_is_a_handle() -> None:
    """A handle knows its id and its state at once, and its output in the end."""
    begun = Ensemble(tasks=[TYPED]).start(runtime=InlineRuntime())
    assert_type(begun, Run)
    assert_type(begun.id, str)
    assert_type(begun.events(), EventStream)
    assert_type(begun.result(), EnsembleOutput)
    assert_type(begun.state, RunState)
    assert begun.state.is_final


def test_a_plan_is_data_with_types() -> None:
    """What would run can be looked at before it does."""
    plan = Ensemble(tasks=[TYPED], workflow="parallel", llm=ScriptedModel("unused")).plan()
    assert_type(plan, Plan)
    assert_type(plan.nodes[0].key, str)
    assert plan.nodes[0].key == "typed"


def test_listeners_are_typed_by_their_event() -> None:
    """S-EVT-2: a callable for one kind of event gets that kind."""
    seen: list[str] = []

    def note(event: TaskCompleteEvent) -> None:
        assert_type(event.task_output, TaskOutput)
        seen.append(event.task_output.raw)

    cost = CostConfiguration(input_token_rate=Decimal("0.000001"), output_token_rate=Decimal(0))
    Ensemble(tasks=[TYPED], on_task_complete=note, cost_configuration=cost).run(runtime=InlineRuntime())
    assert seen == ["Say"]


def test_the_short_form_takes_a_model_or_only_tasks() -> None:
    """S-DET-30, S-DET-31."""
    runtime = InlineRuntime()
    assert_type(run(ScriptedModel("hello"), Task.of("Greet"), runtime=runtime), EnsembleOutput)
    assert run(TYPED, runtime=runtime).raw == "Say"


def test_errors_carry_typed_fields() -> None:
    """S-ERR-12: what was completed can be read from the error without a cast."""

    def refuse(_: TaskHandlerContext) -> ToolResult:
        return ToolResult.failure("no")

    refused = Task(description="Refuse", expected_output="Nothing", handler=refuse)
    with pytest.raises(EnsembleError) as caught:
        Ensemble(tasks=[TYPED, refused]).run(runtime=InlineRuntime())
    assert isinstance(caught.value, TaskExecutionError)
    assert_type(caught.value.completed_task_outputs, Sequence[TaskOutput])
    assert_type(caught.value.trace, ExecutionTrace | None)
    assert [output.raw for output in caught.value.completed_task_outputs] == ["Say"]
