"""What is known of a run that goes on, and how a run ended. Package: execute. Values only.

Both are generic in how outputs and failures are held: as objects, or as bytes in a process that runs no user code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Generic, cast

from typing_extensions import TypeVar

from ensemble_ray.execute.orders import Failure_co, FailureSummary, Output_co

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskResult
    from ensemble_ray.facts.directives import DirectiveFact
    from ensemble_ray.schedule.results import UnitFailure, UnitResult
    from ensemble_ray.schedule.stimuli import Stimulus
    from ensemble_ray.values.outputs import ExitReason, RunState
    from ensemble_ray.values.reviews import OpenReview
    from ensemble_ray.values.trace import TaskTrace

__all__ = ["FailedTask", "Resumed", "RunOutcome"]

NewOutput = TypeVar("NewOutput")
NewFailure = TypeVar("NewFailure", bound=FailureSummary)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Generic[Output_co, Failure_co]):
    """What the record knows of a run that goes on."""

    #: when it began first
    started_at: float
    #: what its source was told, in the groups in which it was; what a cancellation did is left out
    stimuli: Sequence[Sequence[Stimulus]]
    #: by instance: tasks whose output or failure is recorded, whether or not the source was told; a result is made when it
    #: is asked for, and has no output where the run's outputs have a recorded one to be looked up
    results: Mapping[str, TaskResult[Output_co, Failure_co]]
    #: by instance: what is known of tasks of which no end is recorded, such as those that a join stopped; made where some
    #: of them are not to run again
    stopped: Mapping[str, TaskResult[Output_co, Failure_co]] = field(
        default_factory=dict[str, "TaskResult[Output_co, Failure_co]"]
    )
    #: whether only its owner's process was replaced; else somebody wants it to go on, also after a cancellation
    is_restart: bool = False
    #: what people told it, the expired included
    directives: Sequence[DirectiveFact] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTask(Generic[Failure_co]):
    """A failed task of an ended run."""

    instance: str
    at: float
    failure: Failure_co
    #: how many tasks were completed when it failed (S-PAR-22)
    completed_before: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOutcome(Generic[Output_co, Failure_co]):
    """How a run ended."""

    state: RunState
    exit_reason: ExitReason
    started_at: float
    completed_at: float
    #: (instance, output) in completion order
    completed: Sequence[tuple[str, Output_co]] = ()
    #: outputs of a manager's workers in completion order
    delegated: Sequence[tuple[str, Output_co]] = ()
    #: what workers of a manager did that gave nothing
    failed_delegations: Sequence[TaskTrace] = ()
    failures: Sequence[FailedTask[Failure_co]] = ()
    #: (instance, failure) of unfinished tasks: cancelled or exited ones
    unfinished: Sequence[tuple[str, Failure_co]] = ()
    #: what became of loops, phases and graphs, in the order in which they ended
    units: tuple[UnitResult, ...] = ()
    #: of units where no task's failure is the reason, in order
    unit_failures: tuple[UnitFailure, ...] = ()
    #: by path of the unit: what the user's predicates and conditions raised
    raised: Sequence[tuple[str, Failure_co]] = ()
    #: of a run that waits: its open gates, in the order in which its tasks came to them
    open_reviews: tuple[OpenReview, ...] = ()

    def convert(
        self, output: Callable[[Output_co], NewOutput], failure: Callable[[Failure_co], NewFailure]
    ) -> RunOutcome[NewOutput, NewFailure]:
        """Return the same outcome, its outputs and failures held otherwise."""
        return replace(
            cast("RunOutcome[NewOutput, NewFailure]", self),
            completed=[(key, output(each)) for key, each in self.completed],
            delegated=[(key, output(each)) for key, each in self.delegated],
            failures=[
                replace(cast("FailedTask[NewFailure]", each), failure=failure(each.failure)) for each in self.failures
            ],
            unfinished=[(key, failure(each)) for key, each in self.unfinished],
            raised=[(unit, failure(each)) for unit, each in self.raised],
        )
