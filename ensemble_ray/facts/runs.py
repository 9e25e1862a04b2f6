"""What happened to a run as a whole. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self, cast

from ensemble_ray.errors import BudgetExhaustedError, EnsembleError, IllegalStateError
from ensemble_ray.errors.texts import brief, list_causes, message_of, own_line
from ensemble_ray.facts.ends import read_reason
from ensemble_ray.facts.fact import FactData, Key
from ensemble_ray.facts.shapes import (
    ANY,
    DURATION,
    FLAG,
    INSTANT,
    NUMBER,
    OBJECT,
    TEXT,
    Check,
    list_of,
    object_of,
    one_of,
    optional,
    require,
)
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.outputs import ExitReason, RunState

#: Characters that are recorded of the text of an error, and of one that caused it.
LONGEST_MESSAGE = 20_000
_LONGEST_CAUSE = 1500
_MOST_CAUSES = 16
#: Errors of a run's end whose causes are recorded.
_MOST_WITH_CAUSES = 20
#: Errors of this package, whose texts may be shown to clients of an endpoint (S-SRV-230).
OWN_ERRORS = (EnsembleError, IllegalStateError)


class RecordedBudget(NamedTuple):
    """What a run may spend; None: as much as it likes."""

    max_tokens: int | None
    max_cost: int | None


class RecordedFork(NamedTuple):
    """Which run a fork is of, and from which task it does it again."""

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
    """A run began; everything that tells whether, and with what, it can go on. None: the record does not say."""

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

    #: what will run, as `Plan.to_dict` has it; of a run whose tasks are made while it runs, its rules
    plan: Mapping[str, object] | None = None
    #: what decides what runs and the plan does not show
    definition: Mapping[str, object] | None = None
    workflow: str | None = None
    inputs: Mapping[str, object] | None = None
    #: who takes part, as data of `AgentSummary`
    agents: Sequence[Mapping[str, object]] | None = None
    #: what the source of the items is, for people; only of runs whose tasks are made while they run
    items: Mapping[str, object] | None = None
    #: over plan and definition
    digest: str | None = None
    ensemble_id: str | None = None
    #: what the team is called, and its own tags; the run's are among its options
    name: str | None = None
    tags: Mapping[str, object] | None = None
    #: the run options that were chosen
    options: Mapping[str, object] | None = None
    budget: RecordedBudget | None = None
    #: where the definition came from, and what was chosen in place of what stands there
    origin: str | None = None
    overrides: Mapping[str, object] | None = None
    #: name of the runtime
    runtime: str | None = None
    capture_mode: str | None = None
    started_at: float | None = None
    forked_from: RecordedFork | None = None
    #: the span of another program that asked for it, as W3C's `traceparent` names it
    traceparent: str | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it says nothing: it stands for that of a run that recorded none."""
        return self == PlanRecorded()

    @property
    def is_dynamic(self) -> bool:
        """Whether its tasks are made while it runs."""
        return self.items is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResumed(FactData):
    """A run goes on: somebody wants it to, or its scheduler was replaced."""

    KIND: ClassVar = "resume"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "is_restart": Key(FLAG, default=False),
        "options": Key(optional(OBJECT), is_optional=True),
        "budget": _BUDGET,
    }

    #: whether only its owner's process was replaced
    is_restart: bool
    #: what it goes on with; None: as before
    options: Mapping[str, object] | None = None
    budget: RecordedBudget | None = None

    @classmethod
    def of(cls, header: PlanRecorded, *, is_restart: bool) -> Self:
        """Return the fact of a run that goes on.

        Args:
            header: The first fact that the run would record now.
            is_restart: Whether only its owner's process was replaced.
        """
        if is_restart:
            return cls(is_restart=True)
        return cls(is_restart=False, options=header.options or None, budget=header.budget)


class RecordedCause(NamedTuple):
    """What caused an error."""

    error_type: str
    #: on one line, cut
    message: str
    #: whether its class is one of `OWN_ERRORS`; False: it is not, or an earlier version recorded it
    is_own: bool = False


