"""Agents with tools: what a model is offered and sent, what becomes of its requests, several at once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ensemble_ray import (
    AbstractAgentTool,
    AgentExecutionError,
    AgentTool,
    ChatResponse,
    DynamicToolProvider,
    Ensemble,
    IllegalStateError,
    Runtime,
    TaskExecutionError,
    ToolCallEvent,
    ToolConfigurationError,
    ToolResult,
    ValidationError,
    tool,
)
from ensemble_ray.record.runs import read_facts
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool
def broken(text: str = "") -> str:
    """Fail."""
    raise ValueError("it broke")


@tool
def silent_failure() -> str:
    """Fail without a text."""
    raise KeyboardInterruptLike


@tool
def save(tags: list[str], count: int = 5) -> str:
    """Save tags."""
    return f"{tags} {count}"


class KeyboardInterruptLike(Exception):  # noqa: N818  its name is what the model gets to see
    """An error without a text."""


@tool
def nothing() -> None:
    """Give nothing."""


class Echo(AgentTool):
    name = "echo"
    description = "Repeats its input."

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.success(f"heard {text}", {"heard": text})


class Crash(AgentTool):
    name = "crash"
    description = "Raises."

    def execute(self, text: str, /) -> ToolResult:
        raise RuntimeError(f"no {text}")


class Refuse(AgentTool):
    name = "refuse"
    description = "Fails politely."

    def execute(self, text: str, /) -> ToolResult:
        return ToolResult.failure("not allowed")


class Silent(AgentTool):
    name = "silent"
    description = "Gives None."

    def execute(self, text: str, /) -> ToolResult:
        return None  # type: ignore[return-value]  what a careless tool does


class Misconfigured(AgentTool):
    name = "misconfigured"
    description = "Cannot work."

    def execute(self, text: str, /) -> ToolResult:
        raise ToolConfigurationError("set it up first")


class Role(AbstractAgentTool):
    """Says on whose behalf it works."""

    name = "role"
    description = "Tells the role."

    def do_execute(self, text: str, /) -> ToolResult:
        here = self.context
        return ToolResult.success(f"{here.agent_role} {here.logger.name} {here.tool_name} {here.task_index}")


class Menu(DynamicToolProvider):
    """Offers one more tool each time it is asked."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def resolve(self) -> list[object]:
        self._marks.add("asked")
        return [add, Echo()]


def results_of(model: ScriptedModel) -> list[str | None]:
    """What the model was sent as tool results, in order."""
    return [message.content for message in model.calls[-1].messages if message.role == "tool"]


def test_agent_without_tools_makes_one_call(inline_runtime: Runtime) -> None:
    """S-ENG-31, S-DOM-10, S-TOOL-33, S-CONV-24, S-CONV-25: [system, user]; tool requests of the answer are ignored."""
    model = ScriptedModel(ChatResponse(text="the answer", tool_calls=(call("add"),)))
    output = Ensemble(tasks=[task("go", agent(model))]).run(runtime=inline_runtime)
    (asked,) = model.calls
    assert [message.role for message in asked.messages] == ["system", "user"]
    assert asked.tools == ()
    assert (output.raw, output.total_tool_calls) == ("the answer", 0)
    assert "tool" not in (asked.messages[0].content or "")


def test_loop_sends_the_whole_history_with_every_call(runtime: Runtime) -> None:
    """S-ENG-32, S-ENG-33, S-TRC-22, S-DOM-51, S-CONV-25: text beside requests is not the answer."""
    first, second = call("add", '{"a": 1, "b": 2}', number=1), call("add", '{"a": 3, "b": 4}', number=2)
    model = ScriptedModel(ChatResponse(text="let me see", tool_calls=(first,)), second, "it is 7")
    output = Ensemble(tasks=[task("go", agent(model, tools=[add]))]).run(runtime=runtime)
    assert (output.raw, output.total_tool_calls) == ("it is 7", 2)
    assert [[spec.name for spec in asked.tools] for asked in model.calls] == [["add"]] * 3
    roles = [[message.role for message in asked.messages] for asked in model.calls]
    assert roles == [
        ["system", "user"],
        ["system", "user", "assistant", "tool"],
        ["system", "user", "assistant", "tool", "assistant", "tool"],
    ]
    last = model.calls[2].messages
    assert (last[2].content, list(last[2].tool_calls)) == ("let me see", [first])
    assert [(message.tool_call_id, message.name, message.content) for message in last if message.role == "tool"] == [
        (first.id, "add", "3"),
        (second.id, "add", "7"),
    ]
    assert "add" not in (last[0].content or "") + (last[1].content or "")


