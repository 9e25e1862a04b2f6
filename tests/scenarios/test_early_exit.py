"""Leaving a run early from inside: what is kept, what still runs, which reason counts."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, ExitEarlyError, ExitReason, Runtime, TaskHandlerContext, tool
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, by_task, task_of, until_recorded, wait_for


@tool
def leave(timed_out: bool = False) -> str:  # noqa: FBT001, FBT002  a model fills it in
    """End the run."""
    raise ExitEarlyError("that is enough", timed_out)


@tool
def look() -> str:
    """Look."""
    return "seen"


@pytest.mark.parametrize(
    ("arguments", "reason"), [("{}", ExitReason.USER_EXIT_EARLY), ('{"timed_out": true}', ExitReason.TIMEOUT)]
)
def test_exit_of_a_tool_ends_the_run_without_an_error(runtime: Runtime, arguments: str, reason: ExitReason) -> None:
    """S-ENG-17, S-ENG-59, S-TOOL-23, S-ERR-22, S-DOM-50, S-DOM-52: outputs so far; later tasks make no call."""
    model, watcher = ScriptedModel("one", call("leave", arguments), "never"), Watcher()
    worker = agent(model, tools=[leave])
    tasks = [task(name, worker) for name in ("a", "b", "c")]
    output = Ensemble(tasks=tasks, listeners=[watcher]).run(runtime=runtime)
    assert (output.raw, [each.raw for each in output.task_outputs]) == ("one", ["one"])
    assert (output.exit_reason, output.is_complete) == (reason, False)
    assert len(model.calls) == 2
    assert watcher.lines == ["start a", "complete a", "start b"]
    assert watcher.heard[-1][1][2] is reason  # type: ignore[index]
    assert output.trace is not None
    assert [each.task_description for each in output.trace.task_traces] == ["a", "b"]
    assert output.trace.errors == ()


def test_exit_of_the_first_task_leaves_nothing(inline_runtime: Runtime) -> None:
    """S-DOM-50, S-DOM-53."""
    worker = agent(ScriptedModel(call("leave")), tools=[leave])
    output = Ensemble(tasks=[task("a", worker)]).run(runtime=inline_runtime)
    assert (output.raw, output.task_outputs, output.last_completed_output) == ("", (), None)


def test_exit_among_several_calls_ends_the_run(inline_runtime: Runtime) -> None:
    """S-TOOL-85, S-TOOL-82: the others of the turn are done."""
    model = ScriptedModel([call("look", number=1), call("leave", number=2)], "never")
    output = Ensemble(tasks=[task("a", agent(model, tools=[look, leave]))]).run(runtime=inline_runtime)
    assert output.exit_reason is ExitReason.USER_EXIT_EARLY
    assert len(model.calls) == 1


def test_running_tasks_finish_when_another_leaves(runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-PAR-30: no new task starts; what ran is in the output."""
    marks = Marks(tmp_path / "marks")
    slow_began, has_left = threading.Event(), threading.Event()

    def slow(_asked: ScriptedCall) -> str:
        slow_began.set()
        wait_for(has_left)
        return "slow text"

    def quick(_context: TaskHandlerContext) -> str:
        marks.wait("slow began")
        raise ExitEarlyError

    model = ScriptedModel(otherwise=by_task(slow=slow, queued="never", after="never"))
    writer = agent(model)
    slow_task = task("slow", writer)
    tasks = [
        slow_task,
        task("quick", handler=quick),
        task("queued", writer),
        task("after", writer, context=[slow_task]),
    ]
    run = Ensemble(tasks=tasks, workflow="parallel", max_parallel_tasks=2).start(runtime=runtime)
    wait_for(slow_began)
    marks.add("slow began")
    until_recorded(home, run.id, "TaskExited")
    has_left.set()
    output = run.result(timeout_s=PATIENCE_S)
    assert [each.raw for each in output.task_outputs] == ["slow text"]
    assert output.exit_reason is ExitReason.USER_EXIT_EARLY
    assert [task_of(asked) for asked in model.calls] == ["slow"]


def in_turn(marks: Marks, before: str, after: str, error: BaseException) -> object:
    """A handler that waits for a mark, leaves one, and raises."""

    def handler(_context: TaskHandlerContext) -> str:
        if before:
            marks.wait(before)
        if after:
            marks.add(after)
        raise error

    return handler


def test_first_reason_wins(inline_runtime: Runtime, home: str, tmp_path: Path) -> None:
    """S-PAR-30: the second task leaves after the exit of the first was taken."""
    marks = Marks(tmp_path / "marks")
    tasks = [
        task("first", handler=in_turn(marks, "", "", ExitEarlyError("now", timed_out=True))),
        task("second", handler=in_turn(marks, "first left", "", ExitEarlyError("later"))),
    ]
    run = Ensemble(tasks=tasks, workflow="parallel").start(runtime=inline_runtime)
    until_recorded(home, run.id, "TaskExited")
    marks.add("first left")
    assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.TIMEOUT


@pytest.mark.parametrize("failure_first", [True, False])
@pytest.mark.parametrize("strategy", ["fail_fast", "continue_on_error"])
def test_exit_outranks_a_failure(
    inline_runtime: Runtime, tmp_path: Path, strategy: str, *, failure_first: bool
) -> None:
    """S-PAR-30: no error, whichever came first."""
    marks = Marks(tmp_path / "marks")
    failing = in_turn(marks, "" if failure_first else "left", "failed", ValueError("boom"))
    leaving = in_turn(marks, "failed" if failure_first else "", "left", ExitEarlyError("out"))
    tasks = [task("good", handler=lambda _: "kept"), task("bad", handler=failing), task("out", handler=leaving)]
    output = Ensemble(tasks=tasks, workflow="parallel", parallel_error_strategy=strategy).run(runtime=inline_runtime)
    assert output.exit_reason is ExitReason.USER_EXIT_EARLY
    assert [each.raw for each in output.task_outputs] == ["kept"]
