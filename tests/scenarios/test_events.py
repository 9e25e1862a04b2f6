"""Events: which are sent, in which order, with which fields; and reading them from the run's handle."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from ensemble_ray import (
    Ensemble,
    EnsembleCompletedEvent,
    EnsembleOutput,
    EnsembleStartedEvent,
    Event,
    ExitReason,
    FileChangedEvent,
    FileWriteTool,
    LlmIterationCompletedEvent,
    LlmIterationStartedEvent,
    RunState,
    Runtime,
    TaskCompleteEvent,
    TaskExecutionError,
    TaskFailedEvent,
    TaskInputEvent,
    TaskStartEvent,
    ToolCallEvent,
    ToolResult,
    tool,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, answer, call, task
from tests.scenarios.teams import Watcher, wait_for


@tool
def look(what: str) -> ToolResult:
    """Look at something."""
    return ToolResult.success(f"saw {what}", {"what": what})


def test_events_of_a_task_with_tools(runtime: Runtime) -> None:
    """S-EVT-10, S-EVT-12, S-EVT-15, S-EVT-18, S-EVT-32, S-EVT-33, S-EVT-35, S-EVT-36, S-EVT-37, S-EVT-38, S-PAR-41."""
    request = call("look", '{"what": "bees"}')
    model = ScriptedModel(answer("", 7, 3, calls=[request]), answer("they fly", 9, 4))
    worker = agent(model, "Watcher", goal="watch", background="keen", tools=[look])
    facts = task("facts", handler=lambda _: "old facts")
    watcher = Watcher()
    output = Ensemble(tasks=[facts, task("watch bees", worker, context=[facts])], listeners=[watcher]).run(
        runtime=runtime
    )
    assert watcher.methods == [
        "on_ensemble_started",
        "on_task_start",
        "on_task_complete",
        "on_task_start",
        "on_task_input",
        "on_llm_iteration_started",
        "on_llm_iteration_completed",
        "on_tool_call",
        "on_llm_iteration_started",
        "on_llm_iteration_completed",
        "on_task_complete",
        "on_ensemble_completed",
    ]
    run_id = output.run_id
    start = watcher.of(TaskStartEvent)[1]
    assert (start.task_description, start.agent_role, start.task_index, start.total_tasks) == (
        *("watch bees", "Watcher"),
        *(2, 2),
    )
    complete = watcher.of(TaskCompleteEvent)[1]
    assert (complete.task_index, complete.total_tasks) == (2, 2)
    assert complete.task_output == output.task_outputs[1]
    assert complete.duration == output.task_outputs[1].duration
    (given,) = watcher.of(TaskInputEvent)
    assert (given.task_index, given.task_description, given.expected_output) == (2, "watch bees", "a text")
    assert (given.agent_role, given.agent_goal, given.agent_background) == ("Watcher", "watch", "keen")
    assert tuple(given.tool_names) == ("look",)
    assert "### (deterministic): facts\nold facts" in given.assembled_context
    began = watcher.of(LlmIterationStartedEvent)
    assert [(each.iteration_index, each.agent_role, each.task_description) for each in began] == [
        (0, "Watcher", "watch bees"),
        (1, "Watcher", "watch bees"),
    ]
    assert [[message.role for message in each.messages] for each in began] == [
        ["system", "user"],
        ["system", "user", "assistant", "tool"],
    ]
    ended = watcher.of(LlmIterationCompletedEvent)
    assert [(each.iteration_index, each.response_type, each.response_text) for each in ended] == [
        (0, "tool_calls", ""),
        (1, "final_answer", "they fly"),
    ]
    assert [tuple(each.tool_requests) for each in ended] == [(request,), ()]
    assert [(each.input_tokens, each.output_tokens) for each in ended] == [(7, 3), (9, 4)]
    assert all(each.latency >= timedelta() for each in ended)
    (called,) = watcher.of(ToolCallEvent)
    assert (called.tool_name, called.tool_arguments, called.tool_result) == ("look", request.arguments, "saw bees")
    assert (called.structured_result, called.agent_role, called.task_index) == ({"what": "bees"}, "Watcher", 2)
    assert (called.outcome, called.duration >= timedelta()) == ("success", True)
    assert {event.run_id for event in watcher.of(Event)} == {run_id}
    assert {event.instance for event in watcher.of(Event)} == {"task-1#0", "task-2#0"}


def test_failed_task_sends_failed_and_nothing_more(inline_runtime: Runtime) -> None:
    """S-EVT-10, S-EVT-13, S-EVT-34, S-ENG-14: exactly one start and one end; none for tasks that never started."""
    watcher = Watcher()
    writer = agent(ScriptedModel(ValueError("no")))
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("bad", writer), task("never", writer)], listeners=[watcher]).run(runtime=inline_runtime)
    (failed,) = watcher.of(TaskFailedEvent)
    assert (failed.task_description, failed.agent_role, failed.task_index, failed.total_tasks) == (
        "bad",
        "Writer",
        1,
        2,
    )
    assert type(failed.cause) is type(caught.value.__cause__)
    assert str(failed.cause) == "Agent 'Writer': no (ValueError)"
    assert failed.duration >= timedelta()
    assert watcher.lines == ["start bad", "failed bad"]
    assert "on_llm_iteration_completed" not in watcher.methods


def test_unknown_usage_is_zero_in_events_and_minus_one_in_metrics(inline_runtime: Runtime) -> None:
    """S-EVT-16, S-MET-3."""
    watcher = Watcher()
    output = Ensemble(tasks=[task("go", agent(ScriptedModel("x")))], listeners=[watcher]).run(runtime=inline_runtime)
    (ended,) = watcher.of(LlmIterationCompletedEvent)
    assert (ended.input_tokens, ended.output_tokens) == (0, 0)
    assert output.metrics.total_tokens == -1
    assert output.trace is not None
    assert output.trace.task_traces[0].llm_interactions[0].input_tokens == -1


def test_written_file_is_told(runtime: Runtime, tmp_path: Path) -> None:
    """S-EVT-43: from whatever process wrote it, before the call's own event."""
    (tmp_path / "old.txt").write_text("one\ntwo\n", encoding="utf-8")
    writer = agent(
        ScriptedModel(
            call("file_write", '{"path": "new.txt", "content": "a\\nb\\n"}', number=1),
            call("file_write", '{"path": "old.txt", "content": "one\\n2\\n3\\n"}', number=2),
            "done",
        ),
        tools=[FileWriteTool(tmp_path)],
    )
    watcher = Watcher()
    Ensemble(tasks=[task("go", writer)], listeners=[watcher]).run(runtime=runtime)
    created, modified = watcher.of(FileChangedEvent)
    assert (created.agent_role, created.change_type, Path(created.file_path).name) == ("Writer", "created", "new.txt")
    assert (created.lines_added, created.lines_removed) == (2, 0)
    assert (modified.change_type, modified.lines_added, modified.lines_removed) == ("modified", 1, 0)
    assert created.timestamp.utcoffset() == timedelta()
    order = [method for method in watcher.methods if method in {"on_file_changed", "on_tool_call"}]
    assert order == ["on_file_changed", "on_tool_call"] * 2


