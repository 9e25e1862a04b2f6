"""SchedulerActor on a real cluster: whose run an id is, who hears of a death, which processes serve again."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.exceptions

from ensemble_ray import (
    AgentExecutionError,
    Ensemble,
    ParallelErrorStrategy,
    ParallelExecutionError,
    RayRuntime,
    RunExistsError,
    RunOptions,
    Task,
    ToolCallEvent,
    ValidationError,
    tool,
)
from ensemble_ray.actors import spawn
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor, start_recovery
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, until


@pytest.fixture
async def runtime(ray_cluster: str) -> AsyncIterator[RayRuntime]:
    """A runtime that keeps its processes and finds none of others'."""
    await spawn.scheduler(SchedulerActor).evict_idle.remote()
    async with RayRuntime() as warm:
        yield warm


def handled(name: str, work: Any) -> Task:
    """A task that calls that."""
    return Task(description=name, expected_output="a text", handler=lambda _: str(work()))


def pid_tool(marks: Marks) -> Any:
    """A tool that notes which process it is in."""

    @tool
    def where() -> str:
        """Tell the process."""
        marks.add(os.getpid())
        return str(os.getpid())

    return where


class _Method:
    """A method of an actor: its first call fails as while the cluster lists the actor as restarting."""

    calls = 0

    async def remote(self) -> None:
        self.calls += 1
        if self.calls == 1:
            raise ray.exceptions.ActorUnavailableError("restarting", None)


def test_a_new_scheduler_recovers_its_runs_when_the_first_call_fails() -> None:
    """S-DUR-32, S-REV-134: no driver may ask for these runs any more."""
    actor = SimpleNamespace(wait_until_recovered=_Method())
    start_recovery(actor)
    assert actor.wait_until_recovered.calls == 2


async def process_of(runtime: RayRuntime, marks: Marks) -> int:
    """The process that a run of one agent finds."""
    known = len(marks.lines)
    worker = agent(ScriptedModel(call("where"), "done"), tools=[pid_tool(marks)])
    assert (await Ensemble(tasks=[task("t", worker)]).arun(runtime=runtime)).raw == "done"
    return int(marks.lines[known])


async def test_second_run_is_refused_when_one_of_that_id_runs(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    """S-SET-39, S-CONV-32: our own class; the first is not disturbed. Nothing is recorded, so the id is free again."""
    marks = Marks(tmp_path / "marks")

    def wait() -> str:
        marks.add("begun")
        marks.wait("go")
        return "first"

    off = RunOptions(durability="off")
    begun = Ensemble(tasks=[handled("wait", wait)]).start(runtime=ray_runtime, run_id="twice", options=off)
    until(lambda: "begun" in marks.lines, "the first run")
    assert "twice" in await spawn.scheduler(SchedulerActor).states.remote()
    with pytest.raises(RunExistsError, match="Run 'twice' is running: wait for its end") as caught:
        await Ensemble(tasks=[handled("other", str)]).arun(runtime=RayRuntime(), run_id="twice", options=off)
    assert type(caught.value) is RunExistsError
    marks.add("go")
    assert (await begun.aresult()).raw == "first"
    again = Ensemble(tasks=[handled("again", lambda: "second")])
    assert (await again.arun(runtime=ray_runtime, run_id="twice", options=off)).raw == "second"


async def test_one_of_two_runs_is_refused_when_they_are_begun_at_the_same_time(ray_cluster: str) -> None:
    """S-SET-39, S-DUR-15: with one id; the other is not disturbed."""
    team = Ensemble(tasks=[handled("once", lambda: "done")])
    both = await asyncio.gather(
        *(team.arun(runtime=RayRuntime(), run_id="at-once") for _ in range(2)), return_exceptions=True
    )
    assert sorted(type(each).__name__ for each in both) == ["EnsembleOutput", "RunExistsError"]


async def test_run_is_refused_when_the_scheduler_is_of_another_version(
    ray_cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both versions and what to do; no task begins."""
    monkeypatch.setattr("ensemble_ray.actors.driver.cluster.package_version", lambda: "99.0")
    model = ScriptedModel()
    with pytest.raises(ValidationError, match=r"runs ensemble-ray \S+, this process 99\.0\. Install the same version"):
        await Ensemble(tasks=[task("t", agent(model))]).arun(runtime=RayRuntime())
    assert not model.calls


async def test_task_fails_when_its_process_is_killed_and_nothing_is_recorded(
    runtime: RayRuntime, tmp_path: Path
) -> None:
    """S-DUR-31, S-PAR-34, S-PAR-24, S-EVT-10, S-CONV-32: durability `off`; no hang; one failed event; others complete; the next run works."""
    marks = Marks(tmp_path / "marks")

    @tool
    def hold() -> str:
        """Never come back."""
        marks.add(os.getpid())
        threading.Event().wait()
        return "never"

    doomed = task("doomed", agent(ScriptedModel(call("hold")), "Doomed", tools=[hold]))
    other = agent(ScriptedModel(call("where"), "done"), "Fine", tools=[pid_tool(marks)])
    fine, after = task("fine", other), task("after", other, context=[doomed])
    watcher = Watcher()
    begun = Ensemble(
        tasks=[doomed, fine, after],
        workflow="parallel",
        parallel_error_strategy=ParallelErrorStrategy.CONTINUE_ON_ERROR,
        listeners=[watcher],
        durability="off",
    ).start(runtime=runtime)
    until(lambda: "complete fine" in watcher.lines and len(marks.lines) == 2, "both tools")
    (where,) = [event.tool_result for event in watcher.of(ToolCallEvent)]
    (victim,) = [int(line) for line in marks.lines if line != where]
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(ParallelExecutionError) as caught:
        begun.result(PATIENCE_S)
    error = caught.value
    assert (error.failed_count, error.completed_count) == (1, 1)
    cause = error.failed_task_causes["doomed"]
    assert type(cause) is AgentExecutionError
    assert (cause.agent_role, cause.task_description) == ("Doomed", "doomed")
    assert "its process died" in str(cause)
    assert [each.raw for each in error.completed_task_outputs] == ["done"]
    assert sorted(watcher.lines) == ["complete fine", "failed doomed", "start doomed", "start fine"]
    assert await process_of(runtime, marks) != victim


async def test_idle_process_is_replaced_when_it_was_killed_between_runs(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-PAR-34, S-DUR-31: the next run works in another, also where it was bound to the dead one; never a hang."""
    marks = Marks(tmp_path / "marks")
    victim = await process_of(runtime, marks)
    os.kill(victim, signal.SIGKILL)
    assert await process_of(runtime, marks) != victim


async def test_process_serves_the_next_run_when_it_was_left_in_order(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-SET-42: it is bound anew, to other agents and tools, and knows nothing of the run before; cooled, it ends."""
    marks = Marks(tmp_path / "marks")
    first = await process_of(runtime, marks)
    assert await process_of(runtime, marks) == first
    await spawn.scheduler(SchedulerActor).evict_idle.remote()
    place = Path("/proc", str(first))
    await asyncio.to_thread(until, lambda: not place.exists(), "the end of the process")
