"""Facts about runs, their scheduling and the ends of their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, cast

from pydantic import TypeAdapter

from ensemble_ray.errors import BudgetExhaustedError, EnsembleError, IllegalStateError, RecordError
from ensemble_ray.errors.texts import brief, list_causes, message_of, own_line
from ensemble_ray.facts.fact import (
    ANY,
    DURATION,
    FLAG,
    INSTANT,
    NUMBER,
    OBJECT,
    TEXT,
    Check,
    Fact,
    FactData,
    Key,
    as_count,
    as_mapping,
    as_text,
    list_of,
    object_of,
    one_of,
    optional,
    require,
    type_of,
)
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.reviews import OnTimeoutAction, OpenReview, ReviewAnswer, ReviewRequest, ReviewTiming
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import AgentSummary, TaskTrace
from ensemble_ray.values.value import Duration, utc_of

_DURATION = TypeAdapter[timedelta](Duration)


class RecordedOutput(NamedTuple):
    """The fields of a recorded output; a field that is missing or of another type is empty."""

    raw: str
    agent_role: str
    task_description: str
    #: JSON data
    parsed_output: object
    #: full name of the type of `parsed_output`; empty: no type
    output_type: str
    #: JSON data of `TaskMetrics`
    metrics: Mapping[str, object]
    #: Unix time, s; None: not recorded
    completed_at: float | None
    #: None: not recorded
    duration_s: float | None
    tool_call_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRecorded(FactData):
    """A task produced its output."""

    KIND: ClassVar = "output"
    KEYS: ClassVar = {"output": Key(type_of("an object", Mapping, TaskOutput), {}, is_needed=True)}

    #: the output, or its JSON data if it was read from a store
    output: TaskOutput | Mapping[str, object]

    def output_data(self) -> Mapping[str, object]:
        """Return the output as JSON data."""
        return self.output.model_dump(mode="json") if isinstance(self.output, TaskOutput) else self.output

    def read(self) -> RecordedOutput:
        """Return the fields of the output, without its trace, which is large."""
        if isinstance(self.output, TaskOutput):
            return read_output(self.output.model_dump(mode="json", exclude={"trace"}))
        return read_output(self.output)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureRecorded(FactData):
    """A task failed."""

    KIND: ClassVar = "task_failed"
    KEYS: ClassVar = {
        "error_type": Key(TEXT, "Exception"),
        "message": Key(TEXT, ""),
        "stack_trace": Key(optional(TEXT)),
        "trace": Key(optional(type_of("an object", Mapping, TaskTrace))),
        "error": Key(optional(OBJECT)),
        "attempts": Key(NUMBER, 0, is_optional=True),
        "is_of_callable": Key(type_of("a truth value", bool), default=False, is_optional=True),
    }

    error_type: str
    message: str
    stack_trace: str | None = None
    #: trace of the task, or its JSON data if it was read from a store
    trace: TaskTrace | Mapping[str, object] | None = None
    #: the error and its causes, in the form of `errors_data`
    error: Mapping[str, object] | None = None
    #: requests of its last model call; 0: it did not end with a model call
    attempts: int = 0
    #: whether a user's handler or predicate failed instead of an agent
    is_of_callable: bool = False

    @property
    def error_data(self) -> Mapping[str, object]:
        """The error for `errors_data`; if none is recorded, its class and text."""
        return self.error or {"type": self.error_type, "text": self.message}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecorded(FactData):
    """A task ended the run early."""

    KIND: ClassVar = "task_exited"

    reason: ExitReason
    #: name of the tool call that requested the exit, which has no result, and the tool's text
    call: str = ""
    text: str = ""

    def to_data(self) -> dict[str, object]:
        """Return the fact's data in recorded form."""
        data: dict[str, object] = {} if self.absent else {"reason": self.reason.value}
        if self.call:
            data |= {"call": self.call, "text": self.text}
        return {**data, **(self.rest or {})}

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Decode recorded data; see `FactData`."""
        del at
        rest = dict(data)
        require("reason", rest.pop("reason", ""), TEXT)
        texts = {name: str(rest.pop(name, "")) for name in ("call", "text")}
        absent = () if "reason" in data else ("reason",)
        return cls(reason=read_reason(data), **texts, rest=rest or None, absent=absent)


def read_output(data: Mapping[str, object]) -> RecordedOutput:
    """Return the fields of an output's JSON data, each validated, because records may be damaged."""
    try:
        completed_at = datetime.fromisoformat(as_text(data.get("completed_at"))).timestamp()
    except ValueError:
        completed_at = None
    try:
        duration_s = _DURATION.validate_python(data.get("duration")).total_seconds()
    except ValueError:
        duration_s = None
    return RecordedOutput(
        raw=as_text(data.get("raw")),
        agent_role=as_text(data.get("agent_role")),
        task_description=as_text(data.get("task_description")),
        parsed_output=data.get("parsed_output"),
        output_type=as_text(data.get("output_type")),
        metrics=as_mapping(data.get("metrics")),
        completed_at=completed_at,
        duration_s=duration_s,
        tool_call_count=as_count(data.get("tool_call_count")),
    )


