"""A phase: a named group of tasks and loops, and the review of its outputs.

In: what the user declares. Out: frozen values; what phases have to do with each other is checked at the start of a run
(`unit_checks`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import Field, InstanceOf, SkipValidation, model_validator

from ensemble_ray.definition.fields import (
    Identified,
    StrictInt,
    StrictText,
    Workflow,
    WorkflowField,
    check_text,
    initially,
)
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.task import Task, UnitOutput
from ensemble_ray.errors import ValidationError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.reviews import read_decision_text
from ensemble_ray.values.value import OneOrMany, Value, to_tuple


class PhaseReview(Value):
    """A task that decides about each attempt of a phase; its answer is read as a `PhaseReviewDecision`.

    Attributes:
        task: Runs after all tasks of the phase; by a model, by a handler, or by a person.
        max_retries: How often the phase may be sent back; >= 0.
        max_predecessor_retries: How often each phase before it may be sent back; >= 0.
    """

    task: InstanceOf[Task] = Field(kw_only=False)
    max_retries: StrictInt = 2
    max_predecessor_retries: StrictInt = 2

    @classmethod
    def of(cls, task: Task, max_retries: int = 2) -> Self:
        """Return a review by that task."""
        return cls(task=task, max_retries=max_retries)

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """S-PHASE-61."""
        if not isinstance(data, Mapping):
            return data
        arguments = cast("Mapping[str, object]", data)
        if arguments.get("task") is None:
            raise ValidationError("PhaseReview task must not be None")
        for field in ("max_retries", "max_predecessor_retries"):
            count = arguments.get(field)
            if isinstance(count, int | float) and count < 0:
                raise ValidationError(f"PhaseReview {field} must be >= 0, got: {count}")
        return arguments


class Phase(Identified):
    """A named group of tasks and loops that runs when the phases before it have completed.

    Like a task it is equal only to itself.

    Attributes:
        name: What results, events and messages call it.
        tasks: What it does.
        workflow: `"sequential"`, `"parallel"`, or None: as the ensemble.
        after: Phases that have to be completed first.
        review: Decides whether its outputs are accepted; None: they are.
        loops: Loops among its tasks, as in an ensemble.
    """

    name: StrictText = Field(kw_only=False)
    tasks: Annotated[OneOrMany[Task], SkipValidation] = Field(default=initially(()), kw_only=False)
    workflow: WorkflowField = initially(None)
    after: Annotated[OneOrMany[Phase], SkipValidation] = initially(())
    review: InstanceOf[PhaseReview] | None = None
    loops: Annotated[OneOrMany[Loop], SkipValidation] = initially(())

    __hash__ = Identified.__hash__

    @classmethod
    def of(cls, name: str, *tasks: Task | Sequence[Task]) -> Self:
        """Return a phase of these tasks, given one by one or as a list."""
        listed: list[Task] = []
        for entry in tasks:
            listed.extend((entry,) if isinstance(entry, Task) else entry)
        return cls(name=name, tasks=listed)

    @property
    def output(self) -> UnitOutput:
        """What it gives, for the context of a task in a later phase: its accepted outputs."""
        return UnitOutput(object_id=self.object_id, unit="phase", name=self.name)

    @property
    def all_tasks(self) -> tuple[Task, ...]:
        """Its tasks, those of its loops, and its reviewer, in this order."""
        bodies = (task for loop in self.loops for task in loop.body)
        return (*self.tasks, *bodies, *(() if self.review is None else (self.review.task,)))

    def with_tasks_of(self, tasks: Mapping[str, Task]) -> Self:
        """Return the same phase with rewritten tasks, by their ids; for the library's own use."""
        review = None if self.review is None else self.review.replace(task=tasks[self.review.task.object_id])
        return self.rewritten(
            tasks=tuple(tasks[task.object_id] for task in self.tasks),
            loops=tuple(loop.with_tasks_of(tasks) for loop in self.loops),
            review=review,
        )

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """S-PHASE-10 to S-PHASE-12, S-PHASE-110."""
        if not isinstance(data, Mapping):
            return data
        arguments = dict(cast("Mapping[str, Any]", data))
        name = arguments.get("name")
        check_text(name, "Phase name must not be None or blank")
        tasks = arguments["tasks"] = _members_of(arguments.get("tasks"), Task, f"Phase '{name}' tasks")
        loops = arguments["loops"] = _members_of(arguments.get("loops"), Loop, f"Phase '{name}' loops")
        if not tasks and not loops:
            raise ValidationError(f"Phase '{name}' must contain at least one task")
        if arguments.get("workflow") == Workflow.HIERARCHICAL:
            raise ValidationError(
                f"Phase '{name}': Workflow.HIERARCHICAL is not supported at the phase level. Use HIERARCHICAL at the "
                "ensemble level (without phases) for hierarchical delegation."
            )
        after = tuple(entry for entry in to_tuple(arguments.get("after")) if entry is not None)
        arguments["after"] = _members_of(after, Phase, f"Phase '{name}' after")
        return arguments


