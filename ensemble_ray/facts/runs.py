"""Facts about runs, their scheduling and the ends of their tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar, NamedTuple, Self, TypeAlias, cast

from pydantic import TypeAdapter

from ensemble_ray.errors import BudgetExhaustedError, EnsembleError, IllegalStateError, RecordError
from ensemble_ray.errors.texts import brief, list_causes, message_of, own_line
from ensemble_ray.facts.effects import WAITS, ModelWait, read_waits, row_of, write_waits
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
    """The fields of a recorded output; a missing or damaged field is empty."""

    raw: str
    agent_role: str
    task_description: str
    parsed_output: object
    output_type: str  # full name of the type of `parsed_output`; empty: no type
    metrics: Mapping[str, object]
    completed_at: float | None  # Unix time, s; None: not recorded
    duration_s: float | None  # None: not recorded
    tool_call_count: int


#: Fields of an output, and the same fields in its trace, which is recorded without those that are equal.
_COMMON: Mapping[str, str] = {
    "task_description": "task_description", "agent_role": "agent_role", "completed_at": "completed_at",
    "duration": "duration", "parsed_output": "parsed_output", "metrics": "metrics", "raw": "final_output",
}  # fmt: skip
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
    """Return what the record contains of an output: no defaults, and no text twice. Inverse: `whole_output`."""
    if not isinstance(output, TaskOutput):
        return output
    common: set[str] = set()
    for name, inside in _COMMON.items():
        one, other = getattr(output, name), getattr(output.trace, inside, None)
        # `==` of a parsed answer would be a user's code.
        if one is other or (isinstance(one, str | datetime | timedelta | TaskMetrics) and one == other):
            common.add(inside)
    try:
        data = output.model_dump(mode="json", exclude={"trace": common} if common else None)
    except ValueError:  # half of a surrogate pair; the journal has a form for it
        return output
    data["metrics"] = _without(_NO_METRICS, data["metrics"])
    if (shown := data["trace"]) is not None:
        if (interactions := shown["llm_interactions"]) and interactions[-1]["response_text"] == output.raw:
            del interactions[-1]["response_text"]
        data["trace"] = _without(_TRACE_DEFAULTS, shown)
    return _without(_OUTPUT_DEFAULTS, data)


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


class OutputRecorded(FactData):
    """A task produced its output."""

    KIND: ClassVar = "output"

    #: recorded data if it was read from a store
    output: TaskOutput | Mapping[str, object] = written(
        type_of("an object", Mapping, TaskOutput), missing={}, is_needed=True, write=short_output
    )

    def output_data(self) -> Mapping[str, object]:
        return self.output.model_dump(mode="json") if isinstance(self.output, TaskOutput) else whole_output(self.output)

    def read(self) -> RecordedOutput:
        """Return the fields without the trace, which is large."""
        if isinstance(self.output, TaskOutput):
            return read_output(self.output.model_dump(mode="json", exclude={"trace"}))
        return read_output(self.output_data())


class FailureRecorded(FactData):
    KIND: ClassVar = "task_failed"

    error_type: str = written(TEXT, missing="Exception")
    message: str = written(TEXT, missing="")
    stack_trace: str | None = written(optional(TEXT), missing=None, default=None)
    #: JSON data if it was read from a store
    trace: TaskTrace | Mapping[str, object] | None = written(
        optional(type_of("an object", Mapping, TaskTrace)), missing=None, default=None
    )
    #: in the form of `errors_data`, with causes
    error: Mapping[str, object] | None = written(optional(OBJECT), missing=None, default=None)
    attempts: int = written(NUMBER, default=0)  # requests of its last model call; 0: it did not end with a model call
    #: of its last model call, if that failed after other attempts (S-DUR-66)
    waits: tuple[ModelWait, ...] = written(WAITS, default=(), read=read_waits, write=write_waits)
    max_attempts: int = written(NUMBER, default=0)  # of the retry policy; 0: no waits
    #: whether a user's handler or predicate failed instead of an agent
    is_of_callable: bool = written(type_of("a truth value", bool), default=False)

    @property
    def error_data(self) -> Mapping[str, object]:
        """The error for `errors_data`; if none is recorded, its class and text."""
        return self.error or {"type": self.error_type, "text": self.message}


class ExitRecorded(FactData, kw_only=True):
    KIND: ClassVar = "task_exited"

    reason: ExitReason
    call: str = ""  # the tool call that requested the exit, which has no result, and the tool's text
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


def read_instant(value: object) -> float | None:
    """Return the Unix time, s, of a text in ISO 8601; None: it is none."""
    try:
        return datetime.fromisoformat(as_text(value)).timestamp()
    except ValueError:
        return None


def read_output(data: Mapping[str, object]) -> RecordedOutput:
    """Return the fields of an output's JSON data, each validated, because records may be damaged."""
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
        completed_at=read_instant(data.get("completed_at")),
        duration_s=duration_s,
        tool_call_count=as_count(data.get("tool_call_count")),
    )