def read_reason(data: Mapping[str, object]) -> ExitReason:
    """Return why a task ended the run early; earlier records only contain whether it was a timeout."""
    reason = data.get("reason")
    if reason in set(ExitReason):
        return ExitReason(str(reason))
    return ExitReason.TIMEOUT if data.get("is_timeout") is True else ExitReason.USER_EXIT_EARLY


def read_trace(fact: Fact[FailureRecorded]) -> TaskTrace | None:
    """Return the trace of a failed task; None if it is not recorded.

    Raises:
        RecordError: the recorded data is not a trace.
    """
    data = fact.data.trace
    if isinstance(data, TaskTrace):
        return data
    if not data:
        return None
    try:
        return TaskTrace(**cast("dict[str, Any]", data))
    except ValueError as error:
        raise RecordError(f"The record is damaged: trace of '{fact.name}': {error}") from error


#: Recorded characters of the text of an error, and of a cause.
LONGEST_MESSAGE = 20_000
_LONGEST_CAUSE = 1500
_MOST_CAUSES = 16
#: Number of errors at a run's end that are recorded with their causes.
_MOST_WITH_CAUSES = 20
#: Errors of this package, whose texts may be shown to clients of an endpoint (S-SRV-230).
OWN_ERRORS = (EnsembleError, IllegalStateError)


class RecordedBudget(NamedTuple):
    """The budget of a run; None: unlimited."""

    max_tokens: int | None
    max_cost: int | None


class RecordedFork(NamedTuple):
    """The original run of a fork, and the first task that the fork repeats."""

    run: str
    task: str


def _read_budget(value: Mapping[str, int | None] | None) -> RecordedBudget | None:
    return RecordedBudget(value.get("max_tokens"), value.get("max_cost")) if value else None


def _read_fork(value: Mapping[str, str] | None) -> RecordedFork | None:
    return RecordedFork(value["run"], value["task"]) if value else None


def _write_tuple(value: RecordedBudget | RecordedFork) -> dict[str, object]:
    return value._asdict()


_BUDGET = Key(
    optional(object_of(max_tokens=optional(NUMBER), max_cost=optional(NUMBER))),
    is_optional=True,
    read=_read_budget,
    write=_write_tuple,
)


