"""Runs that go on at the same time share agents' processes: what each has of its own, and what becomes of the others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ensemble_ray import Ensemble, ExitReason, Run, RunOptions, Runtime, TaskHandlerContext
from ensemble_ray.actors import spawn
from ensemble_ray.plan.placement import max_own_processes
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.dying import marks_of, stay, until_recorded
from tests.scenarios.teams import PATIENCE_S, Marks, until

#: Processes of a kind that one run may have on the tests' cluster, before runs share them (S-SET-41).
_MOST = max_own_processes({"CPU": 2.0}, cpus_here=1)


@pytest.fixture(autouse=True)
async def _no_idle_process(ray_runtime: Runtime) -> None:
    """What earlier tests left is gone: a run takes a process that no run has before it shares one."""
    del ray_runtime
    if (scheduler := spawn.existing(spawn.SCHEDULER)) is not None:
        await scheduler.evict_idle.remote()


@pytest.fixture
def marks(tmp_path: Path) -> tuple[Marks, Marks]:
    """What two runs say."""
    return Marks(tmp_path / "first"), Marks(tmp_path / "second")


def staying(marks: Marks, runtime: Runtime, **options: object) -> Run:
    """A run at work in a tool, in a process that it may share."""
    model = ScriptedModel(call("stay", marks_of(marks)), "survived")
    team = Ensemble(tasks=[task("go", agent(model, tools=[stay]))])
    run = team.start(runtime=runtime, options=RunOptions(**options))  # type: ignore[arg-type]  # fields of options
    until(lambda: marks.lines, "the tool")
    return run


@pytest.fixture
def crowd(ray_runtime: Runtime, tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Fills all processes that there may be but one; each has more to do than that one."""
    over: list[Marks] = []
    runs: list[Run] = []

    def fill() -> None:
        for number in range(_MOST - 1):
            here = [Marks(tmp_path / f"crowd-{number}-{each}") for each in range(2)]
            model = ScriptedModel(*(call("stay", marks_of(each)) for each in here), "survived", "survived")
            crowded = agent(model, tools=[stay])
            team = Ensemble(tasks=[task(f"go-{each}", crowded) for each in range(2)], workflow="parallel")
            runs.append(team.start(runtime=ray_runtime))
            over.extend(here)
            for each in here:
                until(lambda each=each: each.lines, "the tool")  # type: ignore[misc]  # the one of this turn

    yield fill
    for each in over:
        each.add("over")
    for run in runs:
        run.result(PATIENCE_S)


def test_runs_share_a_process_and_go_on_apart_when_it_dies(
    ray_runtime: Runtime, home: str, marks: tuple[Marks, Marks], crowd: Callable[[], None]
) -> None:
    """S-CLU-70, S-CLU-73, S-DUR-31: each from its record, in a process that it has for itself."""
    runs = [staying(marks[0], ray_runtime)]
    crowd()
    runs.append(staying(marks[1], ray_runtime))
    first, second = (each.lines[0] for each in marks)
    assert first == second
    for run in runs:
        until_recorded(home, run)
    os.kill(int(first), signal.SIGKILL)
    for each in marks:
        until(lambda each=each: len(each.lines) == 2, "another process")  # type: ignore[misc]  # the one of this turn
    assert len({marks[0].lines[1], marks[1].lines[1], first}) == 3
    for each in marks:
        each.add("over")
    assert [run.result(PATIENCE_S).raw for run in runs] == ["survived", "survived"]


def test_other_run_goes_on_when_one_is_cancelled_in_a_tool_that_does_not_stop(
    ray_runtime: Runtime, marks: tuple[Marks, Marks], tmp_path: Path, crowd: Callable[[], None]
) -> None:
    """S-CLU-72: in the same process, which gets no more runs and ends when the other one has left."""
    cancelled = staying(marks[0], ray_runtime)
    crowd()
    other = staying(marks[1], ray_runtime)
    (pid,) = {each.lines[0] for each in marks}
    cancelled.cancel()
    assert cancelled.result(PATIENCE_S).exit_reason is ExitReason.CANCELLED
    third = Marks(tmp_path / "third")
    late = staying(third, ray_runtime)
    assert third.lines[0] != pid
    for each in (marks[1], third):
        each.add("over")
    assert [run.result(PATIENCE_S).raw for run in (other, late)] == ["survived", "survived"]
    assert marks[1].lines == [pid, "over"]
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the process")


def test_unrecorded_run_has_its_process_alone(ray_runtime: Runtime, marks: tuple[Marks, Marks]) -> None:
    """S-CLU-71: what it has done could not go on elsewhere."""
    runs = [staying(each, ray_runtime, durability="off") for each in marks]
    assert marks[0].lines != marks[1].lines
    for each in marks:
        each.add("over")
    assert [run.result(PATIENCE_S).raw for run in runs] == ["survived", "survived"]


def test_runs_in_one_process_have_handlers_of_their_own(ray_runtime: Runtime, tmp_path: Path) -> None:
    """S-CLU-70, S-CLU-71, S-SET-31: one copy for each run, with what it holds."""
    marks = [Marks(tmp_path / str(number)) for number in range(_MOST + 1)]

    def begin(own: Marks) -> Run:
        counted = [0]

        def count(_: TaskHandlerContext) -> str:
            counted[0] += 1
            if counted[0] == 1:
                own.add(os.getpid())
                for each in marks:
                    until(lambda each=each: each.lines, "all runs")  # type: ignore[misc]  # the one of this turn
            return f"{counted[0]}"

        return Ensemble(tasks=[task("one", handler=count), task("two", handler=count)]).start(runtime=ray_runtime)

    runs = [begin(each) for each in marks]
    assert [[each.raw for each in run.result(PATIENCE_S).task_outputs] for run in runs] == [["1", "2"]] * len(runs)
    assert len({each.lines[0] for each in marks}) == _MOST