def test_specs_cover_both_kinds_in_list_order(inline_runtime: Runtime) -> None:
    """S-TOOL-30, S-TOOL-20."""
    model = ScriptedModel("done")
    Ensemble(tasks=[task("go", agent(model, tools=[Echo(), add]))]).run(runtime=inline_runtime)
    echo, plus = model.calls[0].tools
    assert (echo.name, plus.name) == ("echo", "add")
    assert echo.parameters == {
        "type": "object",
        "properties": {"input": {"type": "string", "description": "The input to pass to the tool"}},
        "required": ["input"],
    }
    assert set(plus.parameters["properties"]) == {"a", "b"}  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("requested", "arguments", "text", "outcome"),
    [
        pytest.param("broken", "{}", "Tool error: ValueError: it broke", "failure", id="S-ENG-51"),
        pytest.param("silent_failure", "{}", "Tool error: KeyboardInterruptLike", "failure", id="S-ENG-61"),
        pytest.param("crash", '{"input": "way"}', "Error: RuntimeError: no way", "failure", id="S-ENG-52"),
        pytest.param("nothing", "{}", "", "success", id="S-ENG-53 tool function"),
        pytest.param("silent", "{}", "", "success", id="S-ENG-53 AgentTool"),
        pytest.param("refuse", "{}", "Error: not allowed", "failure", id="S-ENG-54"),
        pytest.param("echo", "", "heard ", "success", id="S-ENG-56 empty"),
        pytest.param("echo", "not JSON", "heard not JSON", "success", id="S-ENG-56 no JSON"),
        pytest.param("add", '{"a": "x", "b": 1}', "Tool error: ", "failure", id="S-TOOL-13"),
    ],
)
def test_what_a_tool_gives_goes_back_to_the_model(
    inline_runtime: Runtime, requested: str, arguments: str, text: str, outcome: str
) -> None:
    """S-ENG-51, S-ENG-52, S-ENG-53, S-ENG-54, S-ENG-56, S-ENG-61, S-EVT-14, S-ERR-34: the loop goes on."""
    model, watcher = ScriptedModel(call(requested, arguments), "done"), Watcher()
    tools = [add, broken, silent_failure, nothing, Echo(), Crash(), Refuse(), Silent()]
    output = Ensemble(tasks=[task("go", agent(model, tools=tools))], listeners=[watcher]).run(runtime=inline_runtime)
    assert output.raw == "done"
    (sent,) = results_of(model)
    assert sent is not None
    assert sent.startswith(text) if text.endswith(": ") else sent == text
    (event,) = watcher.of(ToolCallEvent)
    assert (event.tool_name, event.tool_arguments, event.tool_result) == (requested, arguments, sent)
    assert event.outcome == outcome


def test_unknown_tool_is_told_to_the_model(inline_runtime: Runtime) -> None:
    """S-ENG-55, S-SET-25: counts, is in the trace as a failure, fires no event."""
    model, watcher = ScriptedModel(call("serch"), "done"), Watcher()
    output = Ensemble(tasks=[task("go", agent(model, tools=[add]))], listeners=[watcher]).run(runtime=inline_runtime)
    assert results_of(model) == ["Error: Unknown tool 'serch'"]
    assert (output.total_tool_calls, watcher.of(ToolCallEvent)) == (1, [])
    assert output.trace is not None
    (traced,) = output.trace.task_traces[0].llm_interactions[0].tool_calls
    assert (traced.tool_name, traced.outcome, traced.result) == ("serch", "failure", "Error: Unknown tool 'serch'")


def test_configuration_error_of_a_tool_fails_the_task(runtime: Runtime) -> None:
    """S-ENG-58, S-TOOL-23, S-ERR-21, S-ERR-23: not fed to the model."""
    model = ScriptedModel(call("misconfigured"), "never")
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", agent(model, tools=[Misconfigured()]))]).run(runtime=runtime)
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert isinstance(cause.__cause__, ToolConfigurationError)
    assert isinstance(cause.__cause__, IllegalStateError)
    assert str(cause.__cause__) == "set it up first"
    assert len(model.calls) == 1


