"""Ending a run before its end: by its handle, by cancelling, by Ctrl-C; what never returns holds nothing up."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from ensemble_ray import (
    AgentSynthesizer,
    ChatResponse,
    Ensemble,
    ExitReason,
    InlineRuntime,
    Loop,
    RunState,
    Runtime,
    Task,
    TaskExecutionError,
    TaskStartEvent,
    UnknownEffect,
    ValidationError,
    resume,
    tool,
)
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.processes import program
from tests.scenarios.hanging_run import RUN_ID
from tests.scenarios.teams import PATIENCE_S, Forever, Marks, Watcher, by_task, recorded_state, task_of, until, wait_for

ROOT = Path(__file__).resolve().parents[2]


def test_cancelled_run_gives_what_was_completed(runtime: Runtime, home: str) -> None:
    """S-SET-27, S-DOM-52: nothing more starts; the record says so."""
    forever, watcher = Forever(), Watcher()
    model = ScriptedModel("done", forever, "never")
    writer = agent(model)
    tasks = [task("one", writer), task("two", writer), task("three", writer)]
    run = Ensemble(tasks=tasks, listeners=[watcher]).start(runtime=runtime)
    wait_for(forever.asked)
    assert run.state is RunState.RUNNING
    run.cancel()
    output = run.result(timeout_s=PATIENCE_S)
    assert (output.exit_reason, output.is_complete) == (ExitReason.CANCELLED, False)
    assert [each.raw for each in output.task_outputs] == ["done"]
    assert output.get_output(tasks[0]) is not None
    assert output.get_output(tasks[1]) is None
    assert run.state is RunState.CANCELLED
    assert recorded_state(home, run.id) is RunState.CANCELLED
    assert len(model.calls) == 2
    assert watcher.lines == ["start one", "complete one", "start two"]
    assert watcher.heard[-1][1][2] is ExitReason.CANCELLED  # type: ignore[index]
    assert output.trace is not None
    assert [each.task_description for each in output.trace.task_traces] == ["one", "two"]


def test_cancel_stops_running_tasks_of_a_parallel_run(runtime: Runtime) -> None:
    """S-PAR-33: all that run are stopped, queued ones never start."""
    first, second = Forever(), Forever()
    model = ScriptedModel(otherwise=by_task(a=first, b=second, c="never"))
    writer = agent(model)
    tasks = [task(name, writer) for name in ("a", "b", "c")]
    run = Ensemble(tasks=tasks, workflow="parallel", max_parallel_tasks=2).start(runtime=runtime)
    wait_for(first.asked)
    wait_for(second.asked)
    run.cancel()
    assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED
    assert sorted(task_of(asked) for asked in model.calls) == ["a", "b"]


@pytest.mark.parametrize("times", [1, 2])
def test_run_may_be_cancelled_at_once_and_again(runtime: Runtime, home: str, times: int) -> None:
    """S-SET-27: before anything started; it is recorded all the same."""
    run = Ensemble(tasks=[task("go", agent(ScriptedModel(Forever())))]).start(runtime=runtime)
    for _ in range(times):
        run.cancel()
    assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED
    assert recorded_state(home, run.id) is RunState.CANCELLED


@pytest.mark.parametrize("is_waited_for", [True, False])
def test_run_is_cancelled_while_agents_are_made(runtime: Runtime, *, is_waited_for: bool) -> None:
    """S-SET-27, S-SET-46: the model that makes agents never answers; the run never begins."""
    forever, watcher = Forever(), Watcher()
    run = Ensemble(
        tasks=[Task.of("Write")],
        llm=ScriptedModel(forever),
        agent_synthesizer=AgentSynthesizer.llm_based(),
        listeners=[watcher],
    ).start(runtime=runtime)
    if is_waited_for:
        wait_for(forever.asked)
    run.cancel()
    output = run.result(timeout_s=PATIENCE_S)
    assert (output.exit_reason, output.task_outputs, output.run_id) == (ExitReason.CANCELLED, (), run.id)
    assert run.state is RunState.CANCELLED
    assert watcher.heard == []


def test_cancelling_a_finished_run_changes_nothing(inline_runtime: Runtime, home: str) -> None:
    """S-SET-27."""
    run = Ensemble(tasks=[task("go", agent(ScriptedModel("x")))]).start(runtime=inline_runtime)
    assert run.result().raw == "x"
    run.cancel()
    assert run.result().exit_reason is ExitReason.COMPLETED
    assert recorded_state(home, run.id) is RunState.COMPLETED


async def test_cancelled_arun_raises_after_the_run_ended(runtime: Runtime, home: str) -> None:
    """S-PAR-33, S-SET-27: recorded as cancelled before the cancellation goes on."""
    forever = Forever()
    ensemble = Ensemble(tasks=[task("go", agent(ScriptedModel(forever)))])
    waiting = asyncio.ensure_future(ensemble.arun(runtime=runtime, run_id="cancelled"))
    await asyncio.to_thread(wait_for, forever.asked)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert recorded_state(home, "cancelled") is RunState.CANCELLED


async def test_leaving_a_stream_early_cancels_its_run(runtime: Runtime, home: str) -> None:
    """S-SET-27."""
    forever = Forever()
    stream = Ensemble(tasks=[task("go", agent(ScriptedModel(forever)))]).stream(runtime=runtime, run_id="left")
    async for item in stream:
        if isinstance(item, TaskStartEvent):
            break
    await stream.aclose()  # type: ignore[attr-defined]

    def ended() -> bool:
        return until(lambda: recorded_state(home, "left") is RunState.CANCELLED, "the end of the run")

    assert await asyncio.to_thread(ended)


@tool(timeout=None)
def blocked(path: str) -> str:
    """Block a thread for ever."""
    Marks(Path(path)).add(os.getpid())
    threading.Event().wait()
    return "never"


@tool(timeout=None)
async def holding(path: str) -> str:
    """Block the loop of this process for ever, as no async tool should."""
    Marks(Path(path)).add(os.getpid())
    time.sleep(3600)  # noqa: ASYNC251  that is the point
    return "never"


@tool(timeout=None)
async def stubborn(path: str) -> str:
    """Not hear of being cancelled."""
    Marks(Path(path)).add(os.getpid())
    gone = asyncio.get_running_loop().time() + 3600
    while asyncio.get_running_loop().time() < gone:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue
    return "never"


@tool
def where() -> str:
    """Give this process's id."""
    return str(os.getpid())


