"""Facts about runs, their scheduling and the ends of their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
    as_count,
    as_mapping,
    as_sequence,
    as_text,
    fact_kind,
    is_true,
    list_of,
    object_of,
    one_of,
    optional,
    require,
    type_of,
    written,
)
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.metrics import TaskMetrics
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


#: Fields of an output by name, and the names of the same fields in its trace, which is recorded without those that are equal.
_COMMON: Mapping[str, str] = {
    "task_description": "task_description", "agent_role": "agent_role", "completed_at": "completed_at",
    "duration": "duration", "parsed_output": "parsed_output", "metrics": "metrics", "raw": "final_output",
}  # fmt: skip
#: Values in JSON form that are not recorded.
_NO_METRICS: Mapping[str, object] = TaskMetrics.EMPTY.model_dump(mode="json")
_OUTPUT_DEFAULTS: Mapping[str, object] = {
    "tool_call_count": 0,
    "parsed_output": None,
    "output_type": None,
    "trace": None,
}
_TRACE_DEFAULTS: Mapping[str, object] = {
    "prompts": None, "llm_interactions": [], "delegations": [], "node_type": None, "map_reduce_level": None, "metadata": {},
}  # fmt: skip


def short_output(output: TaskOutput | Mapping[str, object]) -> object:
    """Return what the record contains of an output: no defaults, and no text twice. `whole_output` is the inverse."""
    if not isinstance(output, TaskOutput):
        return output
    common = {
        inside
        for name, inside in _COMMON.items()
        if _is_same(getattr(output, name), getattr(output.trace, inside, None))
    }
    try:
        data = output.model_dump(mode="json", exclude={"trace": common} if common else None)
    except ValueError:  # such as half of a surrogate pair; the journal has a form for it
        return output
    data["metrics"] = _without(_NO_METRICS, data["metrics"])
    if (shown := data["trace"]) is not None:
        if (interactions := shown["llm_interactions"]) and interactions[-1]["response_text"] == output.raw:
            del interactions[-1]["response_text"]
        data["trace"] = _without(_TRACE_DEFAULTS, shown)
    return _without(_OUTPUT_DEFAULTS, data)


def _is_same(one: object, other: object) -> bool:
    """Compare fields; `==` of a parsed answer would be a user's code."""
    return one is other or (isinstance(one, str | datetime | timedelta | TaskMetrics) and one == other)


def _without(defaults: Mapping[str, object], data: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in data.items() if name not in defaults or value != defaults[name]}


def whole_output(data: Mapping[str, object]) -> Mapping[str, object]:
    """Return the JSON form of an output from recorded data, which may be of an earlier format."""
    found = {**_OUTPUT_DEFAULTS, **data, "metrics": {**_NO_METRICS, **as_mapping(data.get("metrics"))}}
    if isinstance(trace := data.get("trace"), Mapping):
        common = {inside: found[name] for name, inside in _COMMON.items() if name in found}
        found["trace"] = shown = {**_TRACE_DEFAULTS, **common, **cast("Mapping[str, object]", trace)}
        if interactions := as_sequence(shown.get("llm_interactions")):
            last = {"response_text": found.get("raw"), **as_mapping(interactions[-1])}
            shown["llm_interactions"] = [*interactions[:-1], last]
    return found


@fact_kind
class OutputRecorded(FactData):
    """A task produced its output."""

    KIND: ClassVar = "output"

    #: the output, or its recorded data if it was read from a store
    output: TaskOutput | Mapping[str, object] = written(
        type_of("an object", Mapping, TaskOutput), missing={}, is_needed=True, write=short_output
    )

    def output_data(self) -> Mapping[str, object]:
        """Return the output in JSON form."""
        return self.output.model_dump(mode="json") if isinstance(self.output, TaskOutput) else whole_output(self.output)

    def read(self) -> RecordedOutput:
        """Return the fields of the output, without its trace, which is large."""
        if isinstance(self.output, TaskOutput):
            return read_output(self.output.model_dump(mode="json", exclude={"trace"}))
        return read_output(self.output_data())


