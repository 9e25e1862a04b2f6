"""Words of reviews: what a gate asks, what may be decided, and when a task has a gate.

Values only; which gates fire stands in `execute.review`, who is asked in `reviews`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Protocol,
    Self,
    TypeAlias,
    cast,
    runtime_checkable,
)

from pydantic import Strict, model_validator

from ensemble_ray.errors import ReviewTimeoutError, ValidationError
from ensemble_ray.values.value import Duration, DurationField, Instant, Value


class ReviewTiming(StrEnum):
    """When somebody is asked."""

    BEFORE_EXECUTION = "before_execution"
    DURING_EXECUTION = "during_execution"
    AFTER_EXECUTION = "after_execution"


class OnTimeoutAction(StrEnum):
    """What a gate does that nobody answered in time."""

    CONTINUE = "continue"
    EXIT_EARLY = "exit_early"
    FAIL = "fail"


class ReviewPolicy(StrEnum):
    """After which tasks somebody is asked that say nothing of it themselves."""

    NEVER = "never"
    AFTER_EVERY_TASK = "after_every_task"
    AFTER_LAST_TASK = "after_last_task"


@dataclass(frozen=True, slots=True)
class ReviewDecision:
    """What was decided at a gate: one of `Continue`, `Edit` and `ExitEarly`, which are attributes of this class.

    Examples:
        >>> ReviewDecision.edit("Shorter.")
        Edit(revised_output='Shorter.')
        >>> isinstance(ReviewDecision.exit_early(), ReviewDecision.ExitEarly)
        True
    """

    Continue: ClassVar[type[Continue]]
    Edit: ClassVar[type[Edit]]
    ExitEarly: ClassVar[type[ExitEarly]]

    @staticmethod
    def continue_execution() -> ReviewDecision:
        """Return the decision to go on with what there is."""
        return Continue()

    @staticmethod
    def edit(revised_output: str) -> ReviewDecision:
        """Return the decision to go on with another text; it may be empty.

        Raises:
            ValidationError: it is None.
        """
        return Edit(revised_output)

    @staticmethod
    def exit_early() -> ReviewDecision:
        """Return the decision to end the run with what is done."""
        return ExitEarly()

    @staticmethod
    def exit_early_timeout() -> ReviewDecision:
        """Return the end of the run that follows from a gate that nobody answered in time."""
        return ExitEarly(timed_out=True)


@dataclass(frozen=True, slots=True)
class Continue(ReviewDecision):
    """The run goes on with what there is."""


@dataclass(frozen=True, slots=True)
class Edit(ReviewDecision):
    """The run goes on with this text."""

    revised_output: str

    def __post_init__(self) -> None:
        if self.revised_output is None:
            raise ValidationError("revised_output must not be None")
        if not isinstance(self.revised_output, str):
            raise ValidationError(f"revised_output must be text, got: {type(self.revised_output).__name__}")


@dataclass(frozen=True, slots=True)
class ExitEarly(ReviewDecision):
    """The run ends with what is done; `timed_out`: since nobody answered in time."""

    timed_out: bool = False


ReviewDecision.Continue, ReviewDecision.Edit, ReviewDecision.ExitEarly = Continue, Edit, ExitEarly


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewAnswer:
    """A decision, and who took it: a handler's name, or a person's."""

    decision: ReviewDecision
    by: str = ""

    def to_data(self) -> dict[str, object]:
        """Return it as data, for records and other processes."""
        match self.decision:
            case Edit(revised_output=text):
                data: dict[str, object] = {"verdict": "edit", "text": text}
            case ExitEarly(timed_out=timed_out):
                data = {"verdict": "exit", "timed_out": timed_out}
            case _:
                data = {"verdict": "approve"}
        return {**data, "by": self.by}

    @classmethod
    def from_data(cls, data: Mapping[str, object]) -> Self:
        """Return what `to_data` gave."""
        decision: ReviewDecision
        match data.get("verdict"):
            case "edit":
                decision = Edit(str(data.get("text", "")))
            case "exit":
                decision = ExitEarly(timed_out=bool(data.get("timed_out")))
            case _:
                decision = Continue()
        return cls(decision=decision, by=str(data.get("by", "")))


_DEFAULT_TIMEOUT = timedelta(minutes=5)


def _check_timeout(timeout: object) -> None:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, int | float) and seconds < 0:
        raise ValidationError("timeout must not be negative")


class Review(Value):
    """A gate of a task: `Task(review=Review.required("Is it polite?"))`.

    Attributes:
        is_skip: Whether nobody is asked, whatever the ensemble's policy says.
        prompt: What the reviewer is told beside the task and its output.
        timeout: How long the gate waits, a `timedelta` or seconds; 0: without limit.
        on_timeout: What follows when nobody answered: `"continue"`, `"exit_early"` or `"fail"`.
        required_role: Who may answer; carried to the handler, which may check it.
    """

    DEFAULT_TIMEOUT: ClassVar[timedelta] = _DEFAULT_TIMEOUT
    DEFAULT_ON_TIMEOUT: ClassVar[OnTimeoutAction] = OnTimeoutAction.EXIT_EARLY

    is_skip: bool = False
    prompt: Annotated[str, Strict()] | None = None
    timeout: DurationField = cast("Any", _DEFAULT_TIMEOUT)
    on_timeout: OnTimeoutAction = OnTimeoutAction.EXIT_EARLY
    required_role: Annotated[str, Strict()] | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            is_skip: bool = False,
            prompt: str | None = None,
            timeout: timedelta | float = _DEFAULT_TIMEOUT,
            on_timeout: OnTimeoutAction | str = OnTimeoutAction.EXIT_EARLY,
            required_role: str | None = None,
        ) -> None: ...

    @classmethod
    def required(cls, prompt: str | None = None) -> Self:
        """Return a gate at which somebody is asked, whatever the ensemble's policy says."""
        return cls(prompt=prompt)

    @classmethod
    def skip(cls) -> Self:
        """Return a gate at which nobody is asked, whatever the ensemble's policy says."""
        return cls(is_skip=True)

    @property
    def is_required(self) -> bool:
        """Whether somebody is asked; the opposite of `is_skip`."""
        return not self.is_skip

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            arguments = cast("Mapping[str, object]", data)
            _check_timeout(arguments.get("timeout"))
            role = arguments.get("required_role")
            if isinstance(role, str) and not role.strip():
                raise ValidationError("required_role must not be None or blank")
        return data


