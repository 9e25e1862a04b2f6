"""What a run records whose tasks are made while it runs: items, groups, who takes part. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, cast

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import FactData, Key
from ensemble_ray.facts.shapes import ANY, FLAG, NUMBER, OBJECT, TEXT, list_of
from ensemble_ray.values.trace import AgentSummary


def _is_true(value: object) -> bool:
    return value is True


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemsRecorded(FactData):
    """Items were pulled from the source; on record before their maps start (S-MR-162)."""

    KIND: ClassVar = "items"
    IS_OF_RUN: ClassVar = True
    KEYS: ClassVar = {
        "first": Key(NUMBER, is_optional=True),
        "indices": Key(list_of(NUMBER), is_optional=True),
        "digests": Key(list_of(TEXT), ()),
        "are_all": Key(ANY, default=False, is_optional=True, read=_is_true),
    }

    #: index of the first one, where they follow each other
    first: int | None = None
    #: indices of all, where they do not
    indices: Sequence[int] | None = None
    #: what `item_digest` gave of each
    digests: Sequence[str]
    #: whether the source had no more than those so far
    are_all: bool = False

    @classmethod
    def of(cls, indices: Sequence[int], digests: Sequence[str], *, are_all: bool = False) -> Self:
        """Return the fact of items with these indices, in this order."""
        first = indices[0] if indices else 0
        if all(index == position for position, index in enumerate(indices, start=first)):
            return cls(first=first, digests=list(digests), are_all=are_all)
        return cls(indices=list(indices), digests=list(digests), are_all=are_all)

    def places(self) -> Sequence[int]:
        """Return the index of each item.

        Raises:
            RecordError: they are not as many as their hashes.
        """
        first = -1 if self.first is None else self.first
        found = range(first, first + len(self.digests)) if self.indices is None else self.indices
        if len(found) != len(self.digests) or any(index < 0 for index in found):
            raise RecordError("The record is damaged: a fact of items names others than it has hashes of")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRecorded(FactData):
    """Outputs come together; on record before the reduce starts (S-MR-161)."""

    KIND: ClassVar = "group"
    KEYS: ClassVar = {
        "level": Key(NUMBER, -1),
        "number": Key(NUMBER, -1),
        "inputs": Key(list_of(TEXT), ()),
        "is_final": Key(FLAG, default=False),
    }

    #: of the reduce, the final one too
    level: int
    #: of the reduce on that level
    number: int
    #: keys of what it reduces, in the order in which its factory gets them
    inputs: Sequence[str]
    is_final: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemOutputRecorded(FactData):
    """An item that is more than one task has its output, which is that of tasks that are on record (S-MR-193)."""

    KIND: ClassVar = "item_output"
    KEYS: ClassVar = {"outputs": Key(list_of(TEXT), ())}

    #: instances of those tasks; the outputs of several arrive as one, as the iterations of a loop do
    outputs: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsJoined(FactData):
    """Agents are about to take part for the first time."""

    KIND: ClassVar = "agents"
    KEYS: ClassVar = {"agents": Key(list_of(OBJECT), ())}

    #: data of `AgentSummary`
    agents: Sequence[Mapping[str, object]]

    @classmethod
    def of(cls, agents: Iterable[AgentSummary]) -> Self:
        """Return the fact of these agents."""
        return cls(agents=[agent.model_dump(mode="json") for agent in agents])

    def summaries(self) -> list[AgentSummary]:
        """Return who they are.

        Raises:
            RecordError: it does not tell.
        """
        try:
            return [AgentSummary(**cast("dict[str, Any]", each)) for each in self.agents]
        except (TypeError, ValueError) as error:
            raise RecordError(f"The record is damaged: {self.to_data()} tells of no agents") from error
