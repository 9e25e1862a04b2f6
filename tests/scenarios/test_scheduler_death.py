"""A scheduler that dies: recorded runs go on in the one that Ray starts instead; others end with an error that says so."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest

from ensemble_ray import Ensemble, EnsembleError, ExitReason, RayRuntime, Run, RunExistsError, RunState, Runtime, tool
from ensemble_ray.actors.link.wire import Submission
from ensemble_ray.actors.scheduler.submission_store import KEY_NAME, SubmissionStore
from ensemble_ray.execute.orders import RunOutcome
from ensemble_ray.facts.fact import Fact
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.ports import PlannedWork, RunRequest, SubmittedRun
from ensemble_ray.testing import ScriptedModel
from tests.builders import agent, call, task
from tests.scenarios.dying import kill_actor, marks_of, staying, until_recorded
from tests.scenarios.teams import PATIENCE_S, Marks, Watcher, until, wait_for


@tool(timeout=None, effect="none")
async def hold_on(path: str) -> str:
    """Tell this process's id and hold its loop for ever."""
    Marks(Path(path)).add(os.getpid())
    threading.Event().wait()
    return "never"


@tool(timeout=None, effect="none")
async def linger(path: str) -> str:
    """Tell this process's id and stay until this is cancelled."""
    Marks(Path(path)).add(os.getpid())
    await asyncio.Event().wait()
    return "never"


@dataclass(frozen=True, slots=True)
class Case:
    """A run that is under way, and what its tool and its model tell."""

    run: Run
    marks: Marks
    models: tuple[ScriptedModel, ...]
    watcher: Watcher


@dataclass(frozen=True, slots=True)
class Cases:
    """Runs that were under way when the scheduler died."""

    home: Path
    recorded: Case
    unrecorded: Case
    #: whose end was asked for before
    cancelled: Case
    #: whose end was asked for when there was no scheduler
    cancelled_late: Case
    #: which somebody else has taken
    taken: Case

    @property
    def all(self) -> tuple[Case, ...]:
        """Each of them."""
        return (self.recorded, self.unrecorded, self.cancelled, self.cancelled_late, self.taken)

    def facts(self, case: Case) -> Sequence[Fact]:
        """What is recorded of one."""
        return RunDirectory(self.home, case.run.id).facts()


def under_way(marks: Marks, runtime: Runtime, **fields: object) -> Case:
    """A run whose second task stays until `over`."""
    first, watcher = ScriptedModel("first"), Watcher()
    model, worker = staying(marks)
    tasks = [task("one", agent(first)), task("go", worker)]
    run = Ensemble(tasks=tasks, listeners=[watcher], **fields).start(runtime=runtime)  # type: ignore[arg-type]  # its fields
    return Case(run, marks, (first, model), watcher)


def held(marks: Marks, runtime: Runtime) -> Case:
    """A run whose only task does not hear of being stopped."""
    model, watcher = ScriptedModel(call("hold_on", marks_of(marks)), "never"), Watcher()
    worker = agent(model, tools=[hold_on], isolation="process")
    return Case(Ensemble(tasks=[task("go", worker)]).start(runtime=runtime), marks, (model,), watcher)


@pytest.fixture(scope="module")
def cases(ray_runtime: Runtime, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cases]:
    """One death for all of these runs."""
    home, place = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("marks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENSEMBLE_RAY_HOME", str(home))
        patch.delenv("ENSEMBLE_RAY_STORE", raising=False)
        found = Cases(
            home,
            recorded=under_way(Marks(place / "recorded"), ray_runtime),
            unrecorded=under_way(Marks(place / "unrecorded"), ray_runtime, durability="off"),
            cancelled=held(Marks(place / "cancelled"), ray_runtime),
            cancelled_late=under_way(Marks(place / "cancelled late"), ray_runtime),
            taken=under_way(Marks(place / "taken"), ray_runtime),
        )
        for case in found.all:
            until(lambda marks=case.marks: marks.lines, "the task")
    for case in (found.recorded, found.cancelled_late, found.taken):
        until_recorded(str(home), case.run)
    store = store_at(StoreAddress(home=str(home)))
    taken = run_blocking(store.claim(found.taken.run.id, by_force=True))
    found.cancelled.run.cancel()
    until(
        lambda: [each for each in found.facts(found.cancelled) if each.data.to_data().get("type") == "CancelRequested"],
        "the record of the wish",
    )
    kill_actor("scheduler")
    found.cancelled_late.run.cancel()
    yield found
    for case in found.all:
        case.marks.add("over")
        case.run.cancel()
        case.run.join(PATIENCE_S)
    run_blocking(taken.close(RunState.CANCELLED))


def test_run_goes_on_when_the_scheduler_dies(cases: Cases, ray_runtime: Runtime) -> None:
    """S-DUR-32, S-DUR-37, S-DUR-38: what is recorded is used; the caller sees one run."""
    case = cases.recorded
    until(lambda: len(case.marks.lines) == 2, "the task in another process")
    case.marks.add("over")
    output = case.run.result(timeout_s=PATIENCE_S)
    assert [each.raw for each in output.task_outputs] == ["first", "survived"]
    assert [len(model.calls) for model in case.models] == [1, 2]
    assert output.metrics.total_llm_call_count == 3
    assert case.watcher.lines.count("complete go") == 1
    assert [fact.data.to_data()["is_restart"] for fact in cases.facts(case) if fact.kind == "resume"] == [True]
    assert RunDirectory(cases.home, case.run.id).state() is RunState.COMPLETED
    assert Ensemble(tasks=[task("go", agent(ScriptedModel("fine")))]).run(runtime=ray_runtime).raw == "fine"