class ReviewRequest(Value):
    """What a reviewer is asked.

    Attributes:
        task_description: What the task is; of a question in a task, the question.
        task_output: What the task gave; empty before and during it.
        timing: When it is asked.
        timeout: How long it may wait from now on; None or 0: without limit.
        on_timeout: What follows when nobody answers in time.
        prompt: What the reviewer is told beside that.
        required_role: Who may answer.
        review_id: Id of the gate, the same when it is asked again after a crash; unique among all runs of a store.
        run_id: The run; empty where it was asked outside any.
        ends_run: Whether `exit_early` ends the run, or only refuses what a tool is about to do.
    """

    task_description: str
    task_output: str = ""
    timing: ReviewTiming
    timeout: Duration | None = _DEFAULT_TIMEOUT
    on_timeout: OnTimeoutAction = OnTimeoutAction.EXIT_EARLY
    prompt: str | None = None
    required_role: str | None = None
    review_id: str = ""
    run_id: str = ""
    ends_run: bool = True

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        """Refuse what misses a field that has no default (S-REV-20); a missing argument counts as None (S-CONV-13)."""
        if isinstance(data, Mapping):
            arguments = dict(cast("Mapping[str, object]", data))
            for name in ("task_description", "timing"):
                if arguments.get(name) is None:
                    raise ValidationError(f"{name} must not be None")
            if arguments.get("task_output") is None:
                arguments["task_output"] = ""
            return arguments
        return data

    @property
    def timeout_s(self) -> float | None:
        """How long it may wait, s; None: without limit."""
        seconds = None if self.timeout is None else self.timeout.total_seconds()
        return seconds if seconds is not None and seconds > 0 else None


class OpenReview(Value):
    """A gate that nobody has decided yet: in `output.open_reviews` of a run that waits.

    Attributes:
        run_id: The run.
        gate_id: Id of the gate: the `review_id` of its request, unique among all runs of a store.
        task_description: What the task is; of a question in a task, the question.
        task_output: What the task gave; empty before and during it.
        timing: When it is asked.
        prompt: What the reviewer is told beside that.
        created_at: When it was opened.
        expires_at: When its timeout has passed; None: it waits without limit.
        on_timeout: What follows then.
        required_role: Who may decide.
    """

    run_id: str
    gate_id: str
    task_description: str
    task_output: str = ""
    timing: ReviewTiming
    prompt: str | None = None
    created_at: Instant
    expires_at: Instant | None = None
    on_timeout: OnTimeoutAction = OnTimeoutAction.EXIT_EARLY
    required_role: str | None = None


class ReviewWait(StrEnum):
    """Where a run waits for the decisions at its gates."""

    #: in the program that called `run()`, which asks its handler
    ATTACHED = "attached"
    #: in its record: the call ends, and the run goes on when somebody decided
    DETACH = "detach"


