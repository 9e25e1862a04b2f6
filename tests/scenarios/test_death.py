"""Processes that die: a failed task, an answered tool call, a failed run; never a hang, and the next run works."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    EnsembleError,
    ExitReason,
    GuardrailResult,
    ParallelExecutionError,
    RunState,
    Runtime,
    TaskExecutionError,
    TaskFailedEvent,
    tool,
)
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, agent, call, task, until, wait_for


@tool(timeout=None)
def stay(path: str) -> str:
    """Tell this process's id and stay until the file says that all is over."""
    marks = Marks(Path(path))
    marks.add(os.getpid())
    marks.wait("over")
    return "stayed"


@tool
def die() -> str:
    """End this process without a word."""
    os._exit(1)


@tool(cpu=True)
def die_at_work(number: int) -> str:
    """End whatever process does this."""
    os.kill(os.getpid(), signal.SIGKILL)
    return str(number)


def staying(marks: Marks, role: str = "Writer", **fields: object) -> tuple[ScriptedModel, object]:
    """An agent that is at work in a process of its own until `over`, and its model."""
    model = ScriptedModel(call("stay", f'{{"path": "{marks.path}"}}'), "survived")
    return model, agent(model, role, tools=[stay], isolation="process", **fields)


def kill_first(marks: Marks) -> None:
    """End the process that the first mark names."""
    pid = int(until(lambda: marks.lines, "the process's id")[0])
    assert pid != os.getpid()
    os.kill(pid, signal.SIGKILL)