@fact_kind
class FailureRecorded(FactData):
    """A task failed."""

    KIND: ClassVar = "task_failed"

    error_type: str = written(TEXT, missing="Exception")
    message: str = written(TEXT, missing="")
    stack_trace: str | None = written(optional(TEXT), missing=None, default=None)
    #: trace of the task, or its JSON data if it was read from a store
    trace: TaskTrace | Mapping[str, object] | None = written(
        optional(type_of("an object", Mapping, TaskTrace)), missing=None, default=None
    )
    #: the error and its causes, in the form of `errors_data`
    error: Mapping[str, object] | None = written(optional(OBJECT), missing=None, default=None)
    #: requests of its last model call; 0: it did not end with a model call
    attempts: int = written(NUMBER, default=0)
    #: whether a user's handler or predicate failed instead of an agent
    is_of_callable: bool = written(type_of("a truth value", bool), default=False)

    @property
    def error_data(self) -> Mapping[str, object]:
        """The error for `errors_data`; if none is recorded, its class and text."""
        return self.error or {"type": self.error_type, "text": self.message}


@fact_kind
class ExitRecorded(FactData):
    """A task ended the run early."""

    KIND: ClassVar = "task_exited"

    reason: ExitReason
    #: name of the tool call that requested the exit, which has no result, and the tool's text
    call: str = ""
    text: str = ""

    def to_data(self) -> dict[str, object]:
        data: dict[str, object] = {} if self.absent else {"reason": self.reason.value}
        if self.call:
            data |= {"call": self.call, "text": self.text}
        return {**data, **(self.rest or {})}

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
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
    """Return the trace of a failed task; None if it is not recorded."""
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


_BUDGET = optional(object_of(max_tokens=optional(NUMBER), max_cost=optional(NUMBER)))


@fact_kind
class PlanRecorded(FactData):
    """A run started; the data needed to resume it. None: not recorded."""

    KIND: ClassVar = "plan"
    IS_OF_RUN: ClassVar = True

    #: the plan, in the form of `Plan.to_dict`; of a dynamic run, its rules
    plan: Mapping[str, object] | None = written(OBJECT, default=None)
    #: parts of the definition that affect the run but are not in the plan
    definition: Mapping[str, object] | None = written(OBJECT, default=None)
    workflow: str | None = written(TEXT, default=None)
    inputs: Mapping[str, object] | None = written(OBJECT, default=None)
    #: the agents, as data of `AgentSummary`
    agents: Sequence[Mapping[str, object]] | None = written(list_of(OBJECT), default=None)
    #: readable description of the source of the items; only of dynamic runs
    items: Mapping[str, object] | None = written(OBJECT, default=None)
    #: over plan and definition
    digest: str | None = written(TEXT, default=None)
    ensemble_id: str | None = written(TEXT, default=None)
    #: name and tags of the team; the run's tags are among its options
    name: str | None = written(TEXT, default=None)
    tags: Mapping[str, object] | None = written(OBJECT, default=None)
    #: the chosen run options
    options: Mapping[str, object] | None = written(optional(OBJECT), default=None)
    budget: RecordedBudget | None = written(_BUDGET, default=None, read=_read_budget, write=RecordedBudget._asdict)
    #: location of the definition, and the values that override it
    origin: str | None = written(optional(TEXT), default=None)
    overrides: Mapping[str, object] | None = written(optional(OBJECT), default=None)
    #: name of the runtime
    runtime: str | None = written(optional(TEXT), default=None)
    capture_mode: str | None = written(TEXT, default=None)
    started_at: float | None = written(INSTANT, default=None)
    forked_from: RecordedFork | None = written(
        optional(object_of(run=TEXT, task=TEXT)),
        default=None,
        read=lambda value: RecordedFork(value["run"], value["task"]) if value else None,
        write=RecordedFork._asdict,
    )
    #: the span of the program that requested the run, as a W3C `traceparent`
    traceparent: str | None = written(optional(TEXT), default=None)

    @property
    def is_empty(self) -> bool:
        """Whether it has no values: it represents a run without a recorded plan."""
        return self == PlanRecorded()

    @property
    def is_dynamic(self) -> bool:
        """Whether the run creates its tasks dynamically."""
        return self.items is not None


