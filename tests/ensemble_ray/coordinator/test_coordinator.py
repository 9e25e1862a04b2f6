"""The coordinator with a scripted source: every instruction is carried out, every answer comes back as a stimulus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest

from ensemble_ray import ExitReason, RunState
from ensemble_ray.execute.orders import Revision, TaskResult
from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.runs.coordinator import Coordinator, RunJournal
from ensemble_ray.runs.outputs import InMemoryOutputs, ListedOutputs, OutputStore, SpooledOutputs
from ensemble_ray.runs.planned_tasks import PlannedTasks
from ensemble_ray.schedule.instructions import (
    Cancel,
    ContextPart,
    CountTokens,
    End,
    Evaluate,
    Instruction,
    Question,
    Start,
    TaskChanges,
)
from ensemble_ray.schedule.stimuli import Begun, Cancelled, Completed, Evaluated, Stimulus
from ensemble_ray.testing import ManualClock
from tests.ensemble_ray.coordinator.planned_runs import RecordingExecutor, body_of, done, ended_early
from tests.ensemble_ray.schedule.plans import plan_of

END = End(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)


@dataclass
class Script:
    """A source that answers each kind of stimulus with what it is told to."""

    answers: dict[type[Stimulus], list[Instruction]]
    heard: list[Stimulus] = field(default_factory=list)

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Give what the script says, once."""
        self.heard += stimuli
        return [each for stimulus in stimuli for each in self.answers.pop(type(stimulus), [])]


class Asking(PlannedTasks):
    """Tasks with user code to ask."""

    asked: Question | None = None

    def evaluate(self, question: Question) -> None:  # type: ignore[override]  # a plan refuses
        """Keep the question."""
        self.asked = question


class Scripted:
    """A run of two tasks by a script."""

    def __init__(self, answers: dict[type[Stimulus], list[Instruction]]) -> None:
        self.journal = MemoryJournal("run")
        journal = RunJournal(run_id="run", epoch=0, journal=self.journal, clock=ManualClock(start=100.0))
        self.outputs: InMemoryOutputs[str] = InMemoryOutputs()
        self.tasks = Asking(
            plan_of("parallel", {"a": (), "b": ("a",)}), journal, self.outputs, body_of, header=PlanRecorded()
        )
        self.source = Script(answers)
        self.executor = RecordingExecutor(self.journal)
        self.coordinator = Coordinator(journal, self.tasks)
        self.end = asyncio.get_running_loop().create_task(self.coordinator.run(self.source, self.executor))

    async def heard(self, kind: type[Stimulus]) -> Stimulus:
        """Return the first stimulus of that kind, when it was told."""
        async with asyncio.timeout(60):
            while not (found := [each for each in self.source.heard if isinstance(each, kind)]):  # noqa: ASYNC110  a turn
                await asyncio.sleep(0)
        return found[0]


async def test_changes_ride_on_the_order() -> None:
    """S-LOOP-100: the next attempt is another instance, with an earlier output; what is not there is not shown."""
    changes = TaskChanges(attempt=2, feedback="shorter", prior="loop:l#0/b#0")
    starts = [Start(instance="loop:l#1/a#0", changes=changes), Start(instance="loop:l#2/a#0", changes=TaskChanges())]
    run = Scripted({Begun: starts, Completed: [END]})
    run.outputs.put("loop:l#0/b#0", "draft")
    await run.heard(Begun)
    first, second = run.executor.started
    assert (first.key, first.instance) == ("a", "loop:l#1/a#0")
    assert first.revision == Revision(attempt=2, feedback="shorter", prior="draft")
    assert second.revision == Revision(attempt=0, feedback="", prior=None)
    run.coordinator.deliver([TaskResult(key="a", instance="loop:l#1/a#0", status="completed", at=1.0, output="x")])
    assert list((await run.end).completed) == [("loop:l#1/a#0", "x")]


async def test_context_of_an_order_is_what_its_source_says() -> None:
    """S-LOOP-72, S-ENG-11: outputs in the order of the parts, which of them arrive as one, and what is not there."""
    parts = (ContextPart(("x#0",)), ContextPart(("l#0", "l#1"), is_joined=True), ContextPart(("y#0", "x#0")))
    run = Scripted({Begun: [Start(instance="a#0", context=parts, missing="b")], Completed: [END]})
    for instance in ("x#0", "y#0", "l#0", "l#1"):
        run.outputs.put(instance, f"of {instance}")
    await run.heard(Begun)
    (order,) = run.executor.started
    assert order.context == ("of x#0", "of l#0", "of l#1", "of y#0", "of x#0")
    assert (order.joined, order.missing_context) == (((1, 3),), "Do b")
    run.coordinator.deliver([TaskResult(key="a", instance="a#0", status="completed", at=1.0, output="x")])
    await run.end


async def test_text_of_an_answer_is_told_when_the_source_reads_it() -> None:
    """S-PHASE-62: the order asks for it, the stimulus has it."""
    run = Scripted({Begun: [Start(instance="a#0", wants_text=True)], Completed: [END]})
    await run.heard(Begun)
    (order,) = run.executor.started
    assert order.wants_text
    answer = TaskResult(key="a", instance="a#0", status="completed", at=1.0, output="x", text="APPROVE")
    run.coordinator.deliver([answer])
    told = await run.heard(Completed)
    assert isinstance(told, Completed)
    assert told.text == "APPROVE"
    await run.end


