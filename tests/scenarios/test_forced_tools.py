"""A team whose model is forced to call a tool: the task ends, and each task is forced once more."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from ensemble_ray import ChatMessage, Ensemble, OpenAIChatModel, Runtime, ToolCall, tool
from ensemble_ray.testing import Fault, ModelServer, ServedRequest
from tests.builders import agent, task


class City(BaseModel):
    """What is asked for."""

    name: str


@tool
def look() -> str:
    """Look."""
    return "seen"


def obedient(request: ServedRequest) -> str | ToolCall | Fault:
    """Answers as OpenAI does: it calls a tool where it must, and refuses options that have no tools."""
    if not request.tools:
        refused = [name for name in ("tool_choice", "parallel_tool_calls") if name in request.body]
        text = f"'{refused[0]}' is only allowed when 'tools' are specified." if refused else ""
        return Fault(status=400, message=text) if refused else '{"name": "Oslo"}'
    return ToolCall(id="c1", name="look", arguments="{}") if "tool_choice" in request.body else "done"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_each_task_is_forced_until_its_first_result(inline_runtime: Runtime, choice: object) -> None:
    """S-LLM-26: history, corrections and other tasks do not change that; S-LLM-25: corrections have no such options."""
    with ModelServer(obedient) as server:
        model = OpenAIChatModel("m", base_url=server.base_url, tool_choice=choice, parallel_tool_calls=False)
        worker = agent(model, tools=[look])
        earlier = [ChatMessage("user", "Before?"), ChatMessage("assistant", "Nothing")]
        first = task("look once", worker).replace(history=earlier)
        typed = task("name it", worker).replace(output_type=City)
        output = Ensemble(tasks=[first, typed]).run(runtime=inline_runtime)
        forced = ["tool_choice" in request.body for request in server.requests]
    assert output.task_outputs[0].raw == "done"
    assert output.task_outputs[1].parsed_output == City(name="Oslo")
    assert forced == [True, False, True, False, False]


def test_a_model_that_is_forced_answers_when_its_tool_calls_are_used_up(inline_runtime: Runtime) -> None:
    """S-LLM-26, S-ENG-45: a stop message is a result, too."""
    with ModelServer(
        lambda request: [ToolCall("1", "look", "{}")] * 3 if len(request.messages) < 3 else "done"
    ) as server:
        model = OpenAIChatModel("m", base_url=server.base_url, tool_choice="required")
        team = Ensemble(tasks=[task("look", agent(model, tools=[look], max_iterations=1))])
        assert team.run(runtime=inline_runtime).raw == "done"
        assert ["tool_choice" in request.body for request in server.requests] == [True, False]