@fact_kind
class RunResumed(FactData):
    """A run continues: a user resumed it, or its scheduler was replaced."""

    KIND: ClassVar = "resume"
    IS_OF_RUN: ClassVar = True

    #: whether only its owner's process was replaced
    is_restart: bool = written(FLAG, missing=False)
    #: new run options; None: unchanged
    options: Mapping[str, object] | None = written(optional(OBJECT), default=None)
    budget: RecordedBudget | None = written(_BUDGET, default=None, read=_read_budget, write=RecordedBudget._asdict)

    @classmethod
    def of(cls, header: PlanRecorded, *, is_restart: bool) -> Self:
        """Return the fact of a run that continues; `header` is the first fact that it would record now."""
        if is_restart:
            return cls(is_restart=True)
        return cls(is_restart=False, options=header.options or None, budget=header.budget)


class RecordedCause(NamedTuple):
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
        message = message_of(error)
        return cls(
            key,
            type(error).__name__,
            message if len(message) <= LONGEST_MESSAGE else f"{message[:LONGEST_MESSAGE]}...",
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


_ERROR_TEXTS = RecordedError._fields[:7]
#: Placeholder for a missing error.
NO_REASON = RecordedError("", "", "")


def _read_causes(value: object) -> tuple[RecordedCause, ...]:
    causes = [as_mapping(each) for each in as_sequence(value) if isinstance(each, Mapping)]
    return tuple(
        RecordedCause(as_text(each.get("error_type")), as_text(each.get("message")), each.get("is_own") is True)
        for each in causes
    )


def _write_causes(causes: Sequence[RecordedCause]) -> list[dict[str, object]]:
    return [
        {"error_type": each.error_type, "message": each.message, **({"is_own": True} if each.is_own else {})}
        for each in causes
    ]


def _read_errors(value: Sequence[Mapping[str, object]]) -> tuple[RecordedError, ...]:
    return tuple(
        RecordedError(
            **{name: as_text(each.get(name)) for name in _ERROR_TEXTS},
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


@fact_kind
class RunEnded(FactData):
    """A run ended. None: not recorded."""

    KIND: ClassVar = "end"
    IS_OF_RUN: ClassVar = True

    state: RunState | None = written(one_of(*RunState), missing=None, read=RunState)
    exit_reason: ExitReason | None = written(one_of(*ExitReason), missing=None, read=ExitReason)
    #: the rule that failed a dynamic run, empty if none did; None for other runs
    failure: str | None = written(ANY, default=None)
    errors: Sequence[RecordedError] = written(
        list_of(OBJECT), missing=(), default=(), read=_read_errors, write=_write_errors
    )
    trace_id: str | None = written(optional(TEXT), default=None)
    #: number of its tasks' answers that were cut off or empty
    incomplete_answers: int = written(NUMBER, default=0)
    #: keys of loops and graphs that ended at a cap
    capped: Sequence[str] = written(list_of(TEXT), default=(), read=tuple, write=list)

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


@fact_kind
class RunInterrupted(FactData):
    """A run stopped without an end, so that it can be resumed (S-DUR-151)."""

    KIND: ClassVar = "interruption"
    IS_OF_RUN: ClassVar = True

    #: key of the task with the refused call; empty: the failure was outside the tasks
    key: str = written(TEXT, missing="")
    error_type: str = written(TEXT, missing="Exception")
    message: str = written(TEXT, missing="")
    #: see `RecordedError`
    place: str = written(TEXT, default="")
    causes: Sequence[RecordedCause] = written(list_of(OBJECT), default=(), read=_read_causes, write=_write_causes)

    @classmethod
    def of(cls, reason: RecordedError) -> Self:
        return cls(**{name: getattr(reason, name) for name in cls.KEYS})

    @property
    def reason(self) -> RecordedError:
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


@fact_kind
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
        return self.type == "TaskCancelled"

    def to_data(self) -> dict[str, object]:
        data = {"type": self.type, **self.fields}
        for name in self.absent:
            del data[name]
        if self.more:
            data["more"] = self.more
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
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


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


@fact_kind
class LossAccepted(FactData):
    """A user accepted the loss of a part of the record."""

    KIND: ClassVar = "loss"
    #: a separate name, since the loss concerns each task and must be found fast among any number of facts
    FENCE: ClassVar = "loss"

    #: position of the last remaining fact; 0: none
    last: int = written(NUMBER, missing=0)
    #: position of the last committed fact; None: unknown
    expected: int | None = written(ANY, missing=None, read=_whole)
    #: number of facts missing before the last remaining one
    gap: int = written(NUMBER, missing=0)
    #: number of missing long texts
    texts: int = written(ANY, missing=0)
    #: whether the lost part may contain the start of a side effect
    has_effect: bool = written(ANY, missing=True, read=lambda value: value is not False)
    #: readable description of the lost part and its place
    reason: str = written(TEXT, missing="it is not known what")
    #: name of the copy of the record's log; None: the log was missing; empty: the store uses no log
    kept: str | None = written(ANY, default="")


@fact_kind
class DirectiveRecorded(FactData):
    """A user sent a directive to a run; tasks that start later receive it."""

    KIND: ClassVar = "directive"
    IS_OF_RUN: ClassVar = True

    text: str = written(TEXT, missing="", is_needed=True)
    #: Unix time, s; tasks that start then or later do not receive it; None: it does not expire
    expires_at: float | None = written(optional(INSTANT), default=None)
    #: name of the author; empty: unknown
    given_by: str = written(TEXT, default="")

    def is_active(self, at: float) -> bool:
        """Return whether a task that starts at that time receives it."""
        return self.expires_at is None or at < self.expires_at


@fact_kind
class DirectivesShown(FactData):
    """The directives in a task's prompt; a continued task shows the same ones."""

    KIND: ClassVar = "directives_shown"
    IS_EFFECT: ClassVar = True

    texts: tuple[str, ...] = written(list_of(TEXT), missing=(), is_needed=True, read=tuple, write=list)


@fact_kind
class ModelSwitched(FactData):
    """A user chose the model for tasks that start later."""

    KIND: ClassVar = "model_switched"
    IS_OF_RUN: ClassVar = True

    #: its name in the run's catalog; None: each agent's own model again
    model: str | None = written(optional(TEXT), missing=None, is_needed=True)
    #: role of the agent that the choice applies to; None: all agents
    agent: str | None = written(optional(TEXT), default=None)
    #: name of the author; empty: unknown
    given_by: str = written(TEXT, default="")


#: Facts about users' directives to a run.
DirectiveFact: TypeAlias = DirectiveRecorded | ModelSwitched


@fact_kind
class ReviewRequested(FactData):
    """A review was requested at the time of the fact; recorded before any reviewer is notified."""

    KIND: ClassVar = "review"
    IS_EFFECT: ClassVar = True

    #: id of the gate, unique in its store
    review_id: str = written(TEXT, missing="")
    timing: ReviewTiming = written(one_of(*ReviewTiming), missing=ReviewTiming.AFTER_EXECUTION, read=ReviewTiming)
    task_description: str = written(TEXT, missing="")
    task_output: str = written(TEXT, default="")
    prompt: str | None = written(optional(TEXT), default=None)
    #: timeout from the time of the fact on, s; None: unlimited
    timeout_s: float | None = written(optional(DURATION), default=None)
    on_timeout: OnTimeoutAction = written(
        one_of(*OnTimeoutAction),
        missing=OnTimeoutAction.EXIT_EARLY,
        default=OnTimeoutAction.EXIT_EARLY,
        read=OnTimeoutAction,
    )
    required_role: str | None = written(optional(TEXT), default=None)
    #: whether `ExitEarly` ends the run; otherwise it only refuses a tool call
    ends_run: bool = written(FLAG, missing=True, default=True)
    #: whether the task was suspended at the gate (S-REV-115)
    detached: bool = written(FLAG, default=False)

    @classmethod
    def of(cls, request: ReviewRequest, *, detached: bool = False) -> ReviewRequested:
        fields = {name: getattr(request, name) for name in cls.KEYS if name != "detached"}
        return cls(**fields, detached=detached)

    def open_since(self, run_id: str, asked_at: float) -> OpenReview:
        """Return the open gate; `asked_at` is the time of the fact, Unix time, s."""
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


@fact_kind
class ReviewDecided(FactData):
    """A gate was decided at the time of the fact."""

    KIND: ClassVar = "review_decision"
    IS_EFFECT: ClassVar = True

    #: `approve`, `edit` or `exit`
    verdict: str = written(one_of("approve", "edit", "exit"), missing="approve", is_needed=True)
    #: of an edit: the new text
    text: str | None = written(optional(TEXT), default=None)
    #: of an exit: whether a timeout caused it
    timed_out: bool = written(FLAG, default=False)
    #: the handler or the reviewer
    by: str = written(TEXT, missing="", default="")
    comment: str = written(TEXT, default="")
    #: whether a process other than the run's made the decision, while its task did not run (S-REV-117)
    outside: bool = written(FLAG, default=False)

    @classmethod
    def of(cls, answer: ReviewAnswer, *, comment: str = "", outside: bool = False) -> ReviewDecided:
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
        data = {"verdict": self.verdict, "text": self.text or "", "timed_out": self.timed_out, "by": self.by}
        return ReviewAnswer.from_data(data)


@fact_kind
class ItemsRecorded(FactData):
    """Items were pulled from the source; recorded before their maps start (S-MR-162)."""

    KIND: ClassVar = "items"
    IS_OF_RUN: ClassVar = True

    #: index of the first item, if the indices are consecutive
    first: int | None = written(NUMBER, default=None)
    #: all indices, if they are not consecutive
    indices: Sequence[int] | None = written(list_of(NUMBER), default=None)
    #: the `item_digest` of each item
    digests: Sequence[str] = written(list_of(TEXT), missing=())
    #: whether the source is exhausted
    are_all: bool = written(ANY, default=False, read=is_true)

    @classmethod
    def of(cls, indices: Sequence[int], digests: Sequence[str], *, are_all: bool = False) -> Self:
        """Return the fact of items with these indices, in this order."""
        first = indices[0] if indices else 0
        if all(index == position for position, index in enumerate(indices, start=first)):
            return cls(first=first, digests=list(digests), are_all=are_all)
        return cls(indices=list(indices), digests=list(digests), are_all=are_all)

    def places(self) -> Sequence[int]:
        first = -1 if self.first is None else self.first
        found = range(first, first + len(self.digests)) if self.indices is None else self.indices
        if len(found) != len(self.digests) or any(index < 0 for index in found):
            raise RecordError("The record is damaged: a fact of items names others than it has hashes of")
        return found


@fact_kind
class GroupRecorded(FactData):
    """Outputs were grouped for a reduce; recorded before the reduce starts (S-MR-161)."""

    KIND: ClassVar = "group"

    #: level of the reduce, also of the final one
    level: int = written(NUMBER, missing=-1)
    #: number of the reduce on that level
    number: int = written(NUMBER, missing=-1)
    #: keys of its inputs, in the order that its factory receives
    inputs: Sequence[str] = written(list_of(TEXT), missing=())
    is_final: bool = written(FLAG, missing=False)


@fact_kind
class ItemOutputRecorded(FactData):
    """An item of several tasks has its output, made of recorded outputs of its tasks (S-MR-193)."""

    KIND: ClassVar = "item_output"

    #: instances of these tasks; several outputs arrive as one, like the iterations of a loop
    outputs: Sequence[str] = written(list_of(TEXT), missing=())


@fact_kind
class AgentsJoined(FactData):
    """Agents are about to join the run."""

    KIND: ClassVar = "agents"

    #: data of `AgentSummary`
    agents: Sequence[Mapping[str, object]] = written(list_of(OBJECT), missing=())

    @classmethod
    def of(cls, agents: Iterable[AgentSummary]) -> Self:
        return cls(agents=[agent.model_dump(mode="json") for agent in agents])

    def summaries(self) -> list[AgentSummary]:
        try:
            return [AgentSummary(**cast("dict[str, Any]", each)) for each in self.agents]
        except (TypeError, ValueError) as error:
            raise RecordError(f"The record is damaged: {self.to_data()} tells of no agents") from error
