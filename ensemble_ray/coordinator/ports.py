"""What a coordinator works with, and what it is for those. Contracts only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from ensemble_ray.coordinator.directives import RunDirectives
    from ensemble_ray.execute.orders import EvaluationFailed, HistoryPart
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.plan.plan import LoopUnit
    from ensemble_ray.schedule.instructions import (
        EdgeMatches,
        End,
        Inform,
        Instruction,
        IterationEnded,
        Question,
        Start,
        StepEnded,
        UntilHolds,
        Warn,
        WarnLeftOut,
        WarnOversized,
    )
    from ensemble_ray.schedule.machine import Source
    from ensemble_ray.schedule.stimuli import Stimulus


class WithInstance(Protocol):
    """An order or a result, as far as a coordinator looks into it."""

    @property
    def instance(self) -> str:
        """Return the task's instance."""
        ...


#: One task that should run now, as its executor takes it.
Order = TypeVar("Order", bound=WithInstance)
OrderT_contra = TypeVar("OrderT_contra", contravariant=True)
#: What came of it, as its executor delivers it.
Result = TypeVar("Result", bound=WithInstance)
ResultT_contra = TypeVar("ResultT_contra", contravariant=True)
OrderT_co = TypeVar("OrderT_co", covariant=True)
OutcomeT_co = TypeVar("OutcomeT_co", covariant=True)
#: How an output is held: the object itself inline, its bytes in a scheduler actor.
OutputT_contra = TypeVar("OutputT_contra", contravariant=True)


class Executor(Protocol[OrderT_contra]):
    """Where tasks run. Results come back through `Coordinator.deliver`."""

    def start(self, orders: Sequence[OrderT_contra], /) -> None:
        """Run these tasks; never waits."""
        ...

    def stop(self, instances: Sequence[str], /) -> None:
        """Stop these tasks; each is still reported, within the executor's grace."""
        ...


class TaskReporter(Protocol[OrderT_contra]):
    """A coordinator, as the tasks of its run see it."""

    def submit(self, orders: Sequence[OrderT_contra]) -> None:
        """Hand orders to the executor."""
        ...

    def stop(self, instances: Sequence[str]) -> None:
        """Have the executor stop those of these that it has; each is still reported."""
        ...

    def notify(self, *stimuli: Stimulus) -> None:
        """Tell the source, after everything that it was told before."""
        ...

    def interrupt(self, ending: End) -> None:
        """Stop what runs, start no more, then end the run this way without asking its source."""
        ...

    def break_off(self, error: BaseException) -> None:
        """End the run with an error of everything around it; what was recorded can be gone on with."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a run begins, or goes on."""

    #: what the source is told first
    stimuli: Sequence[Stimulus] = ()
    #: what a source wants that was told its recorded stimuli again
    instructions: Sequence[Instruction] = ()


class RunTasks(Protocol[OrderT_co, ResultT_contra, OutcomeT_co]):
    """The tasks of one run: what they are made of, what is recorded of them, what came of them."""

    @property
    def depends_on_order(self) -> bool:
        """Whether a run that goes on must find the order in which tasks completed, and not only that they did."""
        ...

    @property
    def directives(self) -> RunDirectives:
        """What people told the run, for the orders that are made from then on."""
        ...

    async def open(self, source: Source, reporter: TaskReporter[OrderT_co]) -> Opening:
        """Begin, or go on: put that on record."""
        ...

    def encode(self, stimuli: Sequence[Stimulus]) -> Sequence[Fact]:
        """Return the facts of what the source is about to be told; none for runs whose stimuli follow from other facts."""
        ...

    def look_up(self, start: Start) -> Sequence[Stimulus]:
        """Return what the record says came of a task, which then does not run again; nothing where it says nothing."""
        ...

    def make(self, starts: Sequence[Start]) -> None:
        """Make orders and submit them, now or later; what cannot be made is notified of."""
        ...

    def discard(self, instance: str) -> bool:
        """Make no order of a task that was stopped before it had one; whether its end will be notified of from here."""
        ...

    def accept(self, result: ResultT_contra) -> Sequence[Stimulus]:
        """Keep what came of a task; return what the source is told.

        Raises:
            StaleEpochError: somebody else has this run now.
            RecordError: an executor could not write its facts. Neither is a failure of the task.
        """
        ...

    def evaluate(self, question: Question) -> None:
        """Ask the user's code, and notify of the answer."""
        ...

    def announce(self, what: IterationEnded | StepEnded) -> None:
        """Tell listeners of an iteration or a step, before whatever the source wants after it."""
        ...

    def say(self, what: Inform | Warn | WarnLeftOut | WarnOversized) -> None:
        """Log what the source says."""
        ...

    def forget(self, instances: Sequence[str]) -> None:
        """Let outputs go."""
        ...

    async def close(self, ending: End) -> OutcomeT_co:
        """Put the end on record, and return how the run ended."""
        ...

    def leave(self) -> None:
        """Wait for nothing any more; called once, however the run ended."""
        ...


class Predicates(Protocol[OutputT_contra]):
    """The user's predicates and edge conditions, asked where they live: one copy for the whole run (S-LOOP-54)."""

    async def holds(
        self, question: UntilHolds | EdgeMatches, *, sent_count: int, new: Sequence[HistoryPart[OutputT_contra]]
    ) -> bool | EvaluationFailed | None:
        """Ask one.

        Args:
            question: Which predicate, and of which iteration or step.
            sent_count: How many parts of this unit's history were sent with earlier questions.
            new: The parts that follow those; none where another edge of the same step is asked.

        Returns:
            The verdict, or what was raised. None: those who are asked have fewer than `lookup_recorded` parts, since their process
            was replaced; they are to be asked again with `sent_count=0` and the whole history.
        """
        ...

    def forget(self, unit: str) -> None:
        """Let the history of a unit go that has ended."""
        ...


class MemoryResets(Protocol):
    """The memory of an ensemble, as its loops reset it."""

    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        """Do to a loop's memory scopes what its mode says before an iteration (S-LOOP-91, S-LOOP-93).

        Returns:
            What was raised, such as that the store cannot clear (S-LOOP-92); None: it is done.
        """
        ...