def decision_at_timeout(request: ReviewRequest, waited_s: float) -> ReviewDecision:
    """Return what follows for a request that nobody answered within that time (S-REV-47).

    Raises:
        ReviewTimeoutError: it fails the task.
    """
    match request.on_timeout:
        case OnTimeoutAction.CONTINUE:
            return Continue()
        case OnTimeoutAction.EXIT_EARLY:
            return ExitEarly(timed_out=True)
        case OnTimeoutAction.FAIL:
            raise ReviewTimeoutError(f"Review gate timed out after {waited_s:g}s (on_timeout=fail)")


@runtime_checkable
class Reviewing(Protocol):
    """An object that decides at gates."""

    def review(self, request: ReviewRequest, /) -> ReviewDecision | Awaitable[ReviewDecision]:
        """Decide; may be `async`."""
        ...


#: A function that decides at gates, sync or async.
ReviewFunction: TypeAlias = Callable[[ReviewRequest], "ReviewDecision | Awaitable[ReviewDecision]"]


_APPROVE = "APPROVE"
_RETRY = "RETRY"
_RETRY_PREDECESSOR = "RETRY_PREDECESSOR "
_REJECT = "REJECT"


class DecisionText(NamedTuple):
    """The parts of a decision's text."""

    decision: Literal["approve", "retry", "retry_predecessor", "reject"]
    #: feedback or reason; "" of an approval
    text: str = ""
    #: of a retry of a predecessor
    phase_name: str = ""
    #: whether it approves only because it says nothing that is known
    is_unknown: bool = False


def read_decision_text(answer: str | None) -> DecisionText:
    """Return what a review's answer decides (S-PHASE-70 to S-PHASE-74).

    Examples:
        >>> read_decision_text("Retry: issue: too brief").text
        'issue: too brief'
    """
    trimmed = (answer or "").strip()
    if _begins_with(trimmed, _RETRY_PREDECESSOR):
        name, _, feedback = trimmed[len(_RETRY_PREDECESSOR) :].partition(":")
        return DecisionText("retry_predecessor", feedback.strip(), name.strip())
    if _begins_with(trimmed, _RETRY):
        return DecisionText("retry", trimmed.partition(":")[2].strip())
    if _begins_with(trimmed, _REJECT):
        return DecisionText("reject", trimmed.partition(":")[2].strip())
    return DecisionText("approve", is_unknown=trimmed.upper() not in {"", _APPROVE})


def _begins_with(text: str, keyword: str) -> bool:
    return text[: len(keyword)].upper() == keyword


#: Characters of one directive: it stands in each prompt from then on.
LONGEST_DIRECTIVE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """A text for the tasks of a run that start while it is active."""

    text: str
    #: s from when the run takes it; None: until the run ends
    ttl_s: float | None = None
    #: who gave it; empty: nobody asked who it is
    given_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSwitch:
    """Which model of a run's catalog the tasks ask that start from then on."""

    #: its name in the catalog; None: each agent's own again
    model: str | None
    #: role of the agent whose tasks are meant; None: those of all
    agent: str | None = None
    #: who said so; empty: nobody asked who it is
    given_by: str = ""


#: What a run that goes on may be told.
RunDirective: TypeAlias = Directive | ModelSwitch


def add_switch(switches: Sequence[ModelSwitch], new: ModelSwitch) -> tuple[ModelSwitch, ...]:
    """Return the switches that count when another one was made: it takes the place of those that it covers."""
    kept = (each for each in switches if new.agent is not None and each.agent != new.agent)
    return (*kept, new)


def model_for(switches: Sequence[ModelSwitch], agent_role: str) -> str | None:
    """Return the name of the model that an agent asks; None: its own."""
    meant = [each for each in switches if each.agent in {None, agent_role}]
    return meant[-1].model if meant else None


def check_directive(text: str, ttl: timedelta | float | None, given_by: str = "") -> Directive:
    """Return the directive that a caller gives (S-CTL-4).

    Args:
        text: What tasks are told.
        ttl: How long it is active, a timedelta or seconds; None: until the run ends.
        given_by: Who gives it.

    Raises:
        ValidationError: the text is blank or too long, or the time is not positive.
    """
    if not text.strip():
        raise ValidationError("A directive must have a text")
    if len(text) > LONGEST_DIRECTIVE:
        raise ValidationError(f"A directive may have {LONGEST_DIRECTIVE:,} characters; this one has {len(text):,}")
    ttl_s = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
    if ttl_s is not None and not 0 < ttl_s < float("inf"):
        raise ValidationError(f"ttl must be positive, a timedelta or seconds; was {ttl}")
    return Directive(text=text, ttl_s=None if ttl_s is None else float(ttl_s), given_by=given_by)
