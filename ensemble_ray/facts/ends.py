"""How tasks ended. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, ClassVar, NamedTuple, Self, cast

from pydantic import TypeAdapter

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact, FactData, Key
from ensemble_ray.facts.lenient import as_count, as_mapping, as_text
from ensemble_ray.facts.shapes import NUMBER, OBJECT, TEXT, optional, require, type_of
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import TaskTrace
from ensemble_ray.values.value import Duration

_DURATION = TypeAdapter[timedelta](Duration)


class RecordedOutput(NamedTuple):
    """An output as its record has it, field by field; what is missing or of another type is empty."""

    raw: str
    agent_role: str
    task_description: str
    #: JSON data
    parsed_output: object
    #: full name of the type of it; empty: it has none
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
    """A task gave its output."""

    KIND: ClassVar = "output"
    KEYS: ClassVar = {"output": Key(type_of("an object", Mapping, TaskOutput), {}, is_needed=True)}

    #: the output itself, or its JSON data where it was read
    output: TaskOutput | Mapping[str, object]

    def output_data(self) -> Mapping[str, object]:
        """Return the output as JSON data."""
        return self.output.model_dump(mode="json") if isinstance(self.output, TaskOutput) else self.output

    def read(self) -> RecordedOutput:
        """Return the output field by field, without its trace, which is large."""
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
    #: what it had done: the trace itself, or its JSON data where it was read
    trace: TaskTrace | Mapping[str, object] | None = None
    #: the error and its causes, as `errors_data` has them
    error: Mapping[str, object] | None = None
    #: requests that its last model call took; 0: it did not end with one
    attempts: int = 0
    #: whether a handler or a predicate of the user's failed, and no agent
    is_of_callable: bool = False

    @property
    def error_data(self) -> Mapping[str, object]:
        """The error for `errors_data`; of a record without one, its class and text."""
        return self.error or {"type": self.error_type, "text": self.message}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitRecorded(FactData):
    """A task ended the run early."""

    KIND: ClassVar = "task_exited"

    reason: ExitReason
    #: of the tool that asked for it: the name of its call, which has no result, and what it said
    call: str = ""
    text: str = ""

    def to_data(self) -> dict[str, object]:
        """Return it as it is recorded."""
        data: dict[str, object] = {} if self.absent else {"reason": self.reason.value}
        if self.call:
            data |= {"call": self.call, "text": self.text}
        return {**data, **(self.rest or {})}

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Return what is recorded; see `FactData`."""
        del at
        rest = dict(data)
        require("reason", rest.pop("reason", ""), TEXT)
        texts = {name: str(rest.pop(name, "")) for name in ("call", "text")}
        absent = () if "reason" in data else ("reason",)
        return cls(reason=read_reason(data), **texts, rest=rest or None, absent=absent)


def read_output(data: Mapping[str, object]) -> RecordedOutput:
    """Return the fields of an output's JSON data; nothing of it is trusted, since records may be broken."""
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
    """Return why a task ended the run early; earlier records only say whether the time was up."""
    reason = data.get("reason")
    if reason in set(ExitReason):
        return ExitReason(str(reason))
    return ExitReason.TIMEOUT if data.get("is_timeout") is True else ExitReason.USER_EXIT_EARLY


def read_trace(fact: Fact[FailureRecorded]) -> TaskTrace | None:
    """Return what a failed task had done; None where it is not recorded.

    Raises:
        RecordError: it is no trace.
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
