"""What units ask and announce: what predicates are sent, what comes back, what is kept."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from ensemble_ray import IllegalStateError
from ensemble_ray.execute.orders import EvaluationFailed, FollowingQuestions, HistoryPart, TaskFailure
from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.runs.outputs import InMemoryOutputs
from ensemble_ray.runs.unit_evaluations import UnitEvaluations, UnitPorts
from ensemble_ray.schedule.instructions import (
    EdgeMatches,
    IterationEnded,
    PullItems,
    Question,
    ResetMemory,
    Start,
    StepEnded,
    UntilHolds,
)
from ensemble_ray.schedule.stimuli import Evaluated, Stimulus
from tests.ensemble_ray.schedule.nesting import Nest, loop, nested

UNIT = "loop:refine"


@dataclass
class Asked:
    """Predicates that note what they are sent. With as many parts as `lost`, their process was replaced once."""

    answers: list[bool | EvaluationFailed]
    lost: int = -1
    sent: list[tuple[int, int, list[tuple[str, ...]]]] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def holds(
        self, question: UntilHolds | EdgeMatches, *, sent_count: int, new: Sequence[HistoryPart[str]]
    ) -> bool | EvaluationFailed | None:
        """Note the question, and answer."""
        assert isinstance(question, UntilHolds)
        self.sent.append((question.iteration, sent_count, [part.outputs for part in new]))
        if sent_count == self.lost:
            self.lost = -1
            return None
        return self.answers.pop(0)

    def drop(self, unit: str) -> None:
        """Note it."""
        self.forgotten.append(unit)


class Forgetful(Asked):
    """Predicates whose process dies each time."""

    async def holds(
        self, question: UntilHolds | EdgeMatches, *, sent_count: int, new: Sequence[HistoryPart[str]]
    ) -> bool | EvaluationFailed | None:
        """Know nothing of what was sent."""
        del question, sent_count, new
        return None


class Memory:
    """A memory whose reset fails as it is said."""

    def __init__(self, failed: EvaluationFailed | None = None) -> None:
        self.failed = failed
        self.reset_units: list[str] = []

    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        """Note the loop."""
        self.reset_units.append(unit.name)
        return self.failed


class Run:
    """A nest whose questions are really asked."""

    def __init__(self, asked: Asked, *, memory: Memory | None = None, **fields: object) -> None:
        self.nest = Nest(plan=nested({}, loop("refine", "x", **fields), loop("next", "y")))
        self.outputs: InMemoryOutputs[str] = InMemoryOutputs()
        self.told: asyncio.Queue[Stimulus] = asyncio.Queue()
        self.broken: asyncio.Queue[BaseException] = asyncio.Queue()
        self.announced: list[tuple[str, ...]] = []
        ports: UnitPorts = UnitPorts(
            predicates=asked,
            lives_with=lambda agent: agent == "beside",
            announce=self._announce,
            failure_of=_failure_of,
            memory=memory,
        )
        self.units = UnitEvaluations(self.nest.plan, self.nest.source, self.outputs, ports)
        self.units.open(self.told.put_nowait, self.broken.put_nowait, lambda: 7.0)
        self.nest.begin()

    def _announce(self, what: IterationEnded | StepEnded, outputs: Sequence[str]) -> None:
        assert isinstance(what, IterationEnded)
        self.announced.append(tuple(outputs))

    def complete(self, instance: str) -> None:
        """Let a task complete with its instance as output."""
        self.outputs.put(instance, f"of {instance}")
        self.nest.complete(instance)

    def questions_after(self, agent: str = "beside") -> FollowingQuestions[str] | None:
        """What the process of the task that runs is to ask."""
        (start,) = self.nest.source.list_unanswered()
        assert isinstance(start, Start)
        return self.units.questions_after(start, agent)

    async def answer(self, question: Question) -> Stimulus:
        """Ask, tell the source the answer, and return it."""
        self.units.ask(question)
        told = await self.told.get()
        self.nest.handle(told)
        return told


def _failure_of(raised: EvaluationFailed) -> TaskFailure:
    assert isinstance(raised.error, BaseException)
    return TaskFailure(error=raised.error)


def until(iteration: int) -> UntilHolds:
    """The question after an iteration."""
    return UntilHolds(unit=UNIT, iteration=iteration)


async def test_predicate_is_sent_what_is_new() -> None:
    """S-LOOP-145: one iteration each time, however many there were."""
    asked = Asked([False, False, True])
    run = Run(asked)
    for number in range(3):
        run.complete(f"{UNIT}#{number}/x#0")
        told = await run.answer(until(number + 1))
        assert told == Evaluated(at=7.0, question=until(number + 1), answer=number == 2)
    assert asked.sent == [(n + 1, n, [(f"of {UNIT}#{n}/x#0",)]) for n in range(3)]


def part(*outputs: str) -> HistoryPart[str]:
    """An iteration of the loop."""
    return HistoryPart(names=("x",), outputs=outputs)


async def test_verdict_that_came_with_the_task_is_not_asked_for() -> None:
    """S-LOOP-189: the order says what will be asked, with what is new; the source is told when it asks."""
    asked = Asked([True])
    run = Run(asked)
    assert run.questions_after() == FollowingQuestions(questions=(until(1),), sent_count=0, new=(part(),))
    first = f"{UNIT}#0/x#0"
    run.units.keep_verdicts(first, [False])
    run.complete(first)
    assert await run.answer(until(1)) == Evaluated(at=7.0, question=until(1), answer=False)
    assert run.questions_after() == FollowingQuestions(questions=(until(2),), sent_count=1, new=(part(),))
    run.units.keep_verdicts(f"{UNIT}#1/x#0", [])  # it took longer
    run.complete(f"{UNIT}#1/x#0")
    assert await run.answer(until(2)) == Evaluated(at=7.0, question=until(2), answer=True)
    assert asked.sent == [(2, 1, [(f"of {UNIT}#1/x#0",)])]


async def test_order_has_all_that_the_predicates_were_not_sent() -> None:
    """S-LOOP-189, S-LOOP-145: iterations whose verdicts another process gave, or the record."""
    run = Run(Asked([]))
    for number in range(2):
        run.complete(f"{UNIT}#{number}/x#0")
        run.nest.handle(Evaluated(at=1.0, question=until(number + 1), answer=False))
    earlier = [part(f"of {UNIT}#{number}/x#0") for number in range(2)]
    assert run.questions_after() == FollowingQuestions(questions=(until(3),), sent_count=0, new=(*earlier, part()))


async def test_nothing_is_foreseen_when_the_predicates_live_elsewhere() -> None:
    """S-LOOP-189: they are asked by a message of their own."""
    asked = Asked([False])
    run = Run(asked)
    assert run.questions_after("elsewhere") is None
    run.units.keep_verdicts(f"{UNIT}#0/x#0", [])
    run.complete(f"{UNIT}#0/x#0")
    await run.answer(until(1))
    assert [number for number, _, _ in asked.sent] == [1]


async def test_what_a_predicate_raised_with_the_task_is_kept_when_the_source_asks() -> None:
    """S-LOOP-189, S-LOOP-53: the failure of the unit, as from a message of its own."""
    run = Run(Asked([]))
    run.questions_after()
    run.units.keep_verdicts(f"{UNIT}#0/x#0", [EvaluationFailed.of(LookupError("gone"))])
    run.complete(f"{UNIT}#0/x#0")
    assert not run.units.raised
    told = await run.answer(until(1))
    assert told == Evaluated(at=7.0, question=until(1), answer=None, error_type="LookupError", message="gone")
    assert [unit for unit, _ in run.units.raised] == [UNIT]


async def test_predicate_is_sent_everything_when_its_process_was_replaced() -> None:
    """S-LOOP-54: asked once more, with the whole history; the next question has what is new again."""
    asked = Asked([False, False, True], lost=1)
    run = Run(asked)
    for number in range(3):
        run.complete(f"{UNIT}#{number}/x#0")
        await run.answer(until(number + 1))
    assert [(n, sent_count, len(parts)) for n, sent_count, parts in asked.sent] == [
        (1, 0, 1),
        (2, 1, 1),
        (2, 0, 2),
        (3, 2, 1),
    ]


async def test_predicates_that_lose_all_they_are_sent_end_the_run() -> None:
    """S-LOOP-54: the run breaks off, and does not ask for ever."""
    run = Run(Forgetful([]))
    run.complete(f"{UNIT}#0/x#0")
    run.units.ask(until(1))
    assert isinstance(await run.broken.get(), IllegalStateError)


async def test_what_a_predicate_raised_is_kept() -> None:
    """S-LOOP-53: the error itself, by the path of its unit."""
    error = RuntimeError("boom")
    run = Run(Asked([EvaluationFailed(error_type="RuntimeError", message="boom", error=error)]))
    run.complete(f"{UNIT}#0/x#0")
    told = await run.answer(until(1))
    assert told == Evaluated(at=7.0, question=until(1), answer=None, error_type="RuntimeError", message="boom")
    assert [(unit, failure.error) for unit, failure in run.units.raised] == [(UNIT, error)]


async def test_history_is_let_go_when_its_unit_has_ended() -> None:
    """S-LOOP-145: at the next question of another unit."""
    asked = Asked([True, True])
    run = Run(asked)
    run.complete(f"{UNIT}#0/x#0")
    await run.answer(until(1))
    run.complete("loop:next#0/y#0")
    await run.answer(UntilHolds(unit="loop:next", iteration=1))
    assert asked.forgotten == [UNIT]


async def test_memory_is_reset_by_its_store() -> None:
    """S-LOOP-91: and the iteration follows."""
    memory = Memory()
    run = Run(Asked([]), memory=memory, has_until=False, memory_mode="window", memory_scopes=("notes",))
    run.complete(f"{UNIT}#0/x#0")
    reset = ResetMemory(unit=UNIT, iteration=2)
    assert await run.answer(reset) == Evaluated(at=7.0, question=reset, answer=True)
    assert (memory.reset_units, run.nest.started[-1]) == (["refine"], f"{UNIT}#1/x#0")


async def test_store_that_cannot_clear_fails_the_loop() -> None:
    """S-LOOP-92: with what it raised."""
    failed = EvaluationFailed(error_type="NotImplementedError", message="no", error=NotImplementedError("no"))
    run = Run(
        Asked([]), memory=Memory(failed), has_until=False, memory_mode="fresh_per_iteration", memory_scopes=("notes",)
    )
    run.complete(f"{UNIT}#0/x#0")
    await run.answer(ResetMemory(unit=UNIT, iteration=2))
    assert run.nest.end.unit_failures[0].error_type == "NotImplementedError"
    assert [unit for unit, _ in run.units.raised] == [UNIT]


async def test_iteration_is_announced_with_its_outputs() -> None:
    """S-LOOP-108: in body order."""
    run = Run(Asked([]))
    run.complete(f"{UNIT}#0/x#0")
    run.units.announce(IterationEnded(unit=UNIT, iteration=1, instances=(f"{UNIT}#0/x#0",), duration_s=1.0))
    assert run.announced == [(f"of {UNIT}#0/x#0",)]


async def test_question_of_a_map_reduce_is_refused() -> None:
    """S-MR-123: its tasks answer those."""
    with pytest.raises(TypeError):
        Run(Asked([])).units.ask(PullItems(count=1))
