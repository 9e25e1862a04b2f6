"""Typed answers in runs: asking for them, correcting them, giving up."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum
from typing import Literal, cast

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentExecutionError,
    ChatResponse,
    Ensemble,
    OutputParsingError,
    ParallelExecutionError,
    Runtime,
    TaskExecutionError,
    TaskFailedEvent,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.teams import Watcher, prompt_of


class City(BaseModel):
    """A typed answer."""

    name: str
    people: int


@dataclass
class Point:
    """Another."""

    x: int


class Mood(Enum):
    """A scalar answer."""

    GOOD = "good"


GOOD = '{"name": "Bern", "people": 140000}'
BERN = City(name="Bern", people=140000)


@tool
def look() -> str:
    """Look."""
    return "seen"


def typed(model: ScriptedModel, kind: object = City, **fields: object) -> object:
    """A task with a typed answer."""
    return task("describe a city", agent(model, tools=[look]), output_type=kind, **fields)


def test_answer_becomes_an_object(runtime: Runtime) -> None:
    """S-OUT-1, S-OUT-10, S-DOM-42, S-DOM-43: the prompt asks for it; a class of the user's own travels."""
    model = ScriptedModel(f"```json\n{GOOD}\n```")
    output = Ensemble(tasks=[typed(model)]).run(runtime=runtime)
    (done,) = output.task_outputs
    assert done.get_parsed_output(City) == BERN
    assert done.output_type is City
    assert done.raw == f"```json\n{GOOD}\n```"
    prompt = prompt_of(model.calls[0])
    assert "## Output Format" in prompt
    assert "ONLY valid JSON" in prompt
    assert '"people": "integer"' in prompt


def test_dataclasses_are_answers_too(runtime: Runtime) -> None:
    """S-DOM-32."""
    output = Ensemble(tasks=[typed(ScriptedModel('{"x": 1}'), Point)]).run(runtime=runtime)
    assert output.task_outputs[0].parsed_output == Point(x=1)


def test_retry_is_one_call_without_history_or_tools(inline_runtime: Runtime) -> None:
    """S-OUT-30, S-OUT-31, S-OUT-32, S-OUT-36, S-MET-10: after the tool loop; raw stays the agent's own answer."""
    model = ScriptedModel(call("look"), answer("It is Bern.", 10, 5), answer("Bern!", 20, 6), answer(GOOD, 30, 7))
    output = Ensemble(tasks=[typed(model)]).run(runtime=inline_runtime)
    (done,) = output.task_outputs
    assert (done.raw, done.parsed_output, done.tool_call_count) == ("It is Bern.", BERN, 1)
    first, second = model.calls[2], model.calls[3]
    assert [message.role for message in second.messages] == ["system", "user"]
    assert first.messages[0] == model.calls[0].messages[0]
    assert (first.tools, second.tools) == ((), ())
    assert "It is Bern." in prompt_of(first)
    assert "Could not find valid JSON in response" in prompt_of(first)
    assert "Bern!" in prompt_of(second)
    assert "It is Bern." not in prompt_of(second)
    assert '"people": "integer"' in prompt_of(second)
    assert done.metrics.llm_call_count == 4
    assert (done.metrics.input_tokens, done.metrics.output_tokens) == (-1, -1)
    assert done.trace is not None
    assert [each.iteration_index for each in done.trace.llm_interactions] == [0, 1, 2, 3]
    assert [each.response_type for each in done.trace.llm_interactions] == ["tool_calls", *["final_answer"] * 3]


@pytest.mark.parametrize("retries", [0, 2])
def test_giving_up_raises_a_parsing_error(inline_runtime: Runtime, retries: int) -> None:
    """S-OUT-33, S-OUT-34, S-ENG-15, S-ERR-18, S-DOM-37: it reaches the caller as it is."""
    answers = ["none", '{"name": "Bern"}', "still none"][: retries + 1]
    model, watcher = ScriptedModel(*answers), Watcher()
    with pytest.raises(OutputParsingError) as caught:
        Ensemble(tasks=[typed(model, max_output_retries=retries)], listeners=[watcher]).run(runtime=inline_runtime)
    error = caught.value
    assert str(error) == (
        "Structured output parsing failed for task 'describe a city' "
        f"after {retries + 1} attempt(s). Expected type: City. "
        f"Could not find valid JSON in response: {answers[-1]}"
    )
    assert (error.raw_output, error.attempt_count, error.output_type) == (answers[-1], retries + 1, City)
    assert len(error.parse_errors) == retries + 1
    assert (error.task_description, error.agent_role) == ("describe a city", "Writer")
    assert error.completed_task_outputs == ()
    (failed,) = watcher.of(TaskFailedEvent)
    assert isinstance(failed.cause, OutputParsingError)


