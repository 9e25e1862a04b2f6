"""What tasks give back on Ray: large texts, objects that cannot leave their process, objects that cannot enter ours."""

from __future__ import annotations

import os
import threading

import pytest

from ensemble_ray import (
    AgentExecutionError,
    ChatResponse,
    Ensemble,
    EnsembleError,
    Runtime,
    TaskExecutionError,
    TaskFailedEvent,
    ToolCallEvent,
    ToolResult,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S, Watcher


class Locked:
    """A payload that no process but its own can have."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __repr__(self) -> str:
        return "Locked()"


def _open(process: int) -> object:
    if os.getpid() != process:
        raise ImportError("No module named 'only_there'")
    return Mined()


class Mined:
    """A payload that leaves its process well, and cannot be loaded anywhere else."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_open, (os.getpid(),))

    def __repr__(self) -> str:
        return "Mined()"


@tool
def give(kind: str) -> ToolResult:
    """Give a payload beside the text."""
    return ToolResult.success("text", Locked() if kind == "locked" else Mined())


@pytest.mark.parametrize("is_heard", [False, True])
@pytest.mark.parametrize("kind", ["locked", "mined"])
def test_payload_of_a_tool_never_fails_its_task(runtime: Runtime, kind: str, *, is_heard: bool) -> None:
    """S-EVT-35, S-TOOL-3, S-TRC-52: a listener must not change a run; what cannot travel is shown as its text."""
    watcher = Watcher()
    model = ScriptedModel(call("give", f'{{"kind": "{kind}"}}'), "done")
    ensemble = Ensemble(tasks=[task("go", agent(model, tools=[give]))], listeners=[watcher] if is_heard else [])
    output = ensemble.start(runtime=runtime).result(timeout_s=PATIENCE_S)
    assert output.raw == "done"
    assert output.trace is not None
    (traced,) = output.trace.task_traces[0].llm_interactions[0].tool_calls
    assert traced.structured_output == f"{kind.capitalize()}()"
    if is_heard:
        (event,) = watcher.of(ToolCallEvent)
        assert repr(event.structured_result).strip("'") == f"{kind.capitalize()}()"
        assert watcher.methods[-1] == "on_ensemble_completed"


def payload(kind: str) -> object:
    """A handler whose payload is part of its task's output."""
    return lambda _: ToolResult.success("text", Locked() if kind == "locked" else Mined())


@pytest.mark.parametrize("is_heard", [False, True])
def test_output_that_cannot_travel_is_a_failed_task(ray_runtime: Runtime, *, is_heard: bool) -> None:
    """S-CONV-34, S-EVT-10: it says so; never a hang; inline it works."""
    watcher = Watcher()
    typed = task("go", handler=payload("locked"), output_type=Locked)
    ensemble = Ensemble(tasks=[typed], listeners=[watcher] if is_heard else [])
    with pytest.raises(TaskExecutionError) as caught:
        ensemble.run(runtime=ray_runtime)
    assert isinstance(caught.value.__cause__, AgentExecutionError)
    assert str(caught.value.__cause__).startswith("The result of task 'go' cannot leave its agent's process: ")
    if is_heard:
        assert watcher.lines == ["start go", "failed go"]
    assert isinstance(ensemble.run(runtime="inline").task_outputs[0].parsed_output, Locked)


@pytest.mark.parametrize("is_heard", [False, True])
def test_output_that_cannot_be_loaded_here_is_an_error_that_says_so(ray_runtime: Runtime, *, is_heard: bool) -> None:
    """S-ERR-37, S-CONV-34: an EnsembleError with what to do."""
    typed = task("go", handler=payload("mined"), output_type=Mined)
    ensemble = Ensemble(tasks=[typed], listeners=[Watcher()] if is_heard else [])
    with pytest.raises(EnsembleError) as caught:
        ensemble.start(runtime=ray_runtime).result(timeout_s=PATIENCE_S)
    assert "cannot be loaded in this process: No module named 'only_there'" in str(caught.value)
    assert caught.value.run_id


class MinedError(Exception):
    """An error whose class only the process that raised it has."""

    def __reduce__(self) -> tuple[object, ...]:
        return (_open_error, (os.getpid(), str(self)))


def _open_error(process: int, text: str) -> Exception:
    _open(process)
    return MinedError(text)


class Mine:
    """A model of a package that only workers have."""

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        raise MinedError("quota") from ValueError("deep")


def test_error_of_a_class_that_is_not_here_has_its_name_and_text(runtime: Runtime) -> None:
    """S-ERR-31, S-CONV-32: in the error, in the event, and the causes behind it."""
    watcher = Watcher()
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", agent(Mine()))], listeners=[watcher]).run(runtime=runtime)
    (failed,) = watcher.of(TaskFailedEvent)
    for error in (caught.value.__cause__, failed.cause):
        assert isinstance(error, AgentExecutionError)
        cause = error.__cause__
        assert (type(cause).__name__, str(cause)) == ("MinedError", "quota")
        assert cause is not None
        assert (type(cause.__cause__), str(cause.__cause__)) == (ValueError, "deep")


def test_large_texts_pass(runtime: Runtime) -> None:
    """S-ENG-71, S-TPL-34: megabytes through tools, events, context and outputs, uncut."""
    size = 3_000_000

    @tool
    def much() -> str:
        """Give much."""
        return "m" * size

    watcher = Watcher()
    model = ScriptedModel(call("much"), lambda asked: asked.messages[-1].content)
    first = task("first", agent(model, tools=[much]))
    last = task("last", handler=lambda context: str(len(context.context_outputs[0].raw)), context=[first])
    output = Ensemble(tasks=[first, last], listeners=[watcher]).run(runtime=runtime)
    assert (len(output.task_outputs[0].raw), output.raw) == (size, str(size))
    assert len(watcher.of(ToolCallEvent)[0].tool_result) == size