def _key(check: Check) -> Key:
    return Key(check, is_optional=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRecorded(FactData):
    """A run started; the data needed to resume it. None: not recorded."""

    KIND: ClassVar = "plan"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "plan": _key(OBJECT),
        "definition": _key(OBJECT),
        "workflow": _key(TEXT),
        "inputs": _key(OBJECT),
        "agents": _key(list_of(OBJECT)),
        "items": _key(OBJECT),
        "digest": _key(TEXT),
        "ensemble_id": _key(TEXT),
        "name": _key(TEXT),
        "tags": _key(OBJECT),
        "options": _key(optional(OBJECT)),
        "budget": _BUDGET,
        "origin": _key(optional(TEXT)),
        "overrides": _key(optional(OBJECT)),
        "runtime": _key(optional(TEXT)),
        "capture_mode": _key(TEXT),
        "started_at": _key(INSTANT),
        "forked_from": Key(
            optional(object_of(run=TEXT, task=TEXT)), is_optional=True, read=_read_fork, write=_write_tuple
        ),
        "traceparent": _key(optional(TEXT)),
    }

    #: the plan, in the form of `Plan.to_dict`; of a dynamic run, its rules
    plan: Mapping[str, object] | None = None
    #: parts of the definition that affect the run but are not in the plan
    definition: Mapping[str, object] | None = None
    workflow: str | None = None
    inputs: Mapping[str, object] | None = None
    #: the agents, as data of `AgentSummary`
    agents: Sequence[Mapping[str, object]] | None = None
    #: readable description of the source of the items; only of dynamic runs
    items: Mapping[str, object] | None = None
    #: over plan and definition
    digest: str | None = None
    ensemble_id: str | None = None
    #: name and tags of the team; the run's tags are among its options
    name: str | None = None
    tags: Mapping[str, object] | None = None
    #: the chosen run options
    options: Mapping[str, object] | None = None
    budget: RecordedBudget | None = None
    #: location of the definition, and the values that override it
    origin: str | None = None
    overrides: Mapping[str, object] | None = None
    #: name of the runtime
    runtime: str | None = None
    capture_mode: str | None = None
    started_at: float | None = None
    forked_from: RecordedFork | None = None
    #: the span of the program that requested the run, as a W3C `traceparent`
    traceparent: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it has no values: it represents a run without a recorded plan."""
        return self == PlanRecorded()

    @property
    def is_dynamic(self) -> bool:
        """Whether the run creates its tasks dynamically."""
        return self.items is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(FactData):
    """A run continues: a user resumed it, or its scheduler was replaced."""

    KIND: ClassVar = "resume"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "is_restart": Key(FLAG, default=False),
        "options": Key(optional(OBJECT), is_optional=True),
        "budget": _BUDGET,
    }

    #: whether only its owner's process was replaced
    is_restart: bool
    #: new run options; None: unchanged
    options: Mapping[str, object] | None = None
    budget: RecordedBudget | None = None

    @classmethod
    def of(cls, header: PlanRecorded, *, is_restart: bool) -> Self:
        """Return the fact of a run that continues.

        Args:
            header: The first fact that the run would record now.
            is_restart: Whether only its owner's process was replaced.
        """
        if is_restart:
            return cls(is_restart=True)
        return cls(is_restart=False, options=header.options or None, budget=header.budget)


class RecordedCause(NamedTuple):
    """A cause of an error."""

    error_type: str
    #: on one line, cut
    message: str
    #: whether its class is one of `OWN_ERRORS`; False also in records of earlier versions
    is_own: bool = False


class RecordedError(NamedTuple):
    """Why a run failed (S-ERR-66, S-ERR-67)."""

    #: key of the task; empty: the run itself failed
    key: str
    error_type: str
    message: str
    #: only in earlier records
    agent_role: str = ""
    task_description: str = ""
    stack_trace: str = ""
    #: line of user code that raised, in traceback form: `File "team.py", line 3, in pick`; empty: no user code raised
    place: str = ""
    #: nearest first
    causes: Sequence[RecordedCause] = ()
    #: see `RecordedCause`
    is_own: bool = False

    @classmethod
    def of(cls, error: BaseException, *, key: str = "") -> Self:
        """Return the recorded form of an error; `key` is the key of the task that raised it."""
        return cls(
            key,
            type(error).__name__,
            _cut(message_of(error), LONGEST_MESSAGE),
            place=own_line(error),
            causes=tuple(
                RecordedCause(
                    type(each).__name__, brief(message_of(each), _LONGEST_CAUSE), isinstance(each, OWN_ERRORS)
                )
                for each in list_causes(error)[:_MOST_CAUSES]
            ),
            is_own=isinstance(error, OWN_ERRORS),
        )

    def lines(self) -> tuple[str, ...]:
        """Return the causes with a text that the message does not contain, then the line of user code that raised."""
        untold = (each for each in self.causes if each.message.rstrip(".") not in self.message)
        return (*(f"caused by {each.error_type}: {each.message}" for each in untold), *filter(None, (self.place,)))


#: Placeholder for a missing error.
NO_REASON = RecordedError("", "", "")


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[:length]}..."


def _text_of(error: Mapping[str, object], name: str) -> str:
    value = error.get(name)
    return value if isinstance(value, str) else ""


def _read_causes(value: object) -> tuple[RecordedCause, ...]:
    causes = cast("list[object]", value) if isinstance(value, list | tuple) else []
    found = (cast("Mapping[str, object]", each) for each in causes if isinstance(each, Mapping))
    return tuple(
        RecordedCause(_text_of(each, "error_type"), _text_of(each, "message"), each.get("is_own") is True)
        for each in found
    )


def _write_causes(causes: Sequence[RecordedCause]) -> list[dict[str, object]]:
    return [
        {"error_type": each.error_type, "message": each.message, **({"is_own": True} if each.is_own else {})}
        for each in causes
    ]


def _read_errors(value: Sequence[Mapping[str, object]]) -> tuple[RecordedError, ...]:
    return tuple(
        RecordedError(
            key=_text_of(each, "key"),
            error_type=_text_of(each, "error_type"),
            message=_text_of(each, "message"),
            agent_role=_text_of(each, "agent_role"),
            task_description=_text_of(each, "task_description"),
            stack_trace=_text_of(each, "stack_trace"),
            place=_text_of(each, "place"),
            causes=_read_causes(each.get("causes")),
            is_own=each.get("is_own") is True,
        )
        for each in value
    )


def _write_errors(errors: Sequence[RecordedError]) -> list[dict[str, object]]:
    always, others = RecordedError._fields[:3], [name for name in RecordedError._fields if name != "causes"]
    return [
        {
            **{name: value for name in others if (value := getattr(each, name)) or name in always},
            **({"causes": _write_causes(each.causes)} if each.causes and number < _MOST_WITH_CAUSES else {}),
        }
        for number, each in enumerate(errors)
    ]


#: Values of `RunEnded.failure` without a failed task as the reason: the first error is the run's own (S-ERR-49).
OWN_FAILURES = frozenset({"source", "empty"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(FactData):
    """A run ended. None: not recorded."""

    KIND: ClassVar = "end"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "state": Key(one_of(*RunState), read=RunState),
        "exit_reason": Key(one_of(*ExitReason), read=ExitReason),
        "failure": Key(ANY, is_optional=True),
        "errors": Key(list_of(OBJECT), (), read=_read_errors, write=_write_errors),
        "trace_id": Key(optional(TEXT), is_optional=True),
        "incomplete_answers": Key(NUMBER, 0, is_optional=True),
        "capped": Key(list_of(TEXT), (), is_optional=True, read=tuple, write=list),
    }

    state: RunState | None
    exit_reason: ExitReason | None
    #: the rule that failed a dynamic run, empty if none did; None for other runs
    failure: str | None = None
    errors: Sequence[RecordedError] = ()
    trace_id: str | None = None
    #: number of its tasks' answers that were cut off or empty
    incomplete_answers: int = 0
    #: keys of loops and graphs that ended at a cap
    capped: Sequence[str] = ()

    @property
    def reason(self) -> ExitReason:
        """Why the run ended; if not recorded, the usual reason for its state."""
        return self.exit_reason or (self.state or RunState.INTERRUPTED).exit_reason

    @property
    def own_error(self) -> RecordedError | None:
        """The error of the run itself; None if a task's error is the reason or there is no error."""
        first = self.errors[0] if self.errors else None
        is_own = first is not None and (
            self.failure in OWN_FAILURES or first.error_type == BudgetExhaustedError.__name__
        )
        return first if is_own else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInterrupted(FactData):
    """A run stopped without an end, so that it can be resumed (S-DUR-151)."""

    KIND: ClassVar = "interruption"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "key": Key(TEXT, ""),
        "error_type": Key(TEXT, "Exception"),
        "message": Key(TEXT, ""),
        "place": Key(TEXT, "", is_optional=True),
        "causes": Key(list_of(OBJECT), (), is_optional=True, read=_read_causes, write=_write_causes),
    }

    #: key of the task with the refused call; empty: the failure was outside the tasks
    key: str
    error_type: str
    message: str
    #: see `RecordedError`
    place: str = ""
    causes: Sequence[RecordedCause] = ()

    @classmethod
    def of(cls, reason: RecordedError) -> Self:
        """Return the fact of a run that was interrupted for that reason."""
        return cls(
            key=reason.key,
            error_type=reason.error_type,
            message=reason.message,
            place=reason.place,
            causes=reason.causes,
        )

    @property
    def reason(self) -> RecordedError:
        """Why the run was interrupted."""
        return RecordedError(self.key, self.error_type, self.message, place=self.place, causes=self.causes)


