"""An agent that is asked without a team: the same run as an ensemble's, and a conversation over several of them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path

import pytest
from pydantic import BaseModel

from ensemble_ray import (
    AgentOutput,
    ChatMessage,
    Event,
    ExitReason,
    IllegalStateError,
    RunOptions,
    RunState,
    Runtime,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskStartEvent,
    TokenEvent,
    ValidationError,
    fork,
    resume,
    tool,
)
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.runs import RunDirectory, read_facts
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, call
from tests.scenarios.teams import Forever, until, wait_for


class Capital(BaseModel):
    """A typed answer."""

    city: str
    country: str


@tool
def count(text: str) -> int:
    """Count the characters of a text."""
    return len(text)


def turns(asked: ScriptedCall) -> list[tuple[str, str | None]]:
    """The conversation before the question, without the system prompt."""
    return [(message.role, message.content) for message in asked.messages[1:-1]]


def test_answer_is_that_of_a_run_with_a_record(runtime: Runtime, home: str) -> None:
    """S-DOM-78, S-DOM-79: text, tool calls, metrics and record are those of a run of one task."""
    model = ScriptedModel(call("count", '{"text": "tide"}'), "4 characters")
    output = agent(model, tools=[count]).run("How long is 'tide'?", runtime=runtime, run_id="asked")
    assert (output.text, output.run_id, output.is_complete) == ("4 characters", "asked", True)
    assert [(each.tool_name, each.result) for each in output.tool_calls] == [("count", "4")]
    assert output.metrics.total_llm_call_count == 2
    assert output.metrics is output.output.metrics
    assert str(output) == str(output.output)
    assert repr(output).startswith("<AgentOutput '4 characters': 1 task, 2 model calls")
    assert RunDirectory(Path(home), "asked").state() is RunState.COMPLETED
    again = agent(ScriptedModel(), tools=[count]).run("How long is 'tide'?", runtime=runtime, run_id="asked")
    assert (again.text, again.messages) == (output.text, output.messages)
    with pytest.raises(ValidationError, match=r"plan\.nodes\.0\.description"):
        agent(ScriptedModel(), tools=[count]).run("How long is 'ebb'?", runtime=runtime, run_id="asked")


def test_question_is_asked_word_for_word(inline_runtime: Runtime) -> None:
    """S-DOM-78: braces are text, and no variables."""
    model = ScriptedModel("A set")
    output = agent(model).run("What is {x} in Python, and {{y}}?", runtime=inline_runtime)
    assert "What is {x} in Python, and {{y}}?" in (model.calls[0].messages[-1].content or "")
    assert output.messages[0].content == "What is {x} in Python, and {{y}}?"


def test_answer_is_parsed_when_a_type_is_asked_for(inline_runtime: Runtime) -> None:
    """S-DOM-79, S-DOM-75: corrected until it parses; a plain answer has nothing parsed."""
    model = ScriptedModel("Paris", '{"city": "Paris", "country": "France"}', "Rome")
    output = agent(model).run("The capital of France?", output_type=Capital, runtime=inline_runtime)
    assert output.parsed == Capital(city="Paris", country="France")
    with pytest.raises(IllegalStateError, match="No parsed output available"):
        assert agent(model).run("The capital of Italy?", runtime=inline_runtime).parsed is None


def test_conversation_goes_on_from_output_to_output(runtime: Runtime, home: str) -> None:
    """S-DOM-77, S-DOM-81: earlier questions and answers are turns before the new question, in record and trace too."""
    model = ScriptedModel("Paris", "{Rome}", "Two", "Four")
    writer = agent(model)
    first = writer.run("France?", runtime=runtime)
    second = writer.run("Italy?", history=first, runtime=runtime)
    third = writer.run("How many?", history=second, runtime=runtime, run_id="third")
    assert [turns(asked) for asked in model.calls[:3]] == [
        [],
        [("user", "France?"), ("assistant", "Paris")],
        [("user", "France?"), ("assistant", "Paris"), ("user", "Italy?"), ("assistant", "{Rome}")],
    ]
    prompts = third.output.trace.task_traces[0].prompts
    assert prompts is not None
    assert [each.content for each in prompts.history] == ["France?", "Paris", "Italy?", "{Rome}"]
    header = next(fact.data for fact in read_facts("third", Path(home)) if isinstance(fact.data, PlanRecorded))
    assert header.definition is not None
    assert header.definition["tasks"]["task-1"]["history"][3] == {"role": "assistant", "content": "{Rome}"}  # type: ignore[index,call-overload]
    said = [ChatMessage(role="user", content="France?"), ChatMessage(role="assistant", content="Paris")]
    fourth = writer.run("And doubled?", history=said, runtime=runtime)
    assert turns(model.calls[3]) == [("user", "France?"), ("assistant", "Paris")]
    assert [each.content for each in fourth.messages] == ["France?", "Paris", "And doubled?", "Four"]


async def test_events_come_as_they_happen_and_the_output_last(runtime: Runtime) -> None:
    """S-DOM-82: in sync and in async code; the answer comes in pieces where the model streams."""
    model = ScriptedModel("Par is", "Ro me", "plain")
    writer = agent(model)
    items: list[Event | AgentOutput] = [item async for item in writer.astream("France?", runtime=runtime)]
    last = items[-1]
    assert isinstance(last, AgentOutput)
    assert last.text == "Par is"
    assert "".join(item.token for item in items if isinstance(item, TokenEvent)) == "Par is"
    assert sum(isinstance(item, TaskCompleteEvent) for item in items) == 1
    items = await asyncio.to_thread(lambda: list(writer.stream("Italy?", history=last, runtime=runtime)))
    last = items[-1]
    assert isinstance(last, AgentOutput)
    assert [each.content for each in last.messages] == ["France?", "Par is", "Italy?", "Ro me"]
    assert "".join(item.token for item in items if isinstance(item, TokenEvent)) == "Ro me"
    assert (await writer.arun("Spain?", runtime=runtime)).text == "plain"
    assert sum(isinstance(item, TokenEvent) for item in items) == 2


def test_run_that_was_left_goes_on_with_its_conversation(runtime: Runtime, home: str) -> None:
    """S-DOM-78, S-DOM-82, S-SET-27: leaving the loop ends the run; resumed and forked, it has its history."""
    forever = Forever()
    model = ScriptedModel("Paris", forever, "Rome", "Roma")
    writer = agent(model)
    first = writer.run("France?", runtime=runtime)
    for item in writer.stream("Italy?", history=first, runtime=runtime, run_id="left"):
        if isinstance(item, TaskStartEvent):
            wait_for(forever.asked)
            break
    until(lambda: RunDirectory(Path(home), "left").state() is RunState.CANCELLED, "the end of the run")
    with pytest.raises(ValidationError, match=r"definition\.tasks\.task-1: .*history"):
        resume("left", writer.to_ensemble("Italy?").replace(stream=True), runtime=runtime)
    asked = writer.to_ensemble("Italy?", history=first).replace(stream=True)
    assert resume("left", asked, runtime=runtime).raw == "Rome"
    assert fork("left", "task-1", asked, runtime=runtime).raw == "Roma"
    assert [turns(each) for each in model.calls[2:]] == [[("user", "France?"), ("assistant", "Paris")]] * 2


def test_interrupt_ends_the_run_before_it_goes_on(runtime: Runtime, home: str) -> None:
    """S-DOM-82, S-SET-27: Ctrl-C while an event is waited for."""
    forever = Forever()
    events = agent(ScriptedModel(forever)).stream("France?", runtime=runtime, run_id="interrupted")
    assert isinstance(events, Generator)
    while not isinstance(next(events), TaskStartEvent):
        pass
    wait_for(forever.asked)
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt())
    assert RunDirectory(Path(home), "interrupted").state() is RunState.CANCELLED


def test_agent_is_held_to_the_same_rules_as_in_a_team(inline_runtime: Runtime) -> None:
    """S-DOM-78, S-BUD-4: budgets of the options hold, and an answer that never came cannot be continued (S-DOM-81)."""
    model = ScriptedModel("Paris")
    spent = agent(model).run("France?", runtime=inline_runtime, options=RunOptions(max_tokens=1))
    assert (spent.text, spent.is_complete, spent.output.exit_reason) == ("", False, ExitReason.BUDGET_EXHAUSTED)
    with pytest.raises(IllegalStateError, match="No parsed output available"):
        assert spent.parsed is None
    with pytest.raises(ValidationError) as caught:
        agent(model).run("Italy?", history=spent, runtime=inline_runtime)
    assert str(caught.value) == (
        f"Agent history must end with an answer, and run '{spent.run_id}' ended early (budget_exhausted): "
        "give the output before it"
    )


def test_failure_is_the_error_of_a_run(inline_runtime: Runtime) -> None:
    """S-DOM-78: as `Ensemble.run`."""
    with pytest.raises(TaskExecutionError) as caught:
        agent(ScriptedModel(RuntimeError("down"))).run("France?", runtime=inline_runtime)
    assert caught.value.run_id is not None
