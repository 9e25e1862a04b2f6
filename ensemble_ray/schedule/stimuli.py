"""Stimuli: the input of every scheduling machine.

Records use older names for them; `encode_stimulus` and `decode_stimulus` translate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Union

from msgspec import Struct

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import StimulusRecorded
from ensemble_ray.schedule.instructions import EdgeMatches, Question, ReflectOn, ResetMemory, UntilHolds
from ensemble_ray.values.ids import instance_of, key_of
from ensemble_ray.values.outputs import ExitReason


class Begun(Struct, frozen=True, kw_only=True):
    at: float


class Completed(Struct, frozen=True, kw_only=True):
    at: float
    instance: str
    duration_s: float = 0.0
    total_tokens: int = -1
    tool_call_count: int = 0
    delegated_roles: tuple[str, ...] = ()
    #: None: the user's estimator must count them (S-MR-60)
    output_tokens: int | None = 0
    #: only if `Start.wants_text`
    text: str | None = None


class Failed(Struct, frozen=True, kw_only=True):
    at: float
    instance: str
    error_type: str = ""
    message: str = ""
    #: user code raised, or a provider refuses every call (S-MR-106, S-MR-155)
    ends_run: bool = False


class Exited(Struct, frozen=True, kw_only=True):
    """A task or its gate ended the run early (S-ENG-59), or the budget was too small (S-BUD-4)."""

    at: float
    instance: str
    reason: ExitReason = ExitReason.USER_EXIT_EARLY
    #: true if the gate after the task ended the run (S-REV-32)
    has_output: bool = False


class Cancelled(Struct, frozen=True, kw_only=True):
    at: float
    instance: str


class Waiting(Struct, frozen=True, kw_only=True):
    """A task was suspended at an open review gate (S-REV-115)."""

    at: float
    instance: str


class Continued(Struct, frozen=True, kw_only=True):
    """Suspended tasks start again, since their gates may have decisions now."""

    at: float
    #: None: all, as when a process resumes the run; the record stores that as another fact
    instances: Sequence[str] | None = None


class ItemsPulled(Struct, frozen=True, kw_only=True):
    count: int
    is_exhausted: bool
    #: items without a task (S-MR-125); each counts as failed
    refused: tuple[int, ...] = ()


class Evaluated(Struct, frozen=True, kw_only=True):
    """The answer to an `Evaluate`. None: user code raised an error."""

    at: float
    question: Question
    answer: ItemsPulled | int | bool | None
    error_type: str = ""
    message: str = ""


class CancelRequested(Struct, frozen=True, kw_only=True):
    at: float


TaskEnd = Union[Completed, Failed, Exited, Cancelled]  # noqa: UP007  a name for the union, also at run time
#: For the machine of a unit a suspended task is still running.
UnitFact = Union[Begun, TaskEnd, Evaluated, CancelRequested]  # noqa: UP007  as above
Stimulus = Union[UnitFact, Waiting, Continued]  # noqa: UP007  as above

#: Name of each stimulus in a record, and its fields beside time and task.
_RECORDED: Mapping[type[Stimulus], tuple[str, tuple[str, ...]]] = {
    Begun: ("RunStarted", ()),
    Completed: ("TaskCompleted", ("duration_s", "total_tokens", "tool_call_count", "delegated_roles", "text")),
    Failed: ("TaskFailed", ("error_type", "message")),
    Exited: ("TaskExited", ("reason", "has_output")),
    Cancelled: ("TaskCancelled", ()),
    Waiting: ("TaskWaiting", ()),
    Continued: ("TasksContinued", ("instances",)),
    Evaluated: ("Evaluated", ("answer", "error_type", "message")),
    CancelRequested: ("CancelRequested", ()),
}
#: Answers to other questions are not recorded.
_QUESTIONS: Mapping[type[Question], tuple[str, tuple[str, ...]]] = {
    UntilHolds: ("until", ("unit", "iteration")),
    EdgeMatches: ("edge", ("unit", "step", "edge")),
    ResetMemory: ("memory", ("unit", "iteration")),
    ReflectOn: ("reflect", ("unit", "execution")),
}
#: Values that are not recorded.
_OMITTED: Mapping[str, object] = {"delegated_roles": (), "text": None, "has_output": False}
_BY_NAME: Mapping[str, type[Stimulus]] = {name: stimulus_type for stimulus_type, (name, _) in _RECORDED.items()}


def encode_stimulus(stimulus: Stimulus, *, more: int = 0) -> StimulusRecorded:
    """Return the fact; `more` stimuli follow in the same group. A KeyError: this kind is not recorded."""
    name, names = _RECORDED[type(stimulus)]
    fields: dict[str, object] = {"at": stimulus.at}
    if (instance := getattr(stimulus, "instance", "")) != "":
        fields["key"] = key_of(instance)
    fields.update({field: getattr(stimulus, field) for field in names})
    for field, default in _OMITTED.items():
        if field in fields and fields[field] == default:
            del fields[field]
    if isinstance(stimulus, Evaluated):
        question, parts = _QUESTIONS[type(stimulus.question)]
        fields.update({"question": question, **{part: getattr(stimulus.question, part) for part in parts}})
        if stimulus.answer is not None:
            del fields["error_type"], fields["message"]
    return StimulusRecorded(type=name, fields=fields, more=more)


def decode_stimulus(fact: Fact[StimulusRecorded]) -> Stimulus | None:
    """Return the stimulus; None if its type is unknown. A TypeError: a field is missing or unknown."""
    stimulus_type = _BY_NAME.get(fact.data.type)
    if stimulus_type is None:
        return None
    fields = {"at": fact.at, **fact.data.fields}
    if isinstance(key := fields.pop("key", None), str):
        fields["instance"] = fact.name if key_of(fact.name) == key else instance_of(key)
    if stimulus_type is Evaluated:
        name = fields.pop("question", None)
        for question_type, (known, names) in _QUESTIONS.items():
            if known == name:
                found = {field: fields.pop(field) for field in names if field in fields}
                fields["question"] = question_type(**found)  # type: ignore[arg-type]  # as below
                break
        else:
            raise TypeError(f"there is no question '{name}'")
    return stimulus_type(**fields)  # type: ignore[arg-type]  # a missing or unknown field raises the TypeError