def read_reason(data: Mapping[str, object]) -> ExitReason:
    """Return why a task ended the run early; earlier records only tell timeouts from other reasons."""
    reason = data.get("reason")
    if reason in set(ExitReason):
        return ExitReason(str(reason))
    return ExitReason.TIMEOUT if data.get("is_timeout") is True else ExitReason.USER_EXIT_EARLY


def read_trace(fact: Fact[FailureRecorded]) -> TaskTrace | None:
    """Return the trace of a failed task, if it is recorded."""
    data = fact.data.trace
    if isinstance(data, TaskTrace):
        return data
    if not data:
        return None
    try:
        return TaskTrace(**cast("dict[str, Any]", data))
    except ValueError as error:
        raise RecordError(f"The record is damaged: trace of '{fact.name}': {error}") from error


LONGEST_MESSAGE = 20_000  # Recorded characters.
_LONGEST_CAUSE = 1500
_MOST_CAUSES = 16
_MOST_WITH_CAUSES = 20
OWN_ERRORS = (EnsembleError, IllegalStateError)  # Their texts may be shown to clients of an endpoint (S-SRV-230).


class RecordedBudget(NamedTuple):
    """None: unlimited."""

    max_tokens: int | None
    max_cost: int | None


class RecordedFork(NamedTuple):
    """The original run of a fork, and the first task that the fork repeats."""

    run: str
    task: str


def _read_budget(value: Mapping[str, int | None] | None) -> RecordedBudget | None:
    return RecordedBudget(value.get("max_tokens"), value.get("max_cost")) if value else None


_BUDGET = optional(object_of(max_tokens=optional(NUMBER), max_cost=optional(NUMBER)))


class PlanRecorded(FactData):
    """A run started; the data needed to resume it. None: not recorded."""

    KIND: ClassVar = "plan"
    IS_OF_RUN: ClassVar = True

    #: in the form of `Plan.to_dict`; of a dynamic run, its rules
    plan: Mapping[str, object] | None = written(OBJECT, default=None)
    definition: Mapping[str, object] | None = written(OBJECT, default=None)
    workflow: str | None = written(TEXT, default=None)
    inputs: Mapping[str, object] | None = written(OBJECT, default=None)
    agents: Sequence[Mapping[str, object]] | None = written(list_of(OBJECT), default=None)  # data of `AgentSummary`
    #: readable description of the source of the items; only of dynamic runs
    items: Mapping[str, object] | None = written(OBJECT, default=None)
    digest: str | None = written(TEXT, default=None)
    ensemble_id: str | None = written(TEXT, default=None)
    name: str | None = written(TEXT, default=None)  # of the team; the run's tags are among its options
    tags: Mapping[str, object] | None = written(OBJECT, default=None)
    options: Mapping[str, object] | None = written(optional(OBJECT), default=None)
    budget: RecordedBudget | None = written(_BUDGET, default=None, read=_read_budget, write=RecordedBudget._asdict)
    origin: str | None = written(optional(TEXT), default=None)  # of the definition, and the values that override it
    overrides: Mapping[str, object] | None = written(optional(OBJECT), default=None)
    runtime: str | None = written(optional(TEXT), default=None)
    capture_mode: str | None = written(TEXT, default=None)
    started_at: float | None = written(INSTANT, default=None)
    forked_from: RecordedFork | None = written(
        optional(object_of(run=TEXT, task=TEXT)),
        default=None,
        read=lambda value: RecordedFork(value["run"], value["task"]) if value else None,
        write=RecordedFork._asdict,
    )
    #: of the models that were known at the start, by `PROVIDER:MODEL` (S-PRC-14)
    prices: Mapping[str, Mapping[str, object]] | None = written(optional(OBJECT), default=None)
    traceparent: str | None = written(optional(TEXT), default=None)  # W3C `traceparent` of the requesting program
    #: patterns, and encrypted values by placeholder (S-RED-41); never a key
    redaction: Mapping[str, object] | None = written(optional(OBJECT), default=None)

    @property
    def is_empty(self) -> bool:
        """Whether it represents a run without a recorded plan."""
        return self == PlanRecorded()

    @property
    def is_dynamic(self) -> bool:
        return self.items is not None


