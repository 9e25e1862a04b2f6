"""The rules of one map-reduce: how outputs come together, how much runs at once, what a failure means. Package: schedule."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Grouping", "MapReduceRules"]


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
    #: tasks in flight at most
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
