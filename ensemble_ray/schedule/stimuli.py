"""Facts told to a source, each with its time. With `instructions`, the only words of every source.

A task is named by its instance, the path of `key#occurrence`. The names of stimuli in records are older than these
classes and stay: `encode_stimulus` and `decode_stimulus` are the one place that knows both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Union

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import StimulusRecorded
from ensemble_ray.schedule.instructions import EdgeMatches, Question, ReflectOn, ResetMemory, UntilHolds
from ensemble_ray.values.ids import instance_of, key_of
from ensemble_ray.values.outputs import ExitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The run begins."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completed:
    """A task has its output. Carries what folds and sources need, not the output itself."""

    at: float
    instance: str
    duration_s: float = 0.0
    #: -1: unknown
    total_tokens: int = -1
    tool_call_count: int = 0
    #: of a manager: roles of the workers that gave it something
    delegated_roles: tuple[str, ...] = ()
    #: tokens of the output where outputs are grouped by them (S-MR-60); None: the user's estimator has to be asked
    output_tokens: int | None = 0
    #: of a task whose answer the source itself reads, such as a phase's review: its text
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A task failed; which error class, for the record and for rules that tell them apart."""

    at: float
    instance: str
    error_type: str = ""
    message: str = ""
    #: whatever the rules say of failures: the user's code raised, or a provider refuses every call (S-MR-106, S-MR-155)
    ends_run: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited:
    """A task ended the run early: it, or the gate behind it, asked for that (S-ENG-59), or needed more than may be spent (S-BUD-4)."""

    at: float
    instance: str
    reason: ExitReason = ExitReason.USER_EXIT_EARLY
    #: whether it gave its output: a gate behind it ended the run (S-REV-32)
    has_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """A running task was stopped."""

    at: float
    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A task was put down, since somebody has to decide at a gate of it first (S-REV-115)."""

    at: float
    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """The run goes on: what waits is to be started again, since its gates may be decided now."""

    at: float
    #: which tasks; None: all of them, as follows from the run's being gone on with, which is a fact of its own
    instances: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsPulled:
    """The answer to `PullItems`: the next items are there, perhaps fewer than asked for."""

    #: refused ones included
    count: int
    #: the source of items has no more
    is_exhausted: bool
    #: numbers of items that no task can be made of (S-MR-125): each counts as a failed one
    refused: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The answer to an `Evaluate`: items, a number of tokens, a verdict. None: the user's code raised."""

    at: float
    question: Question
    answer: ItemsPulled | int | bool | None
    #: what it raised
    error_type: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The answer to a `Wait`: somebody decided about a gate."""

    at: float
    gate: str
    verdict: Literal["approve", "edit", "exit"]
    #: of an edit: the text that takes the place of the old one
    text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Somebody wants the run to end now."""

    at: float


#: What a machine of a unit may be told: to it, a task that waits has not ended.
UnitFact = Union[Begun, Completed, Failed, Exited, Cancelled, Evaluated, Decided, CancelRequested]  # noqa: UP007  a name for the union, also at run time
Stimulus = Union[UnitFact, Waiting, Continued]  # noqa: UP007  as above

#: What a record calls them, and which of their fields it has. What is not here is not recorded.
_RECORDED: Mapping[type[Stimulus], tuple[str, tuple[str, ...]]] = {
    Begun: ("RunStarted", ()),
    Completed: ("TaskCompleted", ("duration_s", "total_tokens", "tool_call_count", "delegated_roles", "text")),
    Failed: ("TaskFailed", ("error_type", "message")),
    Exited: ("TaskExited", ("reason", "has_output")),
    Cancelled: ("TaskCancelled", ()),
    Waiting: ("TaskWaiting", ()),
    Continued: ("TasksContinued", ("instances",)),
    Evaluated: ("Evaluated", ("answer", "error_type", "message")),
    Decided: ("Decided", ("gate", "verdict", "text")),
    CancelRequested: ("CancelRequested", ()),
}
#: The same of questions whose answers are recorded: those of units.
_QUESTIONS: Mapping[type[Question], tuple[str, tuple[str, ...]]] = {
    UntilHolds: ("until", ("unit", "iteration")),
    EdgeMatches: ("edge", ("unit", "step", "edge")),
    ResetMemory: ("memory", ("unit", "iteration")),
    ReflectOn: ("reflect", ("unit", "execution")),
}
#: Fields that say something of a few stimuli alone, and are left out of the others.
_LEFT_OUT: Mapping[str, object] = {"delegated_roles": (), "text": None, "has_output": False}
_BY_NAME: Mapping[str, type[Stimulus]] = {name: stimulus_type for stimulus_type, (name, _) in _RECORDED.items()}


def encode_stimulus(stimulus: Stimulus, *, more: int = 0) -> StimulusRecorded:
    """Return the stimulus for the record; `more` says how many of the same group follow.

    Raises:
        KeyError: it is none that is recorded.
    """
    name, names = _RECORDED[type(stimulus)]
    fields: dict[str, object] = {"at": stimulus.at}
    if (instance := getattr(stimulus, "instance", "")) != "":
        fields["key"] = key_of(instance)
    fields.update({field: getattr(stimulus, field) for field in names})
    for field, nothing in _LEFT_OUT.items():
        if field in fields and fields[field] == nothing:
            del fields[field]
    if isinstance(stimulus, Evaluated):
        fields.update(_encode_question(stimulus.question))
        if stimulus.answer is not None:
            del fields["error_type"], fields["message"]
    return StimulusRecorded(type=name, fields=fields, more=more)


def decode_stimulus(fact: Fact[StimulusRecorded]) -> Stimulus | None:
    """Return the stimulus of a recorded fact; None where its type is unknown.

    Raises:
        TypeError: it lacks a field, or has one too many.
    """
    stimulus_type = _BY_NAME.get(fact.data.type)
    if stimulus_type is None:
        return None
    fields = {"at": fact.at, **fact.data.fields}
    if isinstance(key := fields.pop("key", None), str):
        fields["instance"] = fact.name if key_of(fact.name) == key else instance_of(key)
    if stimulus_type is Evaluated:
        fields = _decode_question(fields)
    return stimulus_type(**fields)  # type: ignore[arg-type]  # what a record lacks or has too much is the TypeError


def _encode_question(question: Question) -> dict[str, object]:
    name, names = _QUESTIONS[type(question)]
    return {"question": name, **{field: getattr(question, field) for field in names}}


def _decode_question(fields: Mapping[str, object]) -> dict[str, object]:
    """Return the fields of an answer, its question among them.

    Raises:
        TypeError: there is no such question, or it lacks a field.
    """
    rest = dict(fields)
    name = rest.pop("question", None)
    for question_type, (known, names) in _QUESTIONS.items():
        if known == name:
            asked = {field: rest.pop(field) for field in names if field in rest}
            return {**rest, "question": question_type(**asked)}  # type: ignore[arg-type]  # as above
    raise TypeError(f"there is no question '{name}'")
