"""What of a recorded run is in memory when it goes on: one page at a time, and outputs that somebody asked for."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, Collection, Sequence

import pytest
from msgspec.structs import replace

from ensemble_ray import RunState
from ensemble_ray.execute.orders import ResumePoint
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import OutputRecorded, PlanRecorded
from ensemble_ray.record.journal import MemoryJournal, in_json_form
from ensemble_ray.record.resume.planned import PlannedResumeReader, read_planned
from ensemble_ray.runs.coordinator import Coordinator, RunJournal
from ensemble_ray.runs.outputs import InMemoryOutputs, SpooledOutputs, recall_output
from ensemble_ray.runs.planned_tasks import PlannedTasks
from ensemble_ray.schedule.instructions import Start
from ensemble_ray.schedule.stimuli import Completed, encode_stimulus
from ensemble_ray.testing import ManualClock
from tests.ensemble_ray.coordinator.planned_runs import Failure, RecordingExecutor, body_of, done
from tests.ensemble_ray.schedule.plans import plan_of

from .facts_of_runs import altered, begun, completed, ended, fact, model, node, output

TASKS = [f"t{number}" for number in range(30)]
NODES = [node(key, key) for key in (*TASKS, "last")]


class Body(str):
    """A text that can be watched."""

    __slots__ = ("__weakref__",)


class WatchedStore:
    """Gives facts one by one, and counts the recorded bodies that are still in memory when it gives the next."""

    def __init__(self, facts: Sequence[Fact]) -> None:
        self._facts = facts
        self._bodies: weakref.WeakSet[Body] = weakref.WeakSet()
        self.asked: list[Collection[str] | None] = []
        self.most = 0

    async def read(
        self, run_id: str, *, kinds: Collection[str] | None = None, has_data: bool = True, is_partial: bool = False
    ) -> AsyncGenerator[Sequence[Fact]]:
        """Return a page for each fact of these kinds."""
        assert (run_id, has_data, is_partial) == ("run-1", True, False)
        self.asked.append(kinds)
        for each in self._facts:
            if kinds is None or each.kind in kinds:
                yield [self._watched(each)]
                gc.collect()
                self.most = max(self.most, len(self._bodies))

    def _watched(self, each: Fact) -> Fact:
        if not isinstance(each.data, OutputRecorded):
            return each
        body = Body("x" * 2000)
        self._bodies.add(body)
        return altered(each, output={**each.data.output_data(), "raw": body})


def interrupted() -> list[Fact]:
    """A run that did all tasks but the last one."""
    return [
        in_json_form(each)
        for key in (None, *TASKS)
        for each in (
            begun(*NODES) if key is None else [model(f"{key}#0", 0, 102), *completed(key, output(key, "x"), 105)]
        )
    ]


@pytest.fixture
def collected() -> None:
    """Have the collector look at what is made from now on alone: all that a session has loaded takes it long."""
    gc.freeze()


@pytest.mark.usefixtures("collected")
async def test_bodies_are_not_kept_in_memory_when_a_run_is_read_that_goes_on() -> None:
    """S-DUR-30, S-DUR-31: one page of them is there at a time, however many there are, and the record is read once."""
    store, outputs = WatchedStore(interrupted()), SpooledOutputs()
    recovery = await read_planned(
        store,  # type: ignore[arg-type]  of a store it reads pages alone
        "run-1",
        lambda instance, given: outputs.stage(instance, str(given.output_data()["raw"]).encode()),
    )
    assert store.most <= 1
    assert store.asked == [None]
    assert len(recovery.resume(lambda _: b"", lambda failure: failure).results) == len(TASKS)
    assert recall_output(outputs, "t7#0") == b"x" * 2000


async def test_recorded_outputs_are_made_objects_when_a_task_asks_for_them() -> None:
    """S-DUR-30: of thirty recorded outputs the context of the next task is loaded, and the others at the end."""
    loaded: list[str] = []

    def load(instance: str, body: bytes) -> str:
        loaded.append(instance)
        return body.decode()

    outputs: InMemoryOutputs[str] = InMemoryOutputs(load)
    recovery = PlannedResumeReader.of(
        interrupted(), lambda instance, _given: outputs.stage(instance, f"output of {instance}".encode())
    )
    plan = plan_of("parallel", {**dict.fromkeys(TASKS, ()), "last": ("t3", "t5")})
    memory = MemoryJournal("run")
    journal = RunJournal(run_id="run", epoch=1, journal=memory, clock=ManualClock(start=200.0))
    resumed = recovery.resume(outputs.get, lambda failure: Failure(failure.message))
    tasks: PlannedTasks = PlannedTasks(
        plan, journal, outputs, body_of, header=PlanRecorded(workflow="parallel"), resumed=resumed
    )
    coordinator, executor = Coordinator(journal, tasks), RecordingExecutor(memory)
    end = asyncio.create_task(coordinator.run(tasks.source, executor))
    await asyncio.wait_for(executor.has_started.wait(), 60)
    assert loaded == ["t3#0", "t5#0"]
    assert executor.started[0].context == ("output of t3#0", "output of t5#0")
    coordinator.deliver([done("last")])
    finished = await end
    assert finished.state is RunState.COMPLETED
    assert loaded == ["t3#0", "t5#0"]
    assert len(list(finished.completed)) == len(TASKS) + 1
    assert len(loaded) == len(TASKS)


@pytest.mark.parametrize("instance", ["writer#0", "loop:refine#2/writer#0", "phase:draft#1/loop:refine#0/writer#0"])
def test_executions_of_one_task_are_known_apart(instance: str) -> None:
    """S-DUR-30: by their instances; each has its own output, and its failure too."""
    other = "loop:refine#1/writer#0"
    kept: dict[str, object] = {}
    facts = [
        *begun(node("writer", "Write")),
        fact("output", instance, 105, output=output("Write", "this")),
        Fact(run="run-1", name=instance, at=105, data=encode_stimulus(Completed(at=105.0, instance=instance))),
        fact("task_failed", other, 106, error_type="ValueError", message="broke"),
    ]
    recovery = PlannedResumeReader.of(
        [in_json_form(each) for each in facts],
        lambda name, given: kept.update({name: given.output_data()["raw"]}),
    )
    results = recovery.resume(lambda _: "", lambda failure: failure).results
    assert kept == {instance: "this"}
    assert set(results) == {instance, other}
    assert (results[instance].status, results[instance].key) == ("completed", "writer")
    assert (results[other].status, str(results[other].error)) == ("failed", "broke")
    (_, (told,)) = recovery.stimuli
    assert isinstance(told, Completed)
    assert told.instance == instance


def test_run_that_recorded_nothing_is_known_as_such() -> None:
    """S-DUR-30: it begins; a run that has a plan goes on."""
    assert PlannedResumeReader.of([]).is_empty
    assert not PlannedResumeReader.of([*begun(NODES[0]), ended(200)]).is_empty


def test_text_that_the_source_reads_is_there_when_it_was_not_told() -> None:
    """S-DUR-30: its owner died between the review's end and the stimulus; of tasks that it was told of, as it was told."""
    read = Fact(
        run="run-1", name="c#0", at=105, data=encode_stimulus(Completed(at=105.0, instance="c#0", text="APPROVE"))
    )
    facts = [
        *begun(*(node(key, key) for key in "abc")),
        *completed("a", output("a", "told"), 105),
        fact("output", "b#0", 105, output=output("b", "REVISE: shorter")),
        fact("output", "c#0", 105, output=output("c", "APPROVE")),
        read,
    ]
    recovery = PlannedResumeReader.of([in_json_form(each) for each in facts])
    results = recovery.resume(lambda _: "", lambda failure: failure).results
    assert [results[f"{key}#0"].text for key in "abc"] == [None, "REVISE: shorter", "APPROVE"]


async def test_text_is_told_of_tasks_alone_whose_order_asks_for_it() -> None:
    """S-DUR-30: so that the record of a plain task stays what it was."""
    done_before = replace(done("a"), text="APPROVE")
    resumed: ResumePoint[str, Failure] = ResumePoint(
        started_at=50.0, stimuli=[], results={"a#0": done_before, "b#0": done_before}
    )
    journal = RunJournal(run_id="run", epoch=1, journal=MemoryJournal("run"), clock=ManualClock(start=200.0))
    tasks: PlannedTasks = PlannedTasks(
        plan_of("parallel", {"a": (), "b": ()}),
        journal,
        InMemoryOutputs(),
        body_of,
        header=PlanRecorded(),
        resumed=resumed,
    )
    told = [*tasks.look_up(Start(instance="a#0", wants_text=True)), *tasks.look_up(Start(instance="b#0"))]
    assert [each.text for each in told if isinstance(each, Completed)] == ["APPROVE", None]
