"""What a run asks of predicates and conditions about the history of a unit, and what comes of that. Package: execute. Values only.

As a rule a question follows a task that completed. Where the process that did the task has the predicates too, the order says
what will be asked, and the result brings the verdicts: that saves a message to and fro for each iteration and each step (S-LOOP-189).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from typing_extensions import TypeVar

from ensemble_ray.errors import message_of
from ensemble_ray.facts.runs import RecordedError
from ensemble_ray.values.task_output import TaskOutput

if TYPE_CHECKING:
    from ensemble_ray.schedule.instructions import UnitQuestion

__all__ = ["EvaluationFailed", "FollowingQuestions", "HistoryPart"]

#: How an output is held: the object, or its bytes.
Output_co = TypeVar("Output_co", default=TaskOutput, covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryPart(Generic[Output_co]):
    """One iteration of a loop, or one step of a graph."""

    #: body names of the iteration in body order, or the one name of the state
    names: tuple[str, ...]
    #: in the same order
    outputs: tuple[Output_co, ...]
    #: whether these are iterations of a loop, and the one output of a state
    is_joined: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationFailed:
    """The user's code raised."""

    #: class of the error
    error_type: str
    message: str
    #: the error itself, or its bytes where this process runs no user code
    error: BaseException | bytes
    #: beside bytes: what the end of a run tells of it
    reason: RecordedError | None = None

    @classmethod
    def of(cls, error: BaseException) -> EvaluationFailed:
        """Return what was raised, with the error itself."""
        return cls(error_type=type(error).__name__, message=message_of(error), error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowingQuestions(Generic[Output_co]):
    """What will be asked when a task has completed."""

    #: asked in this order, until one holds
    questions: tuple[UnitQuestion, ...]
    #: how many parts of the unit's history the predicates were sent before
    sent_count: int
    #: the parts that follow those; the last one is that of the task, which its output completes
    new: tuple[HistoryPart[Output_co], ...]