def test_giving_up_is_among_the_causes_of_a_parallel_run(inline_runtime: Runtime) -> None:
    """S-OUT-34."""
    with pytest.raises(ParallelExecutionError) as caught:
        Ensemble(
            tasks=[typed(ScriptedModel("no"), max_output_retries=0)],
            workflow="parallel",
            parallel_error_strategy="continue_on_error",
        ).run(runtime=inline_runtime)
    assert isinstance(caught.value.failed_task_causes["describe a city"], OutputParsingError)


def test_empty_answer_is_a_failed_attempt(inline_runtime: Runtime) -> None:
    """S-OUT-38."""
    model = ScriptedModel(ChatResponse(text=""), GOOD)
    output = Ensemble(tasks=[typed(model)]).run(runtime=inline_runtime)
    assert output.task_outputs[0].parsed_output == BERN
    assert "LLM produced an empty response" in prompt_of(model.calls[1])


def test_model_error_during_a_retry_fails_the_task(inline_runtime: Runtime) -> None:
    """S-OUT-35."""
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[typed(ScriptedModel("none", ValueError("no quota")))]).run(runtime=inline_runtime)
    assert not isinstance(caught.value, OutputParsingError)
    assert isinstance(caught.value.__cause__, AgentExecutionError)
    assert str(caught.value.__cause__) == "Agent 'Writer': no quota (ValueError)"


@pytest.mark.parametrize(
    ("kind", "text", "parsed"),
    [
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (dict, '{"a": [1]}', {"a": [1]}),
        (Mood, '"good"', Mood.GOOD),
        (str, "Hi there", "Hi there"),
        (int, "42", 42),
        (list[City], f"[{GOOD}]", [BERN]),
        (City | None, "null", None),
        (Literal["a", "b"], "b", "b"),
    ],
)
def test_every_accepted_type_can_be_asked_for(runtime: Runtime, kind: object, text: str, parsed: object) -> None:
    """S-DOM-32, S-OUT-21, S-LLM-50, S-LLM-55: not only records; `parsed` is None where that is the answer."""
    output = Ensemble(tasks=[typed(ScriptedModel(text), kind, max_output_retries=0)]).run(runtime=runtime)
    (done,) = output.task_outputs
    assert (done.parsed, done.get_parsed_output(cast("type[object]", kind)), done.output_type) == (parsed, parsed, kind)


def test_without_output_type_nothing_is_parsed(inline_runtime: Runtime) -> None:
    """S-DOM-43, S-DOM-37."""
    output = Ensemble(tasks=[typed(ScriptedModel(GOOD), None, max_output_retries=5)]).run(runtime=inline_runtime)
    assert (output.task_outputs[0].parsed_output, output.task_outputs[0].output_type) == (None, None)
    assert output.raw == GOOD


def test_attempts_are_told_in_the_log(inline_runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-OUT-36: WARN per failed attempt, INFO with the attempt that worked."""
    with caplog.at_level(logging.INFO, logger="ensemble_ray"):
        Ensemble(tasks=[typed(ScriptedModel("none", GOOD))]).run(runtime=inline_runtime)
    lines = [
        (record.levelname, record.getMessage())
        for record in caplog.records
        if "structured output" in record.getMessage()
    ]
    assert [level for level, _ in lines] == ["WARNING", "INFO"]
    assert "attempt 1/4" in lines[0][1]
    assert "attempt 2/4" in lines[1][1]


def test_parsed_object_reaches_later_tasks_and_errors(runtime: Runtime) -> None:
    """S-ERR-36, S-DOM-35: the read-only output is shared, complete with its object."""
    writer = agent(ScriptedModel(GOOD, ValueError("no")))
    first = task("first", writer, output_type=City)
    second = task("second", handler=lambda context: context.context_outputs[0].parsed_output.name, context=[first])
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[first, second, task("third", writer)]).run(runtime=runtime)
    done = caught.value.completed_task_outputs
    assert (done[0].parsed_output, done[1].raw) == (BERN, "Bern")