def test_death_of_the_scheduler_fails_runs_that_are_not_recorded(cases: Cases, ray_runtime: Runtime) -> None:
    """S-DUR-32, S-CONV-32, S-PAR-34: the caller hears of it; a scheduler comes back by itself."""
    run = cases.unrecorded.run
    with pytest.raises(EnsembleError, match="the scheduler's process died, and the run is not recorded") as caught:
        run.result(timeout_s=PATIENCE_S)
    assert caught.value.run_id == run.id
    assert Ensemble(tasks=[task("go", agent(ScriptedModel("fine")))]).run(runtime=ray_runtime).raw == "fine"


def test_cancelled_run_ends_when_the_scheduler_dies_meanwhile(cases: Cases) -> None:
    """S-DUR-32, S-SET-27: the wish is in the record; nothing is started again."""
    assert cases.cancelled.run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED
    assert len(cases.cancelled.marks.lines) == 1


def test_run_is_cancelled_when_that_was_asked_while_there_was_no_scheduler(cases: Cases) -> None:
    """S-DUR-32, S-SET-27: the wish is not lost with the process that did not hear of it."""
    assert cases.cancelled_late.run.result(timeout_s=PATIENCE_S).exit_reason is ExitReason.CANCELLED


def test_driver_is_told_when_its_run_cannot_go_on_after_the_schedulers_death(cases: Cases) -> None:
    """S-DUR-32, S-DUR-17: somebody else has it; no later scheduler begins it again."""
    run = cases.taken.run
    with pytest.raises(RunExistsError, match=f"process {os.getpid()}"):
        run.result(timeout_s=PATIENCE_S)
    assert f"run:{run.id}".encode() not in kept_names()


class LateRun:
    """A run of somebody who asks for its end only when the gate is open."""

    def __init__(self, handle: SubmittedRun, gate: threading.Event) -> None:
        self._handle = handle
        self._gate = gate

    async def wait(self) -> RunOutcome:
        await asyncio.to_thread(wait_for, self._gate)
        return await self._handle.wait()

    async def cancel(self) -> None:
        await self._handle.cancel()


class LateRuntime:
    """A runtime whose caller hears of a run's end late."""

    name = "ray"

    def __init__(self, inner: Runtime) -> None:
        self._inner = inner
        self.gate = threading.Event()

    @property
    def store_address(self) -> StoreAddress:
        return self._inner.store_address

    async def submit(self, request: RunRequest, work: PlannedWork) -> LateRun:
        return LateRun(await self._inner.submit(request, work), self.gate)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("is_cancelled", [True, False])
def test_end_is_told_when_the_scheduler_died_after_it(
    ray_runtime: Runtime, home: str, tmp_path: Path, *, is_cancelled: bool
) -> None:
    """S-DUR-32, S-SET-27: nobody had fetched it; it is folded from the record, and a cancelled run stays cancelled."""
    held, late = Marks(tmp_path / "held"), LateRuntime(ray_runtime)
    model = ScriptedModel(call("linger", marks_of(held)) if is_cancelled else "done")
    run = Ensemble(tasks=[task("go", agent(model, tools=[linger]))]).start(runtime=late)
    if is_cancelled:
        until(lambda: held.lines, "the task")
        run.cancel()
    wanted = RunState.CANCELLED if is_cancelled else RunState.COMPLETED
    until(lambda: RunDirectory(Path(home), run.id).state() is wanted, "the end")
    until(lambda: f"run:{run.id}".encode() not in kept_names(), "the vault to forget it")
    kill_actor("scheduler")
    late.gate.set()
    output = run.result(timeout_s=PATIENCE_S)
    assert output.exit_reason is (ExitReason.CANCELLED if is_cancelled else ExitReason.COMPLETED)
    assert (output.raw, len(model.calls)) == ("" if is_cancelled else "done", 1)
    assert len(held.lines) == int(is_cancelled)


class Unreadable:
    """A package of another version: it can be kept, and not be loaded."""

    run_id = "unreadable"

    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("of another version",))


def kept_names() -> list[bytes]:
    """What lies in the vault, readable or not."""
    from ray.experimental import internal_kv

    return cast("list[bytes]", internal_kv._internal_kv_list("run:", namespace=b"ensemble_ray"))


def test_run_begins_when_the_scheduler_has_just_died(ray_runtime: Runtime, cluster_home: Path) -> None:
    """S-DUR-32, S-CONV-32: a driver that comes meanwhile waits for it; what it cannot read in the vault harms nobody."""
    team = Ensemble(tasks=[task("go", agent(ScriptedModel(otherwise="fine")))])
    assert team.start(runtime=ray_runtime).result(PATIENCE_S).raw == "fine"
    run_blocking(SubmissionStore(cluster_home / KEY_NAME).keep(cast("Submission", Unreadable())))
    assert b"run:unreadable" in kept_names()
    kill_actor("scheduler")
    begun = team.start(runtime=RayRuntime())
    assert begun.result(PATIENCE_S).raw == "fine"
    assert not {b"run:unreadable", f"run:{begun.id}".encode()} & set(kept_names())
