"""UnitEvaluations: what the units of a planned run ask and announce, carried out.

In: questions and announcements of the source. Out: one answer for each question, and events. Predicates are sent what is new
since the last question of their unit, and all of it where their process was replaced (S-LOOP-54, S-LOOP-145). Where they live
in the process that does the task before, they are asked there, and nobody is asked when the source wants to know (S-LOOP-189).
What user code raised is kept for the end of the run, as failures of tasks are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ensemble_ray.coordinator.announcements import instances_of
from ensemble_ray.coordinator.background import RunBackgroundTasks
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.execute.orders import EvaluationFailed, FailureSummary, FollowingQuestions, HistoryPart
from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.schedule.instructions import EdgeMatches, ResetMemory, UntilHolds
from ensemble_ray.schedule.stimuli import Evaluated
from ensemble_ray.values.ids import node_key

if TYPE_CHECKING:
    from ensemble_ray.coordinator.outputs import OutputStore
    from ensemble_ray.coordinator.ports import MemoryResets, Predicates
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.schedule.instructions import IterationEnded, Question, Start, StepEnded, UnitQuestion
    from ensemble_ray.schedule.machine import PlanSource
    from ensemble_ray.schedule.stimuli import Stimulus

_log = bounded_logger(__name__)

Output = TypeVar("Output")
Failure = TypeVar("Failure", bound=FailureSummary)


def _is_elsewhere(agent_key: str | None) -> bool:  # noqa: ARG001  wherever that one lives
    """Return that predicates live with no agent that is handed orders by messages."""
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPorts(Generic[Output, Failure]):
    """What a planned run with units needs besides its executor."""

    predicates: Predicates[Output]
    #: whether they live in the process that does the tasks of that agent; None as the agent: of handlers
    lives_with: Callable[[str | None], bool] = _is_elsewhere
    #: tells listeners of an iteration or a step, with its outputs; never waits
    announce: Callable[[IterationEnded | StepEnded, Sequence[Output]], None]
    #: returns what was raised as the run holds failures
    failure_of: Callable[[EvaluationFailed], Failure]
    #: None: the ensemble has no memory
    memory: MemoryResets | None = None
    #: logs what the source says, of that level, where people read it; None: this process's log does
    say: Callable[[int, str], None] | None = None


class UnitEvaluations(Generic[Output, Failure]):
    """The questions and announcements of one run."""

    def __init__(
        self, plan: Plan, source: PlanSource, outputs: OutputStore[Output], ports: UnitPorts[Output, Failure]
    ) -> None:
        """Make them; nothing is asked before `open`."""
        self._loops = {unit.key: unit for unit in plan.units if isinstance(unit, LoopUnit)}
        self._source = source
        self._outputs = outputs
        self._ports = ports
        self._notify: Callable[[Stimulus], None]
        self._break_off: Callable[[BaseException], None]
        self._now: Callable[[], float]
        self._background: RunBackgroundTasks | None = None
        #: by unit path: how many parts of its history those who are asked have
        self._sent: dict[str, int] = {}
        #: by instance: what the process that does that task will ask, and how long the history of the unit is by then
        self._foreseen: dict[str, tuple[tuple[UnitQuestion, ...], int]] = {}
        #: what came of questions that the source has not asked yet, and how long the history of their unit is
        self._verdicts: dict[UnitQuestion, tuple[bool | EvaluationFailed, int]] = {}
        #: by unit path: what user code raised, in order
        self.raised: list[tuple[str, Failure]] = []

    def open(
        self,
        notify: Callable[[Stimulus], None],
        break_off: Callable[[BaseException], None],
        now: Callable[[], float],
    ) -> None:
        """Begin.

        Args:
            notify: Takes answers.
            break_off: Takes what ends the run around everything.
            now: Returns the time.
        """
        self._notify, self._break_off, self._now = notify, break_off, now

    def ask(self, question: Question) -> None:
        """Ask, and notify of the answer; never waits.

        Raises:
            TypeError: it is no question of a unit.
        """
        match question:
            case UntilHolds() | EdgeMatches():
                if (answered := self._verdicts.pop(question, None)) is not None:
                    verdict, self._sent[question.unit] = answered
                    self._answer(question, verdict)
                    return
                self._forget_ended()
                work = self._ask_predicate(question, self._length(question.unit))
            case ResetMemory():
                work = self._reset_memory(question)
            case _:
                raise TypeError(f"a planned run has no code that answers {question}")
        if self._background is None:
            self._background = RunBackgroundTasks(self._break_off)
        self._background.start(work)

    def foresee(self, start: Start, agent_key: str | None) -> FollowingQuestions[Output] | None:
        """Return what the process that does a task should ask when it completed; None: nothing, or the predicates are elsewhere."""
        after = start.asks_after
        if after is None or not self._ports.lives_with(agent_key):
            return None
        unit = after.questions[0].unit
        self._forget_ended()
        sent_count, length = self._sent.get(unit, 0), self._length(unit)
        earlier = tuple(self._outputs.get(instance) for instance in after.instances[:-1])
        self._foreseen[start.instance] = (after.questions, length + 1)
        return FollowingQuestions(
            questions=after.questions,
            sent_count=sent_count,
            new=(*self._history(unit, sent_count, length), HistoryPart(names=after.names, outputs=earlier)),
        )

    def keep_verdicts(self, instance: str, verdicts: Sequence[bool | EvaluationFailed]) -> None:
        """Keep what came of questions with the result of a task, until the source asks them."""
        foreseen = self._foreseen.pop(instance, None)
        if foreseen is not None and verdicts:
            questions, length = foreseen
            # Fewer, where one of them held, or takes longer and is asked for as usual.
            self._verdicts.update((each, (came, length)) for each, came in zip(questions, verdicts, strict=False))

    def announce(self, what: IterationEnded | StepEnded) -> None:
        """Tell listeners, before anything that follows; never waits."""
        self._ports.announce(what, [self._outputs.get(instance) for instance in instances_of(what)])

    def log_start(self, instance: str) -> None:
        """Log that an iteration of a loop starts, where that task is the first of it (S-LOOP-132)."""
        iteration = instance.rpartition("/")[0]
        unit = self._loops.get(node_key(iteration))
        if unit is not None and node_key(instance) == unit.body[0]:
            number = int(iteration.rpartition("#")[2]) + 1
            _log.debug("Loop '%s' starts iteration %d/%d", unit.name, number, unit.max_iterations)

    def leave(self) -> None:
        """Wait for no answer any more."""
        if self._background is not None:
            self._background.leave()

    async def _ask_predicate(self, question: UnitQuestion, length: int) -> None:
        unit = question.unit
        sent_count = self._sent.get(unit, 0)
        verdict = await self._ports.predicates.holds(
            question, sent_count=sent_count, new=self._history(unit, sent_count, length)
        )
        if verdict is None:
            verdict = await self._ports.predicates.holds(question, sent_count=0, new=self._history(unit, 0, length))
        if verdict is None:
            raise IllegalStateError(f"the predicates of '{unit}' lost what they were just sent")
        self._sent[unit] = length
        self._answer(question, verdict)

    async def _reset_memory(self, question: ResetMemory) -> None:
        unit = self._loops[node_key(f"{question.unit}#0")]
        if self._ports.memory is None:
            raise IllegalStateError(f"loop '{unit.name}' has memory scopes, and the run has no memory")
        failed = await self._ports.memory.reset(unit)
        self._answer(question, failed or True)

    def _answer(self, question: UntilHolds | EdgeMatches | ResetMemory, answer: bool | EvaluationFailed) -> None:  # noqa: FBT001  a verdict
        if isinstance(answer, EvaluationFailed):
            self.raised.append((question.unit, self._ports.failure_of(answer)))
            self._notify(
                Evaluated(
                    at=self._now(),
                    question=question,
                    answer=None,
                    error_type=answer.error_type,
                    message=answer.message,
                )
            )
        else:
            self._notify(Evaluated(at=self._now(), question=question, answer=answer))

    def _length(self, unit: str) -> int:
        """Return how long the history of a unit is now; it may grow while a predicate is asked."""
        return len(self._source.history_of(unit))

    def _history(self, unit: str, begin: int, end: int) -> list[HistoryPart[Output]]:
        entries = self._source.history_of(unit)
        return [
            HistoryPart(
                names=entry.names,
                outputs=tuple(self._outputs.get(instance) for instance in entry.instances),
                is_joined=entry.is_joined,
            )
            for entry in (entries[position] for position in range(begin, min(end, len(entries))))
        ]

    def _forget_ended(self) -> None:
        """Let the histories of units go that have ended since."""
        for unit in [unit for unit in self._sent if not self._length(unit)]:
            del self._sent[unit]
            self._ports.predicates.forget(unit)