_STIMULUS: Mapping[str, Check] = {
    "key": TEXT,
    "total_tokens": NUMBER,
    "tool_call_count": NUMBER,
    "at": INSTANT,
    "duration_s": DURATION,
    "delegated_roles": list_of(TEXT),
    "has_output": FLAG,
    "text": optional(TEXT),
    "question": TEXT,
    "unit": TEXT,
    "iteration": NUMBER,
    "step": NUMBER,
    "edge": NUMBER,
    "answer": optional(FLAG),
    "error_type": TEXT,
    "message": TEXT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StimulusRecorded(FactData):
    """The scheduler received a stimulus."""

    KIND: ClassVar = "stimulus"
    FENCE: ClassVar = RUN

    #: class of the stimulus
    type: str
    #: its fields
    fields: Mapping[str, object]
    #: number of stimuli of the same group that follow
    more: object = 0

    @property
    def is_completion(self) -> bool:
        """Whether a task had produced its output."""
        return self.type == "TaskCompleted" or (self.type == "TaskExited" and self.fields.get("has_output") is True)

    @property
    def is_cancellation(self) -> bool:
        """Whether a task was stopped."""
        return self.type == "TaskCancelled"

    def to_data(self) -> dict[str, object]:
        """Return the fact's data in recorded form."""
        data = {"type": self.type, **self.fields}
        for name in self.absent:
            del data[name]
        if self.more:
            data["more"] = self.more
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Decode recorded data; see `FactData`."""
        del at
        fields = dict(data)
        absent = () if "type" in fields else ("type",)
        kind, more = fields.pop("type", ""), fields.pop("more", 0)
        require("type", kind, TEXT)
        for name in fields.keys() & _STIMULUS.keys():
            require(name, fields[name], _STIMULUS[name])
        if "reason" in fields or "is_timeout" in fields:  # the latter in earlier records
            fields["reason"] = read_reason(fields)
            fields.pop("is_timeout", None)
        if "delegated_roles" in fields:
            fields["delegated_roles"] = tuple(cast("Sequence[str]", fields["delegated_roles"]))
        return cls(type=cast("str", kind), fields=fields, more=more, absent=absent)


def _is_not_false(value: object) -> bool:
    return value is not False


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LossAccepted(FactData):
    """A user accepted the loss of a part of the record."""

    KIND: ClassVar = "loss"
    #: a separate name, since the loss concerns each task and must be found fast among any number of facts
    FENCE: ClassVar = "loss"
    KEYS: ClassVar = {
        "last": Key(NUMBER, 0),
        "expected": Key(ANY, read=_whole),
        "gap": Key(NUMBER, 0),
        "texts": Key(ANY, 0),
        "has_effect": Key(ANY, default=True, read=_is_not_false),
        "reason": Key(TEXT, "it is not known what"),
        "kept": Key(ANY, "", is_optional=True),
    }

    #: position of the last remaining fact; 0: none
    last: int
    #: position of the last committed fact; None: unknown
    expected: int | None
    #: number of facts missing before the last remaining one
    gap: int
    #: number of missing long texts
    texts: int
    #: whether the lost part may contain the start of a side effect
    has_effect: bool
    #: readable description of the lost part and its place
    reason: str
    #: name of the copy of the record's log; None: the log was missing; empty: the store uses no log
    kept: str | None = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectiveRecorded(FactData):
    """A user sent a directive to a run; tasks that start later receive it."""

    KIND: ClassVar = "directive"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "text": Key(TEXT, "", is_needed=True),
        "expires_at": Key(optional(INSTANT), is_optional=True),
        "given_by": Key(TEXT, "", is_optional=True),
    }

    text: str
    #: Unix time, s; tasks that start then or later do not receive it; None: it does not expire
    expires_at: float | None = None
    #: name of the author; empty: unknown
    given_by: str = ""

    def is_active(self, at: float) -> bool:
        """Return whether a task that starts at that time receives it."""
        return self.expires_at is None or at < self.expires_at


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectivesShown(FactData):
    """The directives in a task's prompt; a continued task shows the same ones."""

    KIND: ClassVar = "directives_shown"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {"texts": Key(list_of(TEXT), (), is_needed=True, read=tuple, write=list)}

    texts: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSwitched(FactData):
    """A user chose the model for tasks that start later."""

    KIND: ClassVar = "model_switched"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "model": Key(optional(TEXT), is_needed=True),
        "agent": Key(optional(TEXT), is_optional=True),
        "given_by": Key(TEXT, "", is_optional=True),
    }

    #: its name in the run's catalog; None: each agent's own model again
    model: str | None
    #: role of the agent that the choice applies to; None: all agents
    agent: str | None = None
    #: name of the author; empty: unknown
    given_by: str = ""


