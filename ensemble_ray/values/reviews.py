"""Review gates: settings, requests and decisions; directives for a running run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, Self, cast, runtime_checkable

from msgspec import Struct
from pydantic import Strict, model_validator

from ensemble_ray.errors import ReviewTimeoutError, ValidationError
from ensemble_ray.values.value import Duration, DurationField, Instant, Value


class ReviewTiming(StrEnum):
    """When a gate opens."""

    BEFORE_EXECUTION = "before_execution"
    DURING_EXECUTION = "during_execution"
    AFTER_EXECUTION = "after_execution"


class OnTimeoutAction(StrEnum):
    """The effect of a timeout at a gate."""

    CONTINUE = "continue"
    EXIT_EARLY = "exit_early"
    FAIL = "fail"


class ReviewPolicy(StrEnum):
    """The tasks with a gate, unless they have their own setting."""

    NEVER = "never"
    AFTER_EVERY_TASK = "after_every_task"
    AFTER_LAST_TASK = "after_last_task"


@dataclass(frozen=True, slots=True)
class ReviewDecision:
    """The decision at a gate: `Continue`, `Edit` or `ExitEarly`, which are attributes of this class.

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
        """Return the decision to continue."""
        return Continue()

    @staticmethod
    def edit(revised_output: str) -> ReviewDecision:
        """Return the decision to continue with another text, which may be empty.

        Raises:
            ValidationError: The text is None.
        """
        return Edit(revised_output)

    @staticmethod
    def exit_early() -> ReviewDecision:
        """Return the decision to end the run with the outputs so far."""
        return ExitEarly()

    @staticmethod
    def exit_early_timeout() -> ReviewDecision:
        """Return the end of the run after a gate without a decision in time."""
        return ExitEarly(timed_out=True)


@dataclass(frozen=True, slots=True)
class Continue(ReviewDecision):
    """The run continues."""


@dataclass(frozen=True, slots=True)
class Edit(ReviewDecision):
    """The run continues with another text."""

    revised_output: str

    def __post_init__(self) -> None:
        if self.revised_output is None:
            raise ValidationError("revised_output must not be None")
        if not isinstance(self.revised_output, str):
            raise ValidationError(f"revised_output must be text, got: {type(self.revised_output).__name__}")


@dataclass(frozen=True, slots=True)
class ExitEarly(ReviewDecision):
    """The run ends with the outputs so far; `timed_out`: because no decision arrived in time."""

    timed_out: bool = False


ReviewDecision.Continue, ReviewDecision.Edit, ReviewDecision.ExitEarly = Continue, Edit, ExitEarly


class ReviewAnswer(Struct, frozen=True, kw_only=True):
    decision: ReviewDecision
    by: str = ""

    def to_data(self) -> dict[str, object]:
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


