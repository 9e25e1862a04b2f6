"""What a source wants done. Package: schedule. Verbs; carried out by the coordinator, never here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Union

from ensemble_ray.values.outputs import ExitReason, RunState

__all__ = [
    "Cancel",
    "Changes",
    "CountTokens",
    "End",
    "Evaluate",
    "FailureReason",
    "Forget",
    "Instruction",
    "MapItem",
    "Position",
    "PullItems",
    "Question",
    "ReduceGroup",
    "Skip",
    "Start",
    "TaskChanges",
    "Wait",
    "Warn",
    "WarnLeftOut",
    "WarnOversized",
]

#: Level and number of a task of a map-reduce. Level 0 is the maps; the number of a map is the place of its item in the
#: order in which items were pulled. Reduces are numbered from 0 on each level, in the order in which their groups are made.
Position = tuple[int, int]

#: Why a map-reduce failed. first: a task failed whose failure ends the run; all_maps: no map completed; level: no output is
#: left, or the final reduce failed; source: the user's code raised; empty: the source had no items.
FailureReason = Literal["", "first", "all_maps", "level", "source", "empty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskChanges:
    """What an execution of a task has beside the task itself; it rides on the order."""

    attempt: int = 1
    #: of a reviewer, for the next attempt
    feedback: str = ""
    #: instance of an earlier attempt whose output goes along; "": none
    prior: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapItem:
    """The item that a map is made of."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReduceGroup:
    """The outputs that a reduce is made of."""

    level: int
    number: int
    #: place of each, in the order in which the factory gets them
    inputs: tuple[Position, ...]
    is_final: bool = False


Changes = Union[TaskChanges, MapItem, ReduceGroup]  # noqa: UP007  a name for the union, also at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class PullItems:
    """How many items to take from their source; answered by `ItemsPulled`. Only one such question is open at a time."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CountTokens:
    """Whose output's tokens the user's estimator is to count; answered by their number."""

    instance: str


Question = Union[PullItems, CountTokens]  # noqa: UP007  a name for the union, also at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Have a task done; exactly one completed, failed, exited or cancelled answers it."""

    instance: str
    #: None: the task as it stands in the plan
    changes: Changes | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Skip:
    """Tell the log that the task will not run, and why; no event (S-PAR-28)."""

    instance: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancel:
    """Stop a running task; its end is told all the same."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluate:
    """Ask the user's code where it lives; one `Evaluated` answers it."""

    question: Question


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Wait for a decision about a gate; one `Decided` answers it. Holds no process, thread or slot."""

    gate: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Let the outputs of these go: nothing will ask for them."""

    instances: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Warn:
    """Say this to people, as a WARN."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnLeftOut:
    """Say as a WARN that this task failed and that the others go on without it (S-MR-101, S-MR-104)."""

    instance: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WarnOversized:
    """Say as a WARN that this output alone has more tokens than the budget, and has a group of its own (S-MR-71)."""

    output: Position
    tokens: int
    #: of a group
    budget_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """Nothing runs any more and nothing will. The last instruction of a run; whatever is told later is ignored."""

    state: RunState
    exit_reason: ExitReason
    failure: FailureReason = ""


Instruction = Union[  # noqa: UP007  a name for the union, also at run time
    Start, Skip, Cancel, Evaluate, Wait, Forget, Warn, WarnLeftOut, WarnOversized, End
]