def _members_of(value: object, member_type: type[object], subject: str) -> tuple[object, ...]:
    """Return a list of the user's as a tuple; an entry of another kind is refused."""
    entries = to_tuple(value)
    for index, entry in enumerate(entries):
        if not isinstance(entry, member_type):
            found = "None" if entry is None else type(entry).__name__
            raise ValidationError(f"{subject} element at index {index} must be a {member_type.__name__}, got: {found}")
    return entries


_log = bounded_logger(__name__)


class PhaseReviewDecision(ABC):
    """A decision about an attempt of a phase: one of the four classes that are its attributes.

    Attributes:
        Approve: Accept the attempt.
        Retry: Run the phase again, with this feedback.
        RetryPredecessor: Run a direct predecessor again, with this feedback, and then the phase.
        Reject: Fail the phase, for this reason.

    Examples:
        >>> PhaseReviewDecision.Retry("shorter").to_text()
        'RETRY: shorter'
        >>> PhaseReviewDecision.parse("reject: off topic")
        PhaseReviewDecision.Reject(reason='off topic')
    """

    __slots__ = ()

    Approve: ClassVar[type[Approve]]
    Retry: ClassVar[type[Retry]]
    RetryPredecessor: ClassVar[type[RetryPredecessor]]
    Reject: ClassVar[type[Reject]]

    @abstractmethod
    def to_text(self) -> str:
        """Return the text that `parse` reads as this decision."""

    @staticmethod
    def parse(text: str | None) -> PhaseReviewDecision:
        """Return the decision that a review's answer means; what is no decision approves, with a WARN."""
        read = read_decision_text(text)
        if read.is_unknown:
            _log.warning("Phase review gave no decision, which approves: %s", text or "")
        match read.decision:
            case "approve":
                return Approve()
            case "retry":
                return Retry(read.text)
            case "retry_predecessor":
                return RetryPredecessor(read.phase_name, read.text)
            case "reject":
                return Reject(read.text)

    def _refuse_none(self, **fields: str | None) -> None:
        for name, value in fields.items():
            if value is None:
                raise ValueError(f"{type(self).__qualname__}: {name} must not be None")


@dataclass(frozen=True, slots=True)
class Approve(PhaseReviewDecision):
    """Accept the attempt."""

    __qualname__ = "PhaseReviewDecision.Approve"

    def to_text(self) -> str:
        """Return the keyword."""
        return "APPROVE"


@dataclass(frozen=True, slots=True)
class Retry(PhaseReviewDecision):
    """Run the phase again, with this feedback."""

    __qualname__ = "PhaseReviewDecision.Retry"

    feedback: str

    def __post_init__(self) -> None:
        self._refuse_none(feedback=self.feedback)

    def to_text(self) -> str:
        """Return the keyword and the feedback."""
        return f"RETRY: {self.feedback}"


@dataclass(frozen=True, slots=True)
class RetryPredecessor(PhaseReviewDecision):
    """Run a direct predecessor again, with this feedback, and then the phase."""

    __qualname__ = "PhaseReviewDecision.RetryPredecessor"

    phase_name: str
    feedback: str

    def __post_init__(self) -> None:
        self._refuse_none(phase_name=self.phase_name, feedback=self.feedback)

    def to_text(self) -> str:
        """Return the keyword, the phase and the feedback."""
        return f"RETRY_PREDECESSOR {self.phase_name}: {self.feedback}"


@dataclass(frozen=True, slots=True)
class Reject(PhaseReviewDecision):
    """Fail the phase, for this reason."""

    __qualname__ = "PhaseReviewDecision.Reject"

    reason: str

    def __post_init__(self) -> None:
        self._refuse_none(reason=self.reason)

    def to_text(self) -> str:
        """Return the keyword and the reason."""
        return f"REJECT: {self.reason}"


PhaseReviewDecision.Approve = Approve
PhaseReviewDecision.Retry = Retry
PhaseReviewDecision.RetryPredecessor = RetryPredecessor
PhaseReviewDecision.Reject = Reject
