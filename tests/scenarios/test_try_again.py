"""Tools and guardrails that ask the model to try again: `raise TryAgain(...)`."""

from __future__ import annotations

import logging

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AbstractAgentTool,
    Ensemble,
    ExecutionTrace,
    GuardrailInput,
    GuardrailOutput,
    GuardrailResult,
    GuardrailViolationError,
    Runtime,
    TaskExecutionError,
    ToolPipeline,
    ToolResult,
    TryAgain,
    tool,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, call, task


class City(BaseModel):
    """A typed answer."""

    name: str


@tool
def book(day: str) -> str:
    """Book a day.

    Args:
        day: The day.
    """
    if not day.startswith("2030-"):
        raise TryAgain("Give the day as YYYY-MM-DD, in 2030")
    return f"booked {day}"


@tool(cpu=True)
def book_elsewhere(day: str) -> str:
    """Book a day in another process.

    Args:
        day: The day.
    """
    raise TryAgain(f"No room on {day}")


class Booker(AbstractAgentTool):
    """The same as a class."""

    name = "booker"
    description = "Books a day."

    def do_execute(self, text: str, /) -> ToolResult:
        """Never content."""
        raise TryAgain(f"Another day than {text}")


def short(output: GuardrailOutput) -> GuardrailResult:
    """Content with short answers."""
    if len(output.raw_response) > 20:
        raise TryAgain("At most 20 characters, please")
    return GuardrailResult.success()


def known_city(output: GuardrailOutput) -> GuardrailResult:
    """Content with one city."""
    if output.parsed_output.name != "Bern":
        raise TryAgain(f"{output.parsed_output.name} is not the capital")
    return GuardrailResult.success()


def never(_: GuardrailInput | GuardrailOutput) -> GuardrailResult:
    """Never content."""
    raise TryAgain("not yet")


def answered(_: object) -> str:
    """A handler."""
    return "An answer"


def said_in(asked: ScriptedCall, role: str) -> list[str | None]:
    """Texts of a role in what a model was asked."""
    return [message.content for message in asked.messages if message.role == role]


def trace_of(found: ExecutionTrace | None) -> ExecutionTrace:
    """The trace, which is there."""
    assert found is not None
    return found


def test_model_is_given_what_a_tool_says(runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    """S-TOOL-54: as the tool's text; a failure, and no error, so that the log has no traceback."""
    model = ScriptedModel(call("book", '{"day": "Monday"}'), call("book", '{"day": "2030-01-07"}'), "Done")
    with caplog.at_level(logging.WARNING):
        output = Ensemble(tasks=[task("Book", agent(model, tools=[book]))]).run(runtime=runtime)
    assert output.raw == "Done"
    assert said_in(model.calls[-1], "tool") == ["Give the day as YYYY-MM-DD, in 2030", "booked 2030-01-07"]
    (done,) = trace_of(output.trace).task_traces
    assert [each.outcome for turn in done.llm_interactions for each in turn.tool_calls] == ["failure", "success"]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (book_elsewhere, "No room on x"),
        (Booker(), "Another day than x"),
        (ToolPipeline("booking", "Books.", [Booker()]), "Another day than x"),
    ],
)
def test_tool_has_failed_when_it_asks_too_often(inline_runtime: Runtime, made: object, said: str) -> None:
    """S-TOOL-54: three times in a task, whatever kind of tool it is; then it is an ordinary error."""
    name = str(getattr(made, "name", None) or getattr(made, "__name__", ""))
    asked = call(name, '{"day": "x"}' if name == "book_elsewhere" else '{"input": "x"}')
    model = ScriptedModel(asked, asked, asked, asked, "Given up")
    output = Ensemble(tasks=[task("Book", agent(model, tools=[made]))]).run(runtime=inline_runtime)
    assert output.raw == "Given up"
    *told, last = said_in(model.calls[-1], "tool")
    assert told == [said] * 3
    assert last == f"Tool error: TryAgain: {said} (it was tried again 3 times)"
    (done,) = trace_of(output.trace).task_traces
    outcomes = [each.outcome for turn in done.llm_interactions for each in turn.tool_calls]
    assert outcomes == ["failure"] * 3 + ["error"]


def test_model_answers_again_when_a_guardrail_says_so(runtime: Runtime) -> None:
    """S-GRD-17: the guardrail's words stand behind the answer; later guardrails see the new one."""
    model = ScriptedModel("A very long answer, much too long", "Still a rather long answer", "Short")
    output = Ensemble(tasks=[task("Say", agent(model), output_guardrails=[short])]).run(runtime=runtime)
    assert output.raw == "Short"
    assert [(message.role, message.content) for message in model.calls[-1].messages[2:]] == [
        ("assistant", "A very long answer, much too long"),
        ("user", "At most 20 characters, please"),
        ("assistant", "Still a rather long answer"),
        ("user", "At most 20 characters, please"),
    ]
    assert output.metrics.total_llm_call_count == 3


def test_typed_answer_is_parsed_again(inline_runtime: Runtime) -> None:
    """S-GRD-17, S-GRD-5: a corrected answer stands as it was corrected, and the next one is parsed and corrected too."""
    model = ScriptedModel("Zurich", '{"name": "Zurich"}', "Bern!", '{"name": "Bern"}')
    given = task("Capital?", agent(model), output_type=City, output_guardrails=[known_city])
    output = Ensemble(tasks=[given]).run(runtime=inline_runtime)
    assert output.task_outputs[0].parsed_output == City(name="Bern")
    assert [(message.role, message.content) for message in model.calls[2].messages[2:]] == [
        ("assistant", '{"name": "Zurich"}'),
        ("user", "Zurich is not the capital"),
    ]


@pytest.mark.parametrize("most", [0, 2])
def test_task_fails_when_a_guardrail_asks_too_often(inline_runtime: Runtime, most: int) -> None:
    """S-GRD-17, S-GRD-7: `max_output_retries` times; then it is a violation with the guardrail's words."""
    model = ScriptedModel(*["An answer"] * (most + 1))
    given = task("Say", agent(model), output_guardrails=[never], max_output_retries=most)
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[given]).run(runtime=inline_runtime)
    cause = caught.value.__cause__
    assert isinstance(cause, GuardrailViolationError)
    assert cause.violation_message.startswith("not yet (TryAgain")
    assert len(model.calls) == most + 1


def test_input_guardrail_refuses_when_it_asks_for_another_try(inline_runtime: Runtime) -> None:
    """S-GRD-18: there is no answer yet; no model is asked."""
    model = ScriptedModel("An answer")
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("Say", agent(model), input_guardrails=[never])]).run(runtime=inline_runtime)
    cause = caught.value.__cause__
    assert isinstance(cause, GuardrailViolationError)
    assert cause.violation_message == "not yet (TryAgain from an input guardrail: there is no answer yet)"
    assert model.calls == ()


def test_handler_task_fails_when_a_guardrail_asks_for_another_try(inline_runtime: Runtime) -> None:
    """S-GRD-18: nobody can be asked for another answer."""
    given = task("Say", handler=answered, output_guardrails=[never])
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[given]).run(runtime=inline_runtime)
    assert isinstance(caught.value.__cause__, GuardrailViolationError)