class RunResumed(FactData):
    """A user resumed the run, or its scheduler was replaced."""

    KIND: ClassVar = "resume"
    IS_OF_RUN: ClassVar = True

    is_restart: bool = written(FLAG, missing=False)  # whether only the owner's process was replaced
    options: Mapping[str, object] | None = written(optional(OBJECT), default=None)  # None: unchanged
    budget: RecordedBudget | None = written(_BUDGET, default=None, read=_read_budget, write=RecordedBudget._asdict)

    @classmethod
    def of(cls, header: PlanRecorded, *, is_restart: bool) -> Self:
        """Return the fact; `header` is the first fact that the run would record now."""
        if is_restart:
            return cls(is_restart=True)
        return cls(is_restart=False, options=header.options or None, budget=header.budget)


class RecordedCause(NamedTuple):
    error_type: str
    message: str  # one line, cut
    is_own: bool = False  # whether its class is one of `OWN_ERRORS`; False in records of earlier versions


class RecordedError(NamedTuple):
    """Why a run failed (S-ERR-66, S-ERR-67)."""

    key: str  # of the task; empty: the run itself failed
    error_type: str
    message: str
    agent_role: str = ""  # only in earlier records
    task_description: str = ""
    stack_trace: str = ""
    place: str = ""  # line of user code that raised: `File "team.py", line 3, in pick`; empty: no user code raised
    causes: Sequence[RecordedCause] = ()  # nearest first
    is_own: bool = False
    #: the failed execution inside a unit, or the unit that failed; empty: `key` says it, or an earlier version recorded it
    instance: str = ""

    @classmethod
    def of(cls, error: BaseException, *, key: str = "") -> Self:
        """Return the recorded form of an error of the task `key`."""
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
        """Return the causes that add a text to the message, then the line of user code that raised."""
        untold = (each for each in self.causes if each.message.rstrip(".") not in self.message)
        return (*(f"caused by {each.error_type}: {each.message}" for each in untold), *filter(None, (self.place,)))


_ERROR_TEXTS = RecordedError._fields[:7]
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
            instance=as_text(each.get("instance")),
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


#: Values of `RunEnded.failure` without a failed task: the first error is the run's own (S-ERR-49).
OWN_FAILURES = frozenset({"source", "empty"})


class RunEnded(FactData):
    """A run ended. None: not recorded."""

    KIND: ClassVar = "end"
    IS_OF_RUN: ClassVar = True

    state: RunState | None = written(one_of(*RunState), missing=None, read=RunState)
    exit_reason: ExitReason | None = written(one_of(*ExitReason), missing=None, read=ExitReason)
    failure: str | None = written(ANY, default=None)  # rule that failed a dynamic run, or empty; None for other runs
    errors: Sequence[RecordedError] = written(
        list_of(OBJECT), missing=(), default=(), read=_read_errors, write=_write_errors
    )
    trace_id: str | None = written(optional(TEXT), default=None)
    incomplete_answers: int = written(NUMBER, default=0)  # answers that were cut off or empty
    #: loops and graphs that ended at a cap
    capped: Sequence[str] = written(list_of(TEXT), default=(), read=tuple, write=list)

    @property
    def reason(self) -> ExitReason:
        """Why the run ended; if not recorded, the usual reason for its state."""
        return self.exit_reason or (self.state or RunState.INTERRUPTED).exit_reason

    @property
    def own_error(self) -> RecordedError | None:
        """The error of the run itself, unless a task's error is the reason."""
        first = self.errors[0] if self.errors else None
        is_own = first is not None and (
            self.failure in OWN_FAILURES or first.error_type == BudgetExhaustedError.__name__
        )
        return first if is_own else None


class RunInterrupted(FactData):
    """A run stopped without an end, so that it can be resumed (S-DUR-151)."""

    KIND: ClassVar = "interruption"
    IS_OF_RUN: ClassVar = True

    key: str = written(TEXT, missing="")  # task with the refused call; empty: the failure was outside the tasks
    error_type: str = written(TEXT, missing="Exception")
    message: str = written(TEXT, missing="")
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