#: Facts about users' directives to a run.
DirectiveFact: TypeAlias = DirectiveRecorded | ModelSwitched


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewRequested(FactData):
    """A review was requested at the time of the fact; recorded before any reviewer is notified."""

    KIND: ClassVar = "review"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "review_id": Key(TEXT, ""),
        "timing": Key(one_of(*ReviewTiming), ReviewTiming.AFTER_EXECUTION, read=ReviewTiming),
        "task_description": Key(TEXT, ""),
        "task_output": Key(TEXT, "", is_optional=True),
        "prompt": Key(optional(TEXT), is_optional=True),
        "timeout_s": Key(optional(DURATION), is_optional=True),
        "on_timeout": Key(one_of(*OnTimeoutAction), OnTimeoutAction.EXIT_EARLY, read=OnTimeoutAction),
        "required_role": Key(optional(TEXT), is_optional=True),
        "ends_run": Key(FLAG, default=True),
        "detached": Key(FLAG, default=False, is_optional=True),
    }

    #: id of the gate, unique in its store
    review_id: str
    timing: ReviewTiming
    task_description: str
    task_output: str = ""
    prompt: str | None = None
    #: timeout from the time of the fact on, s; None: unlimited
    timeout_s: float | None = None
    on_timeout: OnTimeoutAction = OnTimeoutAction.EXIT_EARLY
    required_role: str | None = None
    #: whether `ExitEarly` ends the run; otherwise it only refuses a tool call
    ends_run: bool = True
    #: whether the task was suspended at the gate (S-REV-115)
    detached: bool = False

    @classmethod
    def of(cls, request: ReviewRequest, *, detached: bool = False) -> ReviewRequested:
        """Return the fact of a request."""
        return cls(
            review_id=request.review_id,
            timing=request.timing,
            task_description=request.task_description,
            task_output=request.task_output,
            prompt=request.prompt,
            timeout_s=request.timeout_s,
            on_timeout=request.on_timeout,
            required_role=request.required_role,
            ends_run=request.ends_run,
            detached=detached,
        )

    def open_since(self, run_id: str, asked_at: float) -> OpenReview:
        """Return the open gate.

        Args:
            run_id: Id of the run.
            asked_at: The time of the fact, Unix time, s.
        """
        return OpenReview(
            run_id=run_id,
            gate_id=self.review_id,
            task_description=self.task_description,
            task_output=self.task_output,
            timing=self.timing,
            prompt=self.prompt,
            created_at=utc_of(asked_at),
            expires_at=None if self.timeout_s is None else utc_of(asked_at + self.timeout_s),
            on_timeout=self.on_timeout,
            required_role=self.required_role,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewDecided(FactData):
    """A gate was decided at the time of the fact."""

    KIND: ClassVar = "review_decision"
    IS_EFFECT: ClassVar = True
    KEYS: ClassVar = {
        "verdict": Key(one_of("approve", "edit", "exit"), "approve", is_needed=True),
        "text": Key(optional(TEXT), is_optional=True),
        "timed_out": Key(FLAG, default=False, is_optional=True),
        "by": Key(TEXT, ""),
        "comment": Key(TEXT, "", is_optional=True),
        "outside": Key(FLAG, default=False, is_optional=True),
    }

    #: `approve`, `edit` or `exit`
    verdict: str
    #: of an edit: the new text
    text: str | None = None
    #: of an exit: whether a timeout caused it
    timed_out: bool = False
    #: the handler or the reviewer
    by: str = ""
    comment: str = ""
    #: whether a process other than the run's made the decision, while its task did not run (S-REV-117)
    outside: bool = False

    @classmethod
    def of(cls, answer: ReviewAnswer, *, comment: str = "", outside: bool = False) -> ReviewDecided:
        """Return the fact of an answer."""
        data = answer.to_data()
        return cls(
            verdict=str(data["verdict"]),
            text=None if "text" not in data else str(data["text"]),
            timed_out=bool(data.get("timed_out")),
            by=answer.by,
            comment=comment,
            outside=outside,
        )

    @property
    def answer(self) -> ReviewAnswer:
        """The decision and its author."""
        data = {"verdict": self.verdict, "text": self.text or "", "timed_out": self.timed_out, "by": self.by}
        return ReviewAnswer.from_data(data)


def _is_true(value: object) -> bool:
    return value is True


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsRecorded(FactData):
    """Items were pulled from the source; recorded before their maps start (S-MR-162)."""

    KIND: ClassVar = "items"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "first": Key(NUMBER, is_optional=True),
        "indices": Key(list_of(NUMBER), is_optional=True),
        "digests": Key(list_of(TEXT), ()),
        "are_all": Key(ANY, default=False, is_optional=True, read=_is_true),
    }

    #: index of the first item, if the indices are consecutive
    first: int | None = None
    #: all indices, if they are not consecutive
    indices: Sequence[int] | None = None
    #: the `item_digest` of each item
    digests: Sequence[str]
    #: whether the source is exhausted
    are_all: bool = False

    @classmethod
    def of(cls, indices: Sequence[int], digests: Sequence[str], *, are_all: bool = False) -> Self:
        """Return the fact of items with these indices, in this order."""
        first = indices[0] if indices else 0
        if all(index == position for position, index in enumerate(indices, start=first)):
            return cls(first=first, digests=list(digests), are_all=are_all)
        return cls(indices=list(indices), digests=list(digests), are_all=are_all)

    def places(self) -> Sequence[int]:
        """Return the index of each item.

        Raises:
            RecordError: the numbers of indices and hashes differ, or an index is negative.
        """
        first = -1 if self.first is None else self.first
        found = range(first, first + len(self.digests)) if self.indices is None else self.indices
        if len(found) != len(self.digests) or any(index < 0 for index in found):
            raise RecordError("The record is damaged: a fact of items names others than it has hashes of")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecorded(FactData):
    """Outputs were grouped for a reduce; recorded before the reduce starts (S-MR-161)."""

    KIND: ClassVar = "group"
    KEYS: ClassVar = {
        "level": Key(NUMBER, -1),
        "number": Key(NUMBER, -1),
        "inputs": Key(list_of(TEXT), ()),
        "is_final": Key(FLAG, default=False),
    }

    #: level of the reduce, also of the final one
    level: int
    #: number of the reduce on that level
    number: int
    #: keys of its inputs, in the order that its factory receives
    inputs: Sequence[str]
    is_final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOutputRecorded(FactData):
    """An item of several tasks has its output, made of recorded outputs of its tasks (S-MR-193)."""

    KIND: ClassVar = "item_output"
    KEYS: ClassVar = {"outputs": Key(list_of(TEXT), ())}

    #: instances of these tasks; several outputs arrive as one, like the iterations of a loop
    outputs: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsJoined(FactData):
    """Agents are about to join the run."""

    KIND: ClassVar = "agents"
    KEYS: ClassVar = {"agents": Key(list_of(OBJECT), ())}

    #: data of `AgentSummary`
    agents: Sequence[Mapping[str, object]]

    @classmethod
    def of(cls, agents: Iterable[AgentSummary]) -> Self:
        """Return the fact of these agents."""
        return cls(agents=[agent.model_dump(mode="json") for agent in agents])

    def summaries(self) -> list[AgentSummary]:
        """Return the agents.

        Raises:
            RecordError: the recorded data does not describe agents.
        """
        try:
            return [AgentSummary(**cast("dict[str, Any]", each)) for each in self.agents]
        except (TypeError, ValueError) as error:
            raise RecordError(f"The record is damaged: {self.to_data()} tells of no agents") from error