async def test_answer_of_the_users_code_is_a_stimulus() -> None:
    """Whatever was asked: the question comes back with its answer."""
    question = CountTokens(instance="a#0")
    run = Scripted({Begun: [Evaluate(question=question)], Evaluated: [END]})
    await run.heard(Begun)
    assert run.tasks.asked == question
    answer = Evaluated(at=1.0, question=question, answer=7)
    run.tasks.encode = lambda _: ()  # type: ignore[method-assign]  # planned runs have no record of answers
    run.coordinator.notify(answer)
    await run.end
    assert run.source.heard[-1] == answer


async def test_task_that_no_executor_has_counts_as_stopped() -> None:
    """S-SET-27: who stops a task that is about to be made waits for nobody."""
    run = Scripted({Begun: [Cancel(instance="b#0")], Cancelled: [END]})
    await run.end
    assert run.source.heard[-1] == Cancelled(at=100.0, instance="b#0")
    assert run.executor.stopped == []


async def test_run_never_begins_when_it_was_broken_off_before() -> None:
    """S-SET-56: nothing is on record of it."""
    run = Scripted({})
    run.coordinator.break_off(OSError("no process can be had"))
    with pytest.raises(OSError, match="no process"):
        await run.end
    assert run.journal.facts() == []


# Many open tasks: what comes within a moment is taken together (decision 0007).


class Wide:
    """A run whose 66 tasks are open; its source ends it when it heard of a last one, or of a wish to cancel."""

    def __init__(self) -> None:
        self.keys = [f"t{number}" for number in range(66)]
        self.clock = ManualClock(start=100.0)
        journal = RunJournal(run_id="run", epoch=0, journal=MemoryJournal("run"), clock=self.clock)
        plan = plan_of("parallel", dict.fromkeys(self.keys, ()))
        self.tasks: PlannedTasks = PlannedTasks(plan, journal, InMemoryOutputs(), body_of, header=PlanRecorded())
        self.executor = RecordingExecutor(MemoryJournal("run"))
        self.received: list[tuple[Stimulus, ...]] = []
        self.coordinator = Coordinator(journal, self.tasks)
        self.end = asyncio.get_running_loop().create_task(self.coordinator.run(self, self.executor))

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Keep what is told at once, and answer as the plan's machine does."""
        self.received.append(stimuli)
        return self.tasks.source.handle(*stimuli)

    async def gathers(self) -> None:
        """Return when the coordinator waits for more to come."""
        await self.turns(lambda: self.clock.sleepers == 1)

    async def turns(self, holds: Callable[[], bool]) -> None:
        """Return when something holds, which takes turns of the loop and no time."""
        for _ in range(100):
            if holds():
                return
            await asyncio.sleep(0)
        raise AssertionError("it never does")


async def wide() -> Wide:
    """Return one whose tasks were started, and that gathers after the first of them is done."""
    run = Wide()
    await run.turns(lambda: len(run.executor.started) == len(run.keys))
    run.coordinator.deliver([done(run.keys[0])])
    await run.gathers()
    return run


async def test_results_that_come_while_it_gathers_are_told_together() -> None:
    """None is told before the moment is over, and none is left to lie there."""
    run = await wide()
    run.coordinator.deliver([done(run.keys[1])])
    run.coordinator.deliver([done(run.keys[2])])
    assert len(run.received) == 1
    run.clock.advance(0.004)
    await run.turns(lambda: len(run.received) == 2)
    assert [getattr(each, "instance", "") for each in run.received[1]] == ["t0#0", "t1#0", "t2#0"]
    run.coordinator.deliver([done(key) for key in run.keys[3:]])  # with few open ones, nothing is waited for
    assert len((await run.end).completed) == len(run.keys)
    assert run.clock.sleepers == 0


async def test_wish_to_cancel_that_comes_while_it_gathers_is_carried_out() -> None:
    """S-SET-27: what came before it counts; what runs is stopped."""
    run = await wide()
    asked = run.coordinator.cancel()
    run.clock.advance(0.004)
    await run.turns(lambda: len(run.received) == 2)
    if not asked.done():  # the wish is told alone, after another moment
        await run.gathers()
        run.clock.advance(0.004)
    await run.turns(asked.done)
    assert sorted(run.executor.stopped) == sorted(f"{key}#0" for key in run.keys[1:])
    run.coordinator.deliver([ended_early(key, "cancelled") for key in run.keys[1:]])
    ended = await run.end
    assert (ended.state, len(ended.completed)) == (RunState.CANCELLED, 1)


async def test_run_that_is_broken_off_while_it_gathers_ends() -> None:
    """S-SET-56: with that error; nothing more is told."""
    run = await wide()
    run.coordinator.break_off(OSError("the disk is gone"))
    run.clock.advance(0.004)
    with pytest.raises(OSError, match="the disk is gone"):
        await run.end
    assert len(run.received) == 1


async def test_caller_that_leaves_while_it_gathers_is_let_go() -> None:
    """Nobody waits for the moment to end, and who waits for the run's beginning or end does not wait for ever."""
    run = await wide()
    asked = run.coordinator.cancel()
    run.end.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run.end
    assert asked.done()


# Outputs.


@pytest.mark.parametrize("make", [InMemoryOutputs[bytes], SpooledOutputs])
def test_outputs_are_kept_by_instance(make: Callable[[], OutputStore]) -> None:
    """S-SET-20: they are given in whatever order is asked for, the last one of an instance counts."""
    store = make()
    for instance, output in (("a#0", b"1"), ("b#0", b"2"), ("a#0", b"3")):
        store.put(instance, output)
    assert (store.get("a#0"), "b#0" in store, "c#0" in store) == (b"3", True, False)
    listed: Sequence[tuple[str, bytes]] = ListedOutputs(store, ["b#0", "a#0"])
    assert listed == [("b#0", b"2"), ("a#0", b"3")]
    assert listed[1:] == [("a#0", b"3")]