def check_left_behind(runtime: Runtime, tmp_path: Path, *stuck: object) -> None:
    """Cancel runs while those tools are at work, one in each; the next run works, on Ray in another process."""
    runs, marks = [], []
    for each in stuck:
        name = str(each.__name__)  # type: ignore[attr-defined]
        marks.append(Marks(tmp_path / name))
        model = ScriptedModel(call(name, f'{{"path": "{marks[-1].path}"}}'), "never")
        runs.append(Ensemble(tasks=[task("go", agent(model, tools=[each]))]).start(runtime=runtime))
    for mark in marks:
        until(lambda here=mark: here.lines, "the tool")
    for run in runs:
        run.cancel()
    for run in runs:
        assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED
    model = ScriptedModel(call("where"), lambda asked: asked.messages[-1].content)
    found = Ensemble(tasks=[task("go", agent(model, tools=[where]))]).run(runtime=runtime).raw
    left = [line for mark in marks for line in mark.lines]
    assert len(left) == len(stuck)
    assert (found in left) == isinstance(runtime, InlineRuntime)


def test_blocking_tool_does_not_delay_the_end(runtime: Runtime, tmp_path: Path) -> None:
    """S-SET-48, S-SET-27: its thread is left behind."""
    check_left_behind(runtime, tmp_path, blocked)