class StimulusRecorded(FactData, kw_only=True):
    KIND: ClassVar = "stimulus"
    FENCE: ClassVar = RUN

    type: str
    fields: Mapping[str, object]
    more: object = 0  # stimuli of the same group that follow

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


class LossAccepted(FactData):
    """A user accepted the loss of a part of the record."""

    KIND: ClassVar = "loss"
    FENCE: ClassVar = "loss"  # a separate name: the loss concerns each task and must be found fast

    last: int = written(NUMBER, missing=0)  # last remaining fact; 0: none
    #: last committed fact; None: unknown
    expected: int | None = written(
        ANY, missing=None, read=lambda value: value if isinstance(value, int) and not isinstance(value, bool) else None
    )
    gap: int = written(NUMBER, missing=0)  # facts missing before the last remaining one
    texts: int = written(ANY, missing=0)  # missing long texts
    #: whether the lost part may contain the start of a side effect
    has_effect: bool = written(ANY, missing=True, read=lambda value: value is not False)
    reason: str = written(TEXT, missing="it is not known what")  # the lost part and its place, for readers
    kept: str | None = written(ANY, default="")  # copy of the log; None: it was missing; empty: the store has no log


class DirectiveRecorded(FactData):
    """A user sent a directive to a run; tasks that start later receive it."""

    KIND: ClassVar = "directive"
    IS_OF_RUN: ClassVar = True

    text: str = written(TEXT, missing="", is_needed=True)
    #: Unix time, s; tasks that start then or later do not receive it
    expires_at: float | None = written(optional(INSTANT), default=None)
    given_by: str = written(TEXT, default="")

    def is_active(self, at: float) -> bool:
        """Whether a task that starts at that time receives it."""
        return self.expires_at is None or at < self.expires_at


class DirectivesShown(FactData):
    """The directives in a task's prompt; a continued task shows the same ones."""

    KIND: ClassVar = "directives_shown"
    IS_EFFECT: ClassVar = True

    texts: tuple[str, ...] = written(list_of(TEXT), missing=(), is_needed=True, read=tuple, write=list)


class ModelSwitched(FactData):
    """A user chose the model for tasks that start later."""

    KIND: ClassVar = "model_switched"
    IS_OF_RUN: ClassVar = True

    #: name in the run's catalog; None: each agent's own model again
    model: str | None = written(optional(TEXT), missing=None, is_needed=True)
    agent: str | None = written(optional(TEXT), default=None)  # role of the agent; None: all agents
    given_by: str = written(TEXT, default="")


DirectiveFact: TypeAlias = DirectiveRecorded | ModelSwitched


class ReviewRequested(FactData):
    """Recorded before any reviewer is notified."""

    KIND: ClassVar = "review"
    IS_EFFECT: ClassVar = True

    review_id: str = written(TEXT, missing="")
    timing: ReviewTiming = written(one_of(*ReviewTiming), missing=ReviewTiming.AFTER_EXECUTION, read=ReviewTiming)
    task_description: str = written(TEXT, missing="")
    task_output: str = written(TEXT, default="")
    prompt: str | None = written(optional(TEXT), default=None)
    timeout_s: float | None = written(optional(DURATION), default=None)  # from the time of the fact on; None: unlimited
    on_timeout: OnTimeoutAction = written(
        one_of(*OnTimeoutAction),
        missing=OnTimeoutAction.EXIT_EARLY,
        default=OnTimeoutAction.EXIT_EARLY,
        read=OnTimeoutAction,
    )
    required_role: str | None = written(optional(TEXT), default=None)
    #: whether `ExitEarly` ends the run, or refuses a tool call
    ends_run: bool = written(FLAG, missing=True, default=True)
    detached: bool = written(FLAG, default=False)  # whether the task was suspended at the gate (S-REV-115)

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


