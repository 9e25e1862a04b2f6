"""That the tasks of an ensemble are the tree of a map-reduce (S-MR-35, S-MR-38). Package: definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Levels"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """Where each task stands in the tree; the task list is in the order of levels."""

    #: what a trace calls a run of it
    workflow: str
    #: node type and level, by object id of the task
    places: Mapping[str, tuple[str, int]]
    #: texts of its items that have names in braces, by object id of the task; tasks without such items are left out
    texts: Mapping[str, Sequence[str]]