def test_tools_that_hold_on_are_ended_with_their_processes(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-SET-27, S-PAR-33: on Ray, after a grace; one that holds its loop, and one that does not hear of cancelling."""
    check_left_behind(ray_runtime, tmp_path, holding, stubborn)


def test_tool_that_does_not_hear_of_cancelling_is_left_behind(
    inline_runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-SET-27: after a grace, which is shorter here, the run ends without it."""
    monkeypatch.setattr("ensemble_ray.runs.inline.GRACE_S", 0.2)
    check_left_behind(inline_runtime, tmp_path, stubborn)


class Blocked:
    """A sync model or handler that never returns."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def chat(self, messages: object, tools: object = ()) -> ChatResponse:
        self(messages)
        raise AssertionError("never")

    def __call__(self, _context: object) -> str:
        self._marks.add("blocked")
        threading.Event().wait()
        return "never"


@pytest.mark.parametrize("what", ["model", "handler"])
def test_blocking_models_and_handlers_do_not_delay_the_end(runtime: Runtime, tmp_path: Path, what: str) -> None:
    """S-SET-48."""
    marks = Marks(tmp_path / "marks")
    never = Blocked(marks)
    stuck = task("go", agent(never)) if what == "model" else task("go", handler=never)
    run = Ensemble(tasks=[stuck]).start(runtime=runtime)
    marks.wait("blocked")
    run.cancel()
    assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED


class BlockedOnce:
    """A handler that never returns from its first call."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks

    def __call__(self, _asked: object) -> str:
        self.marks.add("called")
        if len(self.marks.lines) == 1:
            threading.Event().wait()
        return "paid"


@pytest.mark.parametrize("is_in_loop", [False, True], ids=["task", "loop"])
def test_cancelled_run_stays_as_it_is_until_an_unknown_outcome_is_decided(
    runtime: Runtime, home: str, tmp_path: Path, *, is_in_loop: bool
) -> None:
    """S-DUR-145, S-DUR-146: it does not become a failed run, which could not be resumed."""
    marks = Marks(tmp_path / "marks")
    pay = task("pay", name="pay", handler=BlockedOnce(marks))
    loops = [Loop(name="twice", body=[pay], max_iterations=1)] if is_in_loop else []
    team = Ensemble(tasks=[] if is_in_loop else [pay], loops=loops)
    run = team.start(runtime=runtime)
    marks.wait("called")
    run.cancel()
    assert run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED
    for _ in range(2):
        with pytest.raises(
            ValidationError, match=r"stays cancelled: the handler of task '.*pay#0' was called at"
        ) as refused:
            resume(run.id, team, runtime=runtime)
        assert "on_unknown='ask'" in str(refused.value)
        assert recorded_state(home, run.id) is RunState.CANCELLED
    told: list[UnknownEffect] = []

    def decide(effect: UnknownEffect) -> str:
        told.append(effect)
        return "repeat"

    output = resume(run.id, team.replace(on_unknown=decide), runtime=runtime)
    assert (output.raw, output.state, len(told), marks.lines) == ("paid", RunState.COMPLETED, 1, ["called"] * 2)


def test_cancelled_run_fails_when_that_was_chosen(inline_runtime: Runtime, tmp_path: Path) -> None:
    """S-DUR-145, S-DUR-146: the error says that the call did not return, and nothing of a process that died."""
    marks = Marks(tmp_path / "marks")
    team = Ensemble(tasks=[task("pay", handler=BlockedOnce(marks))], on_unknown="fail")
    run = team.start(runtime=inline_runtime)
    marks.wait("called")
    run.cancel()
    run.result(timeout_s=PATIENCE_S)
    with pytest.raises(TaskExecutionError, match="did not return") as failed:
        resume(run.id, team, runtime=inline_runtime)
    assert "process" not in str(failed.value)


def test_tool_over_its_time_is_answered_for(inline_runtime: Runtime) -> None:
    """S-SET-34, S-SET-48: the loop goes on without it."""

    @tool(timeout=0.05)
    def slow() -> str:
        """Block."""
        threading.Event().wait()
        return "never"

    model = ScriptedModel(call("slow"), "done")
    output = Ensemble(tasks=[task("go", agent(model, tools=[slow]))]).run(runtime=inline_runtime)
    assert output.raw == "done"
    assert model.calls[1].messages[-1].content == "Tool error: timed out after 0.05 s"


# Programs of their own: a signal, and the end of a process.


def environment(home: str, request: pytest.FixtureRequest, which: str) -> dict[str, str]:
    """This one, for a program that joins the tests' cluster."""
    joined = {"RAY_ADDRESS": request.getfixturevalue("ray_cluster")} if which == "ray" else {}
    return {**os.environ, "ENSEMBLE_RAY_HOME": home, "RAY_USAGE_STATS_ENABLED": "0", **joined}


@pytest.mark.parametrize(("which", "kind"), [("inline", "model"), ("inline", "tool"), ("ray", "tool")])
def test_interrupt_ends_a_run_and_its_program(
    request: pytest.FixtureRequest, home: str, tmp_path: Path, which: str, kind: str
) -> None:
    """S-SET-27, S-PAR-33, S-SET-48: Ctrl-C in `run()`; recorded as cancelled; nothing holds the exit."""
    marks = Marks(tmp_path / "marks")
    command = [sys.executable, "-m", "tests.scenarios.hanging_run", which, kind, str(marks.path)]
    env = environment(home, request, which)
    with program(command, log=tmp_path / "log", env=env, cwd=ROOT) as running:
        running.until(lambda: marks.lines, "the run to hang")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(timeout=PATIENCE_S) in {-signal.SIGINT, 130, 1}
        assert "KeyboardInterrupt" in running.text
        # On Ray the run may end after the program, which waits for it for some seconds only.
        until(lambda: recorded_state(home, RUN_ID) is RunState.CANCELLED, "the record of it")


def test_program_ends_though_a_tool_never_returns(home: str, tmp_path: Path) -> None:
    """S-SET-48: neither the run nor the exit of the process waits for it."""
    marks = Marks(tmp_path / "marks")
    command = [sys.executable, "-m", "tests.scenarios.hanging_run", "inline", "timeout", str(marks.path)]
    env = {**os.environ, "ENSEMBLE_RAY_HOME": home}
    with program(command, log=tmp_path / "log", env=env, cwd=ROOT) as running:
        assert running.process.wait(timeout=PATIENCE_S) == 0
        assert "timed out after 0.2 s" in running.text
    assert recorded_state(home, RUN_ID) is RunState.COMPLETED
