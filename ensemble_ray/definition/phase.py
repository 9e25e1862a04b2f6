"""Phases: named groups of tasks and loops, and the review of their outputs.

The start of a run checks phases against each other (`validation`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, InstanceOf, SkipValidation

from ensemble_ray.definition import fields
from ensemble_ray.definition.loop import Loop
from ensemble_ray.definition.task import Task, UnitOutput
from ensemble_ray.errors import ValidationError
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.reviews import read_decision_text
from ensemble_ray.values.value import OneOrMany, Value, to_tuple

_log = bounded_logger(__name__)


class PhaseReview(Value):
    """A task that decides about each attempt of a phase. Its answer is read as a `PhaseReviewDecision`.

    Attributes:
        task: Runs after all tasks of the phase, with a model, a handler or a person.
        max_retries: Most retries of the phase; >= 0.
        max_predecessor_retries: Most retries of a phase before it; >= 0.
    """

    task: InstanceOf[Task] = Field(kw_only=False)
    max_retries: fields.StrictInt = 2
    max_predecessor_retries: fields.StrictInt = 2

    @classmethod
    def of(cls, task: Task, max_retries: int = 2) -> Self:
        """Return a review by that task."""
        return cls(task=task, max_retries=max_retries)

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        """S-PHASE-61."""
        if arguments.get("task") is None:
            raise ValidationError("PhaseReview task must not be None")
        for field in ("max_retries", "max_predecessor_retries"):
            fields.check_least(arguments.get(field), 0, f"PhaseReview {field}")


class Phase(fields.Identified):
    """A named group of tasks and loops that runs after the phases before it have completed.

    Like a task it is equal only to itself.

    Attributes:
        name: Its name in results, events and messages.
        tasks: Its tasks.
        workflow: `"sequential"`, `"parallel"`, or None: the workflow of the ensemble.
        after: Phases that must complete first.
        review: Decides whether its outputs are accepted; None: they are.
        loops: Loops among its tasks, as in an ensemble.
    """

    name: fields.StrictText = Field(kw_only=False)
    tasks: Annotated[OneOrMany[Task], SkipValidation] = Field(default=fields.initially(()), kw_only=False)
    workflow: fields.WorkflowField = fields.initially(None)
    after: Annotated[OneOrMany[Phase], SkipValidation] = fields.initially(())
    review: InstanceOf[PhaseReview] | None = None
    loops: Annotated[OneOrMany[Loop], SkipValidation] = fields.initially(())

    __hash__ = fields.Identified.__hash__

    @classmethod
    def of(cls, name: str, *tasks: Task | Sequence[Task]) -> Self:
        """Return a phase of these tasks; each argument is a task or a list of tasks."""
        listed: list[Task] = []
        for entry in tasks:
            listed.extend((entry,) if isinstance(entry, Task) else entry)
        return cls(name=name, tasks=listed)

    @property
    def output(self) -> UnitOutput:
        """Its accepted outputs, for the context of a task in a later phase."""
        return UnitOutput(object_id=self.object_id, unit="phase", name=self.name)

    @property
    def all_tasks(self) -> tuple[Task, ...]:
        """Its tasks, tasks of its loops, and its reviewer, in this order."""
        bodies = (task for loop in self.loops for task in loop.body)
        return (*self.tasks, *bodies, *(() if self.review is None else (self.review.task,)))

    def with_tasks_of(self, tasks: Mapping[str, Task]) -> Self:
        """Return this phase with rewritten tasks, by their ids. For the library only."""
        review = None if self.review is None else self.review.replace(task=tasks[self.review.task.object_id])
        return self.rewritten(
            tasks=tuple(tasks[task.object_id] for task in self.tasks),
            loops=tuple(loop.with_tasks_of(tasks) for loop in self.loops),
            review=review,
        )

    @fields.checks_arguments
    @classmethod
    def _check(cls, arguments: dict[str, Any]) -> None:
        """S-PHASE-10 to S-PHASE-12, S-PHASE-110."""
        name = arguments.get("name")
        fields.check_text(name, "Phase name must not be None or blank")
        tasks = arguments["tasks"] = _members_of(arguments.get("tasks"), Task, f"Phase '{name}' tasks")
        loops = arguments["loops"] = _members_of(arguments.get("loops"), Loop, f"Phase '{name}' loops")
        if not tasks and not loops:
            raise ValidationError(f"Phase '{name}' must contain at least one task")
        if arguments.get("workflow") == fields.Workflow.HIERARCHICAL:
            raise ValidationError(
                f"Phase '{name}': Workflow.HIERARCHICAL is not supported at the phase level. Use HIERARCHICAL at the "
                "ensemble level (without phases) for hierarchical delegation."
            )
        after = tuple(entry for entry in to_tuple(arguments.get("after")) if entry is not None)
        arguments["after"] = _members_of(after, Phase, f"Phase '{name}' after")


class PhaseReviewDecision(ABC):
    """A decision about an attempt of a phase. Its attributes are the four classes of decisions.

    Attributes:
        Approve: Accept the attempt.
        Retry: Run the phase again, with this feedback.
        RetryPredecessor: Run a direct predecessor again with this feedback, and then the phase.
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
        """Return the decision in the answer of a review. Any other text approves, and logs a WARN."""
        read = read_decision_text(text)
        if read.is_unknown:
            _log.warning("Phase review contained no decision, so the attempt is approved: %s", text or "")
        match read.decision:
            case "approve":
                return Approve()
            case "retry":
                return Retry(read.text)
            case "retry_predecessor":
                return RetryPredecessor(read.phase_name, read.text)
            case "reject":
                return Reject(read.text)

    def __post_init__(self) -> None:
        names: tuple[str, ...] = self.__slots__
        for name in names:
            if getattr(self, name) is None:
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

    def to_text(self) -> str:
        """Return the keyword and the feedback."""
        return f"RETRY: {self.feedback}"


@dataclass(frozen=True, slots=True)
class RetryPredecessor(PhaseReviewDecision):
    """Run a direct predecessor again, with this feedback, and then the phase."""

    __qualname__ = "PhaseReviewDecision.RetryPredecessor"

    phase_name: str
    feedback: str

    def to_text(self) -> str:
        """Return the keyword, the phase and the feedback."""
        return f"RETRY_PREDECESSOR {self.phase_name}: {self.feedback}"


@dataclass(frozen=True, slots=True)
class Reject(PhaseReviewDecision):
    """Fail the phase, for this reason."""

    __qualname__ = "PhaseReviewDecision.Reject"

    reason: str

    def to_text(self) -> str:
        """Return the keyword and the reason."""
        return f"REJECT: {self.reason}"


PhaseReviewDecision.Approve = Approve
PhaseReviewDecision.Retry = Retry
PhaseReviewDecision.RetryPredecessor = RetryPredecessor
PhaseReviewDecision.Reject = Reject


def _members_of(value: object, member_type: type[object], subject: str) -> tuple[object, ...]:
    entries = to_tuple(value)
    for index, entry in enumerate(entries):
        if not isinstance(entry, member_type):
            found = "None" if entry is None else type(entry).__name__
            raise ValidationError(f"{subject} element at index {index} must be a {member_type.__name__}, got: {found}")
    return entries