class RecordedError(NamedTuple):
    """Why a run failed (S-ERR-66, S-ERR-67)."""

    #: of the task; empty: the run itself failed
    key: str
    error_type: str
    message: str
    #: only in earlier records
    agent_role: str = ""
    task_description: str = ""
    stack_trace: str = ""
    #: line of user code that raised, as tracebacks have it: `File "team.py", line 3, in pick`; empty: none did
    place: str = ""
    #: nearest first
    causes: Sequence[RecordedCause] = ()
    #: see `RecordedCause`
    is_own: bool = False

    @classmethod
    def of(cls, error: BaseException, *, key: str = "") -> Self:
        """Return what is recorded of an error; `key` is of the task that raised it."""
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
        """Return the causes whose text the message does not tell, then the line of user code that raised."""
        untold = (each for each in self.causes if each.message.rstrip(".") not in self.message)
        return (*(f"caused by {each.error_type}: {each.message}" for each in untold), *filter(None, (self.place,)))


#: Of what has no error.
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


#: Values of `RunEnded.failure` of which no failed task is the reason: the first error is the run's own (S-ERR-49).
OWN_FAILURES = frozenset({"source", "empty"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(FactData):
    """A run ended. None: the record does not say."""

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
    #: of a run whose tasks are made while it runs: which rule failed it, empty where none did; None: of any other run
    failure: str | None = None
    errors: Sequence[RecordedError] = ()
    trace_id: str | None = None
    #: answers of its tasks that were cut off or empty
    incomplete_answers: int = 0
    #: keys of loops and graphs that ended at a cap
    capped: Sequence[str] = ()

    @property
    def reason(self) -> ExitReason:
        """Why the run ended; if the record does not say, the usual reason for its state."""
        return self.exit_reason or (self.state or RunState.INTERRUPTED).exit_reason

    @property
    def own_error(self) -> RecordedError | None:
        """The error of the run itself; None: a task's is the reason, or there is none."""
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

    #: of the task whose call was refused; empty: what is around the tasks broke
    key: str
    error_type: str
    message: str
    #: see `RecordedError`
    place: str = ""
    causes: Sequence[RecordedCause] = ()

    @classmethod
    def of(cls, reason: RecordedError) -> Self:
        """Return the fact of a run that stopped for that reason."""
        return cls(
            key=reason.key,
            error_type=reason.error_type,
            message=reason.message,
            place=reason.place,
            causes=reason.causes,
        )

    @property
    def reason(self) -> RecordedError:
        """Why it stopped."""
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
    """Scheduling was told something."""

    KIND: ClassVar = "stimulus"
    FENCE: ClassVar = RUN

    #: class of the stimulus
    type: str
    #: its fields
    fields: Mapping[str, object]
    #: how many of the same group follow; 0: none
    more: object = 0

    @property
    def is_completion(self) -> bool:
        """Whether a task had given its output."""
        return self.type == "TaskCompleted" or (self.type == "TaskExited" and self.fields.get("has_output") is True)

    @property
    def is_cancellation(self) -> bool:
        """Whether a task was stopped."""
        return self.type == "TaskCancelled"

    def to_data(self) -> dict[str, object]:
        """Return it as it is recorded."""
        data = {"type": self.type, **self.fields}
        for name in self.absent:
            del data[name]
        if self.more:
            data["more"] = self.more
        return data

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Return what is recorded; see `FactData`."""
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
    """Somebody accepted that a part of the record is lost."""

    KIND: ClassVar = "loss"
    #: it matters to each task, and is found at once however many facts the run has
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

    #: position of the last fact that was left; 0: none
    last: int
    #: position of the last fact that was committed; None: not known
    expected: int | None
    #: facts that were missing before the last one that was left
    gap: int
    #: long texts that were missing
    texts: int
    #: whether an effect on the world may have been begun in what is lost
    has_effect: bool
    #: what is lost and where, as people read it
    reason: str
    #: name of the copy of the record's log; None: there was no log; empty: the store has none
    kept: str | None = ""