class Review(Value):
    """A gate of a task: `Task(review=Review.required("Is it polite?"))`.

    Attributes:
        is_skip: Whether the task has no gate, regardless of the ensemble's policy.
        prompt: A text for the reviewer, beside the task and its output.
        timeout: How long the gate waits, a `timedelta` or seconds; 0: without limit.
        on_timeout: Effect of the timeout: `"continue"`, `"exit_early"` or `"fail"`.
        required_role: Role of the reviewer. Keys of endpoints and `decide(roles=)` are checked; a handler checks it itself.
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
        """Return a gate, regardless of the ensemble's policy."""
        return cls(prompt=prompt)

    @classmethod
    def skip(cls) -> Self:
        """Return the setting for no gate, regardless of the ensemble's policy."""
        return cls(is_skip=True)

    @property
    def is_required(self) -> bool:
        """Whether the gate opens; the opposite of `is_skip`."""
        return not self.is_skip

    @model_validator(mode="before")
    @classmethod
    def _check(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            arguments = cast("Mapping[str, object]", data)
            timeout = arguments.get("timeout")
            seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            if isinstance(seconds, int | float) and seconds < 0:
                raise ValidationError("timeout must not be negative")
            role = arguments.get("required_role")
            if isinstance(role, str) and not role.strip():
                raise ValidationError("required_role must not be None or blank")
        return data


class ReviewRequest(Value):
    """A request to a reviewer.

    Attributes:
        task_description: The task; for a question of a tool, the question.
        task_output: Output of the task; empty before and during it.
        timing: When the gate opened.
        timeout: How long the gate waits from now on; None or 0: without limit.
        on_timeout: Effect of the timeout.
        prompt: A further text for the reviewer.
        required_role: Role of the reviewer.
        review_id: Id of the gate, unique among all runs of a store; the same again after a crash.
        run_id: The run; empty for a request outside of runs.
        ends_run: Whether `exit_early` ends the run; else it only rejects the tool call.
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
        """S-REV-20; a missing argument counts as None (S-CONV-13)."""
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
        """The timeout in s; None: without limit."""
        seconds = None if self.timeout is None else self.timeout.total_seconds()
        return seconds if seconds is not None and seconds > 0 else None


class OpenReview(Value):
    """An open gate, in `output.open_reviews` of a run that waits.

    Attributes:
        run_id: The run.
        gate_id: The `review_id` of its request.
        task_description: The task, or the question of a tool.
        task_output: Empty before and during the task.
        timing: When the gate opened.
        prompt: A further text for the reviewer.
        created_at: When it was opened.
        expires_at: When its timeout ends; None: without limit.
        on_timeout: Effect of the timeout.
        required_role: Role of the reviewer.
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
    """How a run waits for decisions at its gates."""

    ATTACHED = "attached"  # in the calling program; its handler decides
    DETACH = "detach"  # in its record; a decision resumes it


def decision_at_timeout(request: ReviewRequest, waited_s: float) -> ReviewDecision:
    """Return the decision after a time without an answer (S-REV-47)."""
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
        """Return the decision; may be `async`."""
        ...


ReviewFunction = Callable[[ReviewRequest], ReviewDecision | Awaitable[ReviewDecision]]


class DecisionText(NamedTuple):
    decision: Literal["approve", "retry", "retry_predecessor", "reject"]
    text: str = ""
    phase_name: str = ""
    is_unknown: bool = False  # approved only because the text is unknown


def read_decision_text(answer: str | None) -> DecisionText:
    """Return the decision in a review's answer (S-PHASE-70 to S-PHASE-74).

    Examples:
        >>> read_decision_text("Retry: issue: too brief").text
        'issue: too brief'
    """
    trimmed = (answer or "").strip()
    if _begins_with(trimmed, keyword := "RETRY_PREDECESSOR "):
        name, _, feedback = trimmed[len(keyword) :].partition(":")
        return DecisionText("retry_predecessor", feedback.strip(), name.strip())
    if _begins_with(trimmed, "RETRY"):
        return DecisionText("retry", trimmed.partition(":")[2].strip())
    if _begins_with(trimmed, "REJECT"):
        return DecisionText("reject", trimmed.partition(":")[2].strip())
    return DecisionText("approve", is_unknown=trimmed.upper() not in {"", "APPROVE"})


def _begins_with(text: str, keyword: str) -> bool:
    return text[: len(keyword)].upper() == keyword


LONGEST_DIRECTIVE = 10_000  # characters: every later prompt contains it


class Directive(Struct, frozen=True, kw_only=True):
    """A text for the tasks that start while it is active."""

    text: str
    ttl_s: float | None = None  # from its arrival; None: until the run ends
    given_by: str = ""


class ModelSwitch(Struct, frozen=True, kw_only=True):
    """A change of the model for tasks that start later."""

    model: str | None  # in the catalog of the run; None: each agent's own
    agent: str | None = None  # a role; None: all
    given_by: str = ""


RunDirective = Directive | ModelSwitch


def add_switch(switches: Sequence[ModelSwitch], new: ModelSwitch) -> tuple[ModelSwitch, ...]:
    """Add a switch, which replaces the switches that it covers."""
    kept = (each for each in switches if new.agent is not None and each.agent != new.agent)
    return (*kept, new)


def model_for(switches: Sequence[ModelSwitch], agent_role: str) -> str | None:
    models = [each.model for each in switches if each.agent in {None, agent_role}]
    return models[-1] if models else None


def check_directive(text: str, ttl: timedelta | float | None, given_by: str = "") -> Directive:
    """Return the directive of a caller (S-CTL-4)."""
    if not text.strip():
        raise ValidationError("A directive must have a text")
    if len(text) > LONGEST_DIRECTIVE:
        raise ValidationError(f"A directive may have {LONGEST_DIRECTIVE:,} characters; this one has {len(text):,}")
    ttl_s = ttl.total_seconds() if isinstance(ttl, timedelta) else ttl
    if ttl_s is not None and not 0 < ttl_s < float("inf"):
        raise ValidationError(f"ttl must be positive, a timedelta or seconds; was {ttl}")
    return Directive(text=text, ttl_s=None if ttl_s is None else float(ttl_s), given_by=given_by)