class ReviewDecided(FactData):
    """A gate was decided at the time of the fact."""

    KIND: ClassVar = "review_decision"
    IS_EFFECT: ClassVar = True

    #: `approve`, `edit` or `exit`
    verdict: str = written(one_of("approve", "edit", "exit"), missing="approve", is_needed=True)
    text: str | None = written(optional(TEXT), default=None)
    timed_out: bool = written(FLAG, default=False)  # of an exit
    by: str = written(TEXT, missing="", default="")
    comment: str = written(TEXT, default="")
    #: whether another process decided while the task did not run (S-REV-117)
    outside: bool = written(FLAG, default=False)
    #: role of the author, if the gate required one (S-QUO-50)
    role: str | None = written(optional(TEXT), default=None)

    @classmethod
    def of(
        cls, answer: ReviewAnswer, *, comment: str = "", outside: bool = False, role: str | None = None
    ) -> ReviewDecided:
        data = answer.to_data()
        return cls(
            verdict=str(data["verdict"]),
            text=None if "text" not in data else str(data["text"]),
            timed_out=bool(data.get("timed_out")),
            by=answer.by,
            comment=comment,
            outside=outside,
            role=role,
        )

    @property
    def answer(self) -> ReviewAnswer:
        data = {"verdict": self.verdict, "text": self.text or "", "timed_out": self.timed_out, "by": self.by}
        return ReviewAnswer.from_data(data)


class ItemsRecorded(FactData):
    """Items were pulled from the source; recorded before their maps start (S-MR-162)."""

    KIND: ClassVar = "items"
    IS_OF_RUN: ClassVar = True

    first: int | None = written(NUMBER, default=None)  # first index, if the indices are consecutive
    indices: Sequence[int] | None = written(list_of(NUMBER), default=None)  # all indices otherwise
    digests: Sequence[str] = written(list_of(TEXT), missing=())
    are_all: bool = written(ANY, default=False, read=is_true)  # whether the source is exhausted

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


class GroupRecorded(FactData):
    """Outputs were grouped for a reduce; recorded before the reduce starts (S-MR-161)."""

    KIND: ClassVar = "group"

    level: int = written(NUMBER, missing=-1)  # of the reduce, also of the final one
    number: int = written(NUMBER, missing=-1)
    inputs: Sequence[str] = written(list_of(TEXT), missing=())  # keys, in the order that the reduce's factory receives
    is_final: bool = written(FLAG, missing=False)


class ItemOutputRecorded(FactData):
    """An item of several tasks has its output, made of recorded outputs of its tasks (S-MR-193)."""

    KIND: ClassVar = "item_output"

    outputs: Sequence[str] = written(list_of(TEXT), missing=())  # instances of these tasks


class AgentsJoined(FactData):
    KIND: ClassVar = "agents"

    agents: Sequence[Mapping[str, object]] = written(list_of(OBJECT), missing=())

    @classmethod
    def of(cls, agents: Iterable[AgentSummary]) -> Self:
        return cls(agents=[agent.model_dump(mode="json") for agent in agents])

    def summaries(self) -> list[AgentSummary]:
        try:
            return [AgentSummary(**cast("dict[str, Any]", each)) for each in self.agents]
        except (TypeError, ValueError) as error:
            raise RecordError(f"The record is damaged: {self.to_data()} tells of no agents") from error


class BatchMember(NamedTuple):
    """Consecutive items of a batch, by index, and the occurrence of their maps."""

    first: int
    last: int
    occurrence: int


class BatchRecorded(FactData):
    """A step of a batch of map requests at the provider (S-BAT-10)."""

    KIND: ClassVar = "batch"
    IS_OF_RUN: ClassVar = True

    batch: str = written(TEXT, missing="")  # our id, in the metadata of the provider's batch
    #: `planned`: before anything is sent; `uploaded`: the file is; `submitted`: the provider has the batch; `cancelled`: by
    #: this run; `collected`: all answers are recorded; `void`: its open items need another batch
    state: str = written(TEXT, missing="")
    items: tuple[BatchMember, ...] = written(
        list_of(row_of(NUMBER, NUMBER, NUMBER)),
        default=(),
        read=lambda rows: tuple([BatchMember(*row) for row in rows]),
        write=lambda rows: [list(row) for row in rows],
    )
    total: int = written(NUMBER, default=0)  # requests
    answered: int = written(NUMBER, default=0)  # by the provider so far, or recorded answers of a collected batch
    failed: int = written(NUMBER, default=0)
    model: str = written(TEXT, default="")
    endpoint: str = written(TEXT, default="")
    file: str = written(TEXT, default="")  # the provider's ids
    provider_batch: str = written(TEXT, default="")
    status: str = written(TEXT, default="")  # the provider's word