def links(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def test_death_of_an_agents_process_fails_its_task(ray_runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-PAR-34, S-EVT-10, S-ENG-13, S-CONV-32: one failed event; the record says failed; a next run works."""
    marks, watcher = Marks(tmp_path / "marks"), Watcher()
    _, worker = staying(marks)
    before = task("before", handler=lambda _: "done")
    ensemble = Ensemble(tasks=[before, task("go", worker), task("never", worker)], listeners=[watcher])
    run = ensemble.start(runtime=ray_runtime)
    kill_first(marks)
    with pytest.raises(TaskExecutionError) as caught:
        run.result(timeout_s=PATIENCE_S)
    cause = caught.value.__cause__
    assert isinstance(cause, AgentExecutionError)
    assert str(cause).startswith("Agent 'Writer' failed: its process died")
    assert (cause.agent_role, cause.task_description) == ("Writer", "go")
    assert [each.raw for each in caught.value.completed_task_outputs] == ["done"]
    assert not [each for each in links(caught.value) if type(each).__module__.startswith("ray")]
    assert watcher.lines == ["start before", "complete before", "start go", "failed go"]
    (failed,) = watcher.of(TaskFailedEvent)
    assert isinstance(failed.cause, AgentExecutionError)
    assert RunDirectory(Path(home), run.id).state() is RunState.FAILED
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
    ).start(runtime=ray_runtime)
    kill_first(marks)
    with pytest.raises(ParallelExecutionError) as caught:
        run.result(timeout_s=PATIENCE_S)
    assert [each.raw for each in caught.value.completed_task_outputs] == ["alive"]
    assert list(caught.value.failed_task_causes) == ["die"]


def test_all_tasks_of_a_dead_process_fail_once(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-PAR-34, S-PAR-12, S-EVT-10: several at the same time, many enough to travel in one message."""
    marks, watcher = Marks(tmp_path / "marks"), Watcher()
    model = ScriptedModel(otherwise=call("stay", f'{{"path": "{marks.path}"}}'))
    worker = agent(model, tools=[stay])
    run = Ensemble(
        tasks=[task(f"t{n}", worker) for n in range(6)],
        workflow="parallel",
        parallel_error_strategy="continue_on_error",
        listeners=[watcher],
    ).start(runtime=ray_runtime)
    until(lambda: len(marks.lines) == 6, "all tasks at work")
    kill_first(marks)
    with pytest.raises(ParallelExecutionError) as caught:
        run.result(timeout_s=PATIENCE_S)
    assert (caught.value.failed_count, caught.value.completed_count) == (6, 0)
    assert len(watcher.of(TaskFailedEvent)) == 6


def test_death_of_a_process_in_a_cancelled_run_is_no_failure(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-SET-27, S-PAR-34."""
    marks = Marks(tmp_path / "marks")
    _, worker = staying(marks)
    run = Ensemble(tasks=[task("go", worker)]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the task")
    run.cancel()
    kill_first(marks)
    assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED


def test_tool_that_ends_its_process_fails_the_task(ray_runtime: Runtime) -> None:
    """S-PAR-34: the same, from inside."""
    worker = agent(ScriptedModel(call("die"), "never"), tools=[die])
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[task("go", worker)]).start(runtime=ray_runtime).result(timeout_s=PATIENCE_S)
    assert "its process died" in str(caught.value.__cause__)


def test_second_task_gets_a_fresh_process_when_the_first_ones_died(ray_runtime: Runtime) -> None:
    """S-PAR-34, S-PAR-24: an agent is an id; its next task is sent to another process."""
    worker = agent(
        ScriptedModel(otherwise=lambda asked: call("die") if "bad" in str(asked.messages[1]) else "fine"), tools=[die]
    )
    bad, good = task("bad", worker), task("good", worker)
    with pytest.raises(ParallelExecutionError) as caught:
        Ensemble(
            tasks=[bad, good], workflow="parallel", max_parallel_tasks=1, parallel_error_strategy="continue_on_error"
        ).start(runtime=ray_runtime).result(timeout_s=PATIENCE_S)
    assert [each.raw for each in caught.value.completed_task_outputs] == ["fine"]


def vanish(_asked: object) -> GuardrailResult:
    """A guardrail that ends the process of the run's callables."""
    os._exit(1)


@pytest.mark.parametrize("what", ["guardrail", "handler"])
def test_death_of_the_callables_process_fails_its_task(ray_runtime: Runtime, what: str) -> None:
    """S-PAR-34, S-SET-31, S-CONV-32: no class of Ray in the chain."""
    if what == "guardrail":
        doomed = task("go", agent(ScriptedModel("x")), output_guardrails=[vanish])
    else:
        doomed = task("go", handler=vanish)
    with pytest.raises(TaskExecutionError) as caught:
        Ensemble(tasks=[doomed]).start(runtime=ray_runtime).result(timeout_s=PATIENCE_S)
    assert isinstance(caught.value.__cause__, AgentExecutionError)
    assert not [each for each in links(caught.value) if type(each).__module__.startswith("ray")]
    assert "died" in str(caught.value.__cause__)


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


def process_of(actor: str) -> int:
    """The id of an actor's process among the descendants of this one; other clusters' are left alone."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True)  # noqa: S607  where it is differs
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    parents = {int(pid): int(ppid) for pid, ppid, *_ in rows}

    def is_ours(pid: int) -> bool:
        while pid in parents:
            if pid == os.getpid():
                return True
            pid = parents[pid]
        return False

    found = [int(pid) for pid, _, *args in rows if args and args[0].startswith(f"ray::{actor}") and is_ours(int(pid))]
    (only,) = found
    return only


def test_death_of_the_scheduler_fails_its_runs_and_no_others(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-CONV-32, S-PAR-34: the caller hears of it; a scheduler comes back by itself."""
    marks = Marks(tmp_path / "marks")
    _, worker = staying(marks)
    run = Ensemble(tasks=[task("go", worker)]).start(runtime=ray_runtime)
    until(lambda: marks.lines, "the task")
    os.kill(process_of("SchedulerActor"), signal.SIGKILL)
    with pytest.raises(EnsembleError) as caught:
        run.result(timeout_s=PATIENCE_S)
    assert "scheduler" in str(caught.value)
    assert caught.value.run_id == run.id
    marks.add("over")
    assert Ensemble(tasks=[task("go", agent(ScriptedModel("fine")))]).run(runtime=ray_runtime).raw == "fine"
