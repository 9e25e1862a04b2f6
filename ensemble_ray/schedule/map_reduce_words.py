"""The words of the map-reduce machine: its rules, the facts it is told and what it wants done. Room: schedule.

A work is a map or a reduce, named by its level and its number. Level 0 is the maps; the number of a map is the place
of its item in the source, counted from 0 as items are pulled. Reduces are numbered from 0 on each level, in the order
in which their groups are made. No word carries an item, an output or a key: who carries the words out knows those.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Union

from ensemble_ray.values.outputs import ExitReason, RunState

__all__ = [
    "Begun",
    "CancelRequested",
    "EndFed",
    "Failure",
    "FedInstruction",
    "FedStimulus",
    "Grouping",
    "ItemRefused",
    "ItemsPulled",
    "MapReduceRules",
    "PullItems",
    "SourceFailed",
    "StartMap",
    "StartReduce",
    "StopWork",
    "Tell",
    "TellLeftOut",
    "TellOversized",
    "WorkCancelled",
    "WorkCompleted",
    "WorkExited",
    "WorkFailed",
]

#: Why a run failed. first: a work failed whose failure ends the run; all_maps: no map completed; level: no output is
#: left, or the final reduce failed; source: the source raised; empty: the source had no items.
Failure = Literal["", "first", "all_maps", "level", "source", "empty"]


class Grouping(StrEnum):
    """How outputs come together."""

    #: as many as weigh no more than a budget of tokens
    BUDGET = "budget"
    #: so many
    CHUNK = "chunk"
    #: not at all: maps only
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MapReduceRules:
    """What the machine goes by.

    Raises:
        ValueError: the rules contradict each other, or would let a run go on for ever.
    """

    grouping: Grouping
    #: of a group: tokens (BUDGET) or outputs (CHUNK)
    capacity: int = 0
    #: reduce levels below the final one (BUDGET); None: no cap
    max_levels: int | None = None
    is_pipelined: bool = False
    #: pipelined only: groups follow the order of the items
    is_ordered: bool = False
    #: works in flight at most
    window: int
    #: the first failed map ends the run; else it is left out
    fails_on_item: bool
    #: the first failed reduce ends the run; else it is left out
    fails_on_reduce: bool

    def __post_init__(self) -> None:
        """Refuse what cannot end."""
        if self.window < 1:
            raise ValueError(f"window must be >= 1, got: {self.window}")
        if self.is_ordered and not self.is_pipelined:
            raise ValueError("is_ordered needs is_pipelined")
        if self.grouping is Grouping.CHUNK and self.capacity < 2:  # noqa: PLR2004  groups of one never become fewer
            raise ValueError(f"capacity of a chunk must be >= 2, got: {self.capacity}")
        if self.grouping is Grouping.BUDGET and (self.capacity < 1 or self.max_levels is None or self.max_levels < 1):
            raise ValueError(
                f"a budget needs capacity >= 1 and max_levels >= 1, got: {self.capacity} and {self.max_levels}"
            )


# What the machine is told.


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """The run begins."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsPulled:
    """The answer to `PullItems`: the next items are there, perhaps fewer than asked for."""

    at: float
    #: refused ones included, each of which an `ItemRefused` names in the same call
    count: int
    #: the source has no more
    is_exhausted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRefused:
    """An item that no map can be made of (S-MR-125): it counts as a failed map."""

    at: float
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFailed:
    """The source raised; it gives nothing more (S-MR-123)."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCompleted:
    """A map or reduce has its output."""

    at: float
    level: int
    number: int
    #: the estimate of S-MR-60, >= 0; of no consequence with CHUNK and NONE
    weight_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkFailed:
    """A map or reduce failed for good."""

    at: float
    level: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkExited:
    """A map or reduce asked to end the run early (S-PAR-30), or its budget is spent (S-BUD-4)."""

    at: float
    level: int
    number: int
    reason: ExitReason


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkCancelled:
    """A map or reduce was stopped."""

    at: float
    level: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Somebody wants the run to end now."""

    at: float


FedStimulus = Union[  # noqa: UP007  a name for the union, also at run time
    Begun,
    ItemsPulled,
    ItemRefused,
    SourceFailed,
    WorkCompleted,
    WorkFailed,
    WorkExited,
    WorkCancelled,
    CancelRequested,
]


# What the machine wants done.


@dataclass(frozen=True, slots=True, kw_only=True)
class PullItems:
    """Get so many items from the source; one `ItemsPulled` or `SourceFailed` answers it. Only one is open at a time."""

    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartMap:
    """Call the map factory for that item and hand its task to a house."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReduce:
    """Call the reduce factory for those outputs and hand its task to a house."""

    level: int
    number: int
    #: level and number of each, in the order in which the factory gets them
    inputs: tuple[tuple[int, int], ...]
    is_final: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWork:
    """Stop a running map or reduce; its end is told all the same."""

    level: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Say this to people, as a WARN."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TellLeftOut:
    """Say as a WARN that this work failed and that the others go on without it (S-MR-101, S-MR-104)."""

    level: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TellOversized:
    """Say as a WARN that this output alone weighs more than the budget, and has a group of its own (S-MR-71)."""

    level: int
    number: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndFed:
    """Nothing runs any more and nothing will. The last instruction of a run; whatever is told later is ignored."""

    state: RunState
    exit_reason: ExitReason
    failure: Failure = ""


FedInstruction = Union[  # noqa: UP007  a name for the union, also at run time
    PullItems, StartMap, StartReduce, StopWork, Tell, TellLeftOut, TellOversized, EndFed
]