@pytest.mark.parametrize("tools", [[add, add], [Echo(), Echo()]])
def test_name_taken_twice_is_refused_before_any_model_call(inline_runtime: Runtime, tools: list[object]) -> None:
    """S-TOOL-34, S-ENG-60, S-DOM-14, S-ERR-10: at resolution, unwrapped."""
    model = ScriptedModel()
    name = "add" if tools[0] is add else "echo"
    with pytest.raises(ValidationError) as caught:
        Ensemble(tasks=[task("go", agent(model, tools=tools))]).run(runtime=inline_runtime)
    assert str(caught.value) == f"Duplicate tool name: '{name}'"
    assert model.calls == ()


class BadMenu(DynamicToolProvider):
    def resolve(self) -> list[object]:
        return [object()]


def test_what_is_no_tool_is_refused_at_resolution(inline_runtime: Runtime) -> None:
    """S-TOOL-31, S-ENG-60."""
    model = ScriptedModel()
    with pytest.raises(ValidationError) as caught:
        Ensemble(tasks=[task("go", agent(model, tools=[BadMenu()]))]).run(runtime=inline_runtime)
    assert str(caught.value) == ("Tool object of type 'builtins.object' is neither an AgentTool nor has @tool methods")
    assert model.calls == ()


def test_provider_is_asked_once_per_task(inline_runtime: Runtime, tmp_path: Path) -> None:
    """S-TOOL-32: not per model call."""
    marks = Marks(tmp_path / "marks")
    model = ScriptedModel(call("add", '{"a": 1, "b": 1}'), "one", call("echo", '{"input": "x"}'), "two")
    worker = agent(model, tools=[Menu(marks)])
    Ensemble(tasks=[task("first", worker), task("second", worker)]).run(runtime=inline_runtime)
    assert marks.lines == ["asked", "asked"]
    assert [len(asked.tools) for asked in model.calls] == [2, 2, 2, 2]


def test_tool_knows_for_whom_it_works_when_tasks_share_it(runtime: Runtime) -> None:
    """S-TOOL-35, S-TOOL-36: two tasks at the same time, one tool object."""
    shared = Role()
    meeting = threading.Barrier(2)

    def first(_asked: ScriptedCall) -> object:
        meeting.wait(PATIENCE_S)
        return call("role")

    def script() -> ScriptedModel:
        return ScriptedModel(first, lambda asked: asked.messages[-1].content)

    tasks = [task(role, agent(script(), role, tools=[shared])) for role in ("Ann", "Bob")]
    output = Ensemble(tasks=tasks, workflow="parallel").run(runtime=runtime)
    assert sorted(each.raw for each in output.task_outputs) == [
        "Ann ensemble_ray.tool.role role 1",
        "Bob ensemble_ray.tool.role role 2",
    ]


# Several requests in one turn.


def test_repairs_of_arguments_are_in_the_trace(inline_runtime: Runtime, home: str) -> None:
    """S-LLM-40, S-LLM-43: beside what the model wrote; left out where nothing was repaired."""
    asked = '{"tags": "[\\"a\\"]", "count": null}'
    model = ScriptedModel(call("save", asked), call("save", '{"tags": ["b"]}'), "done")
    output = Ensemble(tasks=[task("Save", agent(model, tools=[save]))]).run(runtime=inline_runtime)
    assert output.trace is not None
    (done,) = output.trace.task_traces
    calls = [each for turn in done.llm_interactions for each in turn.tool_calls]
    repairs = ("tags: JSON in a string", "count: null for an argument that can be left out")
    assert [(each.arguments, each.result, each.repairs) for each in calls] == [
        (asked, "['a'] 5", repairs),
        ('{"tags": ["b"]}', "['b'] 5", ()),
    ]
    assert ["repairs" in each.model_dump() for each in calls] == [True, False]
    assert output.run_id is not None
    assert fold_trace(read_facts(output.run_id, Path(home))).task_traces == output.trace.task_traces