def test_event_comes_while_the_run_goes_on(runtime: Runtime) -> None:
    """S-EVT-6: the model waits for the event of its own start; it would wait for ever if events came at the end."""
    heard = threading.Event()

    def reply(_asked: ScriptedCall) -> str:
        wait_for(heard)
        return "x"

    output = Ensemble(
        tasks=[task("go", agent(ScriptedModel(reply)))], on_llm_iteration_started=lambda _event: heard.set()
    ).run(runtime=runtime)
    assert output.raw == "x"


def test_first_task_events_come_before_the_second_ends(inline_runtime: Runtime) -> None:
    """S-EVT-6, S-EVT-19: the second task's model waits for the first one's completion to be heard."""
    done = threading.Event()

    def second(_asked: ScriptedCall) -> str:
        wait_for(done)
        return "two"

    writer = agent(ScriptedModel("one", second))
    Ensemble(tasks=[task("a", writer), task("b", writer)], on_task_complete=lambda _event: done.set()).run(
        runtime=inline_runtime
    )


# Reading events from the handle.


def test_handle_gives_all_events_also_to_a_late_reader(inline_runtime: Runtime) -> None:
    """S-EVT-30, S-EVT-31, S-SET-27: past ones first; each reader on its own; the run's state follows."""
    run = Ensemble(tasks=[task("go", agent(ScriptedModel("x")))]).start(runtime=inline_runtime)
    first = list(run.events())
    assert run.result().raw == "x"
    assert run.state is RunState.COMPLETED
    assert list(run.events()) == first
    assert [type(event) for event in first] == [
        EnsembleStartedEvent,
        TaskStartEvent,
        TaskInputEvent,
        LlmIterationStartedEvent,
        LlmIterationCompletedEvent,
        TaskCompleteEvent,
        EnsembleCompletedEvent,
    ]
    assert {event.run_id for event in first} == {run.id}


async def test_stream_gives_events_then_the_output(runtime: Runtime) -> None:
    """S-CONV-15, S-EVT-6: as they happen; the output is the last item."""
    heard = threading.Event()

    def reply(_asked: ScriptedCall) -> str:
        wait_for(heard)
        return "x"

    items: list[object] = []
    async for item in Ensemble(tasks=[task("go", agent(ScriptedModel(reply)))]).stream(runtime=runtime):
        items.append(item)
        if isinstance(item, TaskStartEvent):
            heard.set()
    assert isinstance(items[-1], EnsembleOutput)
    assert items[-1].raw == "x"
    assert all(isinstance(item, Event) for item in items[:-1])


async def test_stream_of_a_failing_run_raises_after_its_events(inline_runtime: Runtime) -> None:
    """S-ENG-14, S-EVT-34."""
    seen: list[object] = []

    async def read() -> None:
        writer = agent(ScriptedModel(ValueError("no")))
        async for item in Ensemble(tasks=[task("go", writer)]).stream(runtime=inline_runtime):
            seen.append(item)  # noqa: PERF401  what came before the error counts

    with pytest.raises(TaskExecutionError):
        await read()
    assert isinstance(seen[-1], TaskFailedEvent)


def test_events_are_not_lost_when_many_come_at_once(runtime: Runtime) -> None:
    """S-PAR-42, S-EVT-6: all were delivered before `run` returned."""
    watcher = Watcher()
    writer = agent(ScriptedModel(otherwise="x"))
    tasks = [task(f"t{n}", writer) for n in range(100)]
    Ensemble(tasks=tasks, workflow="parallel", listeners=[watcher]).run(runtime=runtime)
    assert len(watcher.of(TaskStartEvent)) == 100
    assert len(watcher.of(TaskCompleteEvent)) == 100
    assert watcher.heard[-1][0] == "on_ensemble_completed"
    assert watcher.heard[-1][1][2] is ExitReason.COMPLETED  # type: ignore[index]
    for kind in (TaskStartEvent, TaskCompleteEvent):
        assert {event.task_index for event in watcher.of(kind)} == set(range(1, 101))
