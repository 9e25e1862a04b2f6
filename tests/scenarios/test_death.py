"""Agents' processes that die: a task that goes on, an answered tool call; never a hang, and the next run works."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    ExitReason,
    GuardrailResult,
    OpenAIChatModel,
    ParallelExecutionError,
    Run,
    RunState,
    Runtime,
    TaskExecutionError,
    TaskFailedEvent,
    UnknownOutcomeError,
    tool,
)
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import ModelServer, ScriptedCall, ScriptedModel
from ensemble_ray.values.ids import REDISPATCH_STEP
from tests.builders import agent, call, task
from tests.scenarios.dying import kill_first, marks_of, stay, staying, until_recorded
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, task_of, until, wait_for


@tool(effect="idempotent")
def die() -> str:
    """End this process without a word."""
    os._exit(1)


@tool
def die_once() -> str:
    """The same; nobody says that it may be done again."""
    os._exit(1)


@tool(cpu=True)
def die_at_work(number: int) -> str:
    """End whatever process does this."""
    os.kill(os.getpid(), signal.SIGKILL)
    return str(number)


def links(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def test_task_goes_on_when_its_process_dies(ray_runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-DUR-31, S-DUR-37: in another process, from its last recorded step; the model is not asked again."""
    marks, watcher = Marks(tmp_path / "marks"), Watcher()
    model, worker = staying(marks)
    run = Ensemble(tasks=[task("go", worker)], listeners=[watcher]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    until_recorded(home, run)
    kill_first(marks)
    until(lambda: len(marks.lines) == 2, "the other process")
    marks.add("over")
    output = run.result(timeout_s=PATIENCE_S)
    assert output.raw == "survived"
    assert len(set(marks.lines)) == 3
    assert len(model.calls) == 2
    assert model.calls[1].messages[-1].content == "stayed"
    assert (watcher.lines.count("complete go"), watcher.of(TaskFailedEvent)) == (1, [])
    assert (output.metrics.total_llm_call_count, output.total_tool_calls) == (2, 1)
    facts = RunDirectory(Path(home), run.id).facts()
    assert {fact.epoch for fact in facts if fact.kind == "output"} == {REDISPATCH_STEP}


def test_model_is_asked_again_for_what_was_in_flight_when_a_process_died(
    ray_runtime: Runtime, model_server: Callable[..., ModelServer], tmp_path: Path
) -> None:
    """S-DUR-37, S-DUR-27, S-DUR-22: once more, and nothing else, under the same name; the tool is not called again."""
    marks = Marks(tmp_path / "marks")
    server = model_server([call("stay", marks_of(marks)), "answered", "answered"])
    model = OpenAIChatModel("m", base_url=server.base_url, api_key="none")
    worker = agent(model, tools=[stay], isolation="process")
    run = Ensemble(tasks=[task("go", worker)]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the tool")
    server.pause()
    marks.add("over")
    server.wait_in_flight(1, timeout_s=PATIENCE_S)
    kill_first(marks)
    server.wait_arrived(3, timeout_s=PATIENCE_S)
    server.resume()
    assert run.result(timeout_s=PATIENCE_S).raw == "answered"
    assert sorted(server.requests_by_key().values()) == [1, 2]
    assert len(marks.lines) == 2


def test_death_of_an_agents_process_fails_its_task_when_nothing_is_recorded(
    ray_runtime: Runtime, tmp_path: Path
) -> None:
    """S-DUR-31, S-PAR-34, S-EVT-10, S-ENG-13, S-CONV-32: durability `off`; one failed event; a next run works."""
    marks, watcher = Marks(tmp_path / "marks"), Watcher()
    _, worker = staying(marks)
    before = task("before", handler=lambda _: "done")
    ensemble = Ensemble(
        tasks=[before, task("go", worker), task("never", worker)], listeners=[watcher], durability="off"
    )
    run = ensemble.start(runtime=ray_runtime)
    until(lambda: "start go" in watcher.lines, "the start")  # what has not been sent dies with the process
    kill_first(marks)
    with pytest.raises(TaskExecutionError) as caught:
        run.result(timeout_s=PATIENCE_S)
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert str(cause).startswith("Agent 'Writer': its process died (")
    assert (cause.agent_role, cause.task_description) == ("Writer", "go")
    assert [each.raw for each in caught.value.completed_task_outputs] == ["done"]
    assert not [each for each in links(caught.value) if type(each).__module__.startswith("ray")]
    assert watcher.lines == ["start before", "complete before", "start go", "failed go"]
    (failed,) = watcher.of(TaskFailedEvent)
    assert isinstance(failed.cause, AgentExecutionError)
    assert Ensemble(tasks=[task("go", agent(ScriptedModel("fine")))]).run(runtime=ray_runtime).raw == "fine"


def test_other_agents_go_on_when_one_dies(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-PAR-34, S-PAR-24: a crash of one leaves the others alone."""
    marks = Marks(tmp_path / "marks")
    failed = threading.Event()

    def late(_asked: ScriptedCall) -> str:
        wait_for(failed)
        return "alive"

    _, victim = staying(marks, "Victim")
    other = agent(ScriptedModel(late), "Other", isolation="process")
    run = Ensemble(
        tasks=[task("die", victim), task("live", other)],
        workflow="parallel",
        parallel_error_strategy="continue_on_error",
        on_task_failed=lambda _event: failed.set(),
        durability="off",
    ).start(runtime=ray_runtime)
    kill_first(marks)
    with pytest.raises(ParallelExecutionError) as caught:
        run.result(timeout_s=PATIENCE_S)
    assert [each.raw for each in caught.value.completed_task_outputs] == ["alive"]
    assert list(caught.value.failed_task_causes) == ["die"]


def six(marks: Marks, watcher: Watcher, runtime: Runtime, durability: str) -> Run:
    """Six tasks of one agent that all are at work in one process; that process is killed."""
    model = ScriptedModel(
        otherwise=lambda asked: "done" if asked.messages[-1].role == "tool" else call("stay", marks_of(marks))
    )
    worker = agent(model, tools=[stay])
    run = Ensemble(
        tasks=[task(f"t{n}", worker) for n in range(6)],
        workflow="parallel",
        parallel_error_strategy="continue_on_error",
        listeners=[watcher],
        durability=durability,
    ).start(runtime=runtime)
    until(lambda: len(marks.lines) == 6, "all tasks at work")
    kill_first(marks)
    return run


def test_all_tasks_of_a_dead_process_fail_once_when_nothing_is_recorded(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-PAR-34, S-PAR-12, S-EVT-10: several at the same time, many enough to travel in one message."""
    marks, watcher = Marks(tmp_path / "marks"), Watcher()
    run = six(marks, watcher, ray_runtime, "off")
    with pytest.raises(ParallelExecutionError) as caught:
        run.result(timeout_s=PATIENCE_S)
    assert (caught.value.failed_count, caught.value.completed_count) == (6, 0)
    assert len(watcher.of(TaskFailedEvent)) == 6


def test_all_tasks_of_a_dead_process_go_on_once(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-DUR-31, S-PAR-12: several at the same time, with what is committed of them, which depends on the durability."""
    begun: list[tuple[Marks, Watcher, Run]] = []
    for durability in ("effects", "run"):
        marks, watcher = Marks(tmp_path / durability), Watcher()
        begun.append((marks, watcher, six(marks, watcher, ray_runtime, durability)))
    for marks, watcher, run in begun:
        until(lambda here=marks: len(here.lines) == 12, "all tasks at work again")
        marks.add("over")
        assert [each.raw for each in run.result(timeout_s=PATIENCE_S).task_outputs] == ["done"] * 6
        completed = sorted(line for line in watcher.lines if line.startswith("complete"))
        assert completed == [f"complete t{n}" for n in range(6)]
        assert not watcher.of(TaskFailedEvent)


def test_death_of_a_process_in_a_cancelled_run_is_no_failure(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-SET-27, S-PAR-34."""
    marks = Marks(tmp_path / "marks")
    _, worker = staying(marks)
    run = Ensemble(tasks=[task("go", worker)]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the task")
    run.cancel()
    kill_first(marks)
    assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED


def test_task_fails_when_its_process_died_the_third_time(ray_runtime: Runtime, home: str) -> None:
    """S-DUR-31, S-DUR-23, S-PAR-34, S-PAR-24: a tool that kills is called again as long as that makes sense.

    The model is asked once. An agent is an id: its next task is sent to another process.
    """
    watcher = Watcher()
    model = ScriptedModel(otherwise=lambda asked: call("die") if task_of(asked) == "bad" else "fine")
    worker = agent(model, tools=[die])
    run = Ensemble(
        tasks=[task("bad", worker), task("good", worker)],
        workflow="parallel",
        max_parallel_tasks=1,
        parallel_error_strategy="continue_on_error",
        listeners=[watcher],
    ).start(runtime=ray_runtime)
    with pytest.raises(ParallelExecutionError) as caught:
        run.result(timeout_s=PATIENCE_S)
    cause = caught.value.failed_task_causes["bad"]
    assert isinstance(cause, AgentExecutionError)
    assert str(cause).startswith("Agent 'Writer': its process died 3 times with this task (")
    assert [task_of(asked) for asked in model.calls] == ["bad", "good"]
    assert [each.raw for each in caught.value.completed_task_outputs] == ["fine"]
    assert watcher.lines.count("failed bad") == len(watcher.of(TaskFailedEvent)) == 1
    assert RunDirectory(Path(home), run.id).state() is RunState.FAILED


def test_model_hears_of_an_unknown_outcome_when_the_process_died_in_a_tool(ray_runtime: Runtime) -> None:
    """S-DUR-23, S-DUR-24: a tool that may be called only once is not called again; the model decides."""
    model = ScriptedModel(call("die_once"), lambda asked: asked.messages[-1].content)
    output = Ensemble(tasks=[task("go", agent(model, tools=[die_once]))]).run(runtime=ray_runtime)
    assert "outcome is unknown" in output.raw
    assert len(model.calls) == 2


def vanish(_asked: object) -> GuardrailResult:
    """A guardrail that ends the process of the run's callables."""
    os._exit(1)


def test_death_of_the_callables_process_fails_its_task(ray_runtime: Runtime) -> None:
    """S-DUR-31, S-PAR-34, S-SET-31, S-CONV-32: the third time, of a guardrail as of a handler; no class of Ray in the chain."""
    guarded = task("go", agent(ScriptedModel("x")), output_guardrails=[vanish])
    handled = task("go", handler=vanish, effect="none")
    for run in [Ensemble(tasks=[doomed]).start(runtime=ray_runtime) for doomed in (guarded, handled)]:
        with pytest.raises(TaskExecutionError) as caught:
            run.result(timeout_s=PATIENCE_S)
        assert isinstance(caught.value.__cause__, AgentExecutionError)
        assert not [each for each in links(caught.value) if type(each).__module__.startswith("ray")]
        assert "died 3 times" in str(caught.value.__cause__)


def test_handler_is_not_called_again_when_its_process_died_in_it(ray_runtime: Runtime) -> None:
    """S-DUR-25: whether it was done is unknown, and there is no model to decide."""
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", handler=vanish)]).start(runtime=ray_runtime).result(timeout_s=PATIENCE_S)
    assert [each for each in links(caught.value) if isinstance(each, UnknownOutcomeError)]


def test_guardrail_is_asked_again_when_the_callables_process_died(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-DUR-31: in the new host; the task that asked goes on where it is, its model is not asked again."""
    marks, model = Marks(tmp_path / "marks"), ScriptedModel("x")

    def weighing(_subject: object) -> GuardrailResult:
        marks.add(os.getpid())
        if len(marks.lines) == 1:
            marks.wait("over")
        return GuardrailResult.success()

    run = Ensemble(tasks=[task("go", agent(model), output_guardrails=[weighing])]).start(runtime=ray_runtime)
    kill_first(marks)
    assert run.result(timeout_s=PATIENCE_S).raw == "x"
    assert len(set(marks.lines)) == 2
    assert len(model.calls) == 1


def test_death_of_a_processor_heavy_tool_is_told_to_the_model(runtime: Runtime) -> None:
    """S-SET-35, S-ERR-19, S-ERR-34: a failed call; the loop goes on, and the next such call works."""

    @tool(cpu=True)
    def square(number: int) -> int:
        """Square a number."""
        return number * number

    model = ScriptedModel(call("die_at_work", '{"number": 1}'), call("square", '{"number": 3}'), "done")
    output = Ensemble(tasks=[task("go", agent(model, tools=[die_at_work, square]))]).run(runtime=runtime)
    assert output.raw == "done"
    results = [message.content or "" for message in model.calls[-1].messages if message.role == "tool"]
    assert results[0].startswith("Tool error: ")
    assert results[1] == "9"
