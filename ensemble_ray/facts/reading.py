"""Decodes stored facts of all kinds; facts of unknown kinds, from a later version, are preserved unchanged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ensemble_ray.facts.effects import (
    DelegationDecided,
    MemoryRecalled,
    MemoryStored,
    ModelAnswered,
    OutcomeDecided,
    ReflectionRecalled,
    ReflectionRecorded,
    ReflectionStored,
    SamplingAnswered,
    ToolIntended,
    ToolReturned,
)
from ensemble_ray.facts.fact import INSTANT, NUMBER, TEXT, Fact, FactData, require
from ensemble_ray.facts.runs import (
    AgentsJoined,
    DirectiveRecorded,
    DirectivesShown,
    ExitRecorded,
    FailureRecorded,
    GroupRecorded,
    ItemOutputRecorded,
    ItemsRecorded,
    LossAccepted,
    ModelSwitched,
    OutputRecorded,
    PlanRecorded,
    ReviewDecided,
    ReviewRequested,
    RunEnded,
    RunInterrupted,
    RunResumed,
    StimulusRecorded,
)

#: All kinds of facts, by their names in the record.
KINDS: Mapping[str, type[FactData]] = {
    each.KIND: each
    for each in (
        PlanRecorded, RunResumed, RunEnded, StimulusRecorded, LossAccepted, ModelAnswered, ToolIntended, ToolReturned,
        OutcomeDecided, DelegationDecided, OutputRecorded, FailureRecorded, ExitRecorded, ItemsRecorded, GroupRecorded,
        AgentsJoined, ItemOutputRecorded, MemoryRecalled, MemoryStored, ReviewRequested, ReviewDecided,
        ReflectionRecalled, ReflectionRecorded, ReflectionStored, DirectiveRecorded, DirectivesShown,
        ModelSwitched, SamplingAnswered, RunInterrupted,
    )
}  # fmt: skip
#: Kinds that describe runs as a whole: a store finds them fast, regardless of the number of facts.
KINDS_OF_RUN = frozenset(name for name, each in KINDS.items() if each.IS_OF_RUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownFact(FactData):
    """A fact of a kind that this version does not support."""

    kind_name: str
    values: Mapping[str, object]

    @property
    def kind(self) -> str:
        """The name of its kind in the record."""
        return self.kind_name

    def to_data(self) -> dict[str, object]:
        """Return the values unchanged."""
        return dict(self.values)

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Wrap the values; the caller sets the kind."""
        del at
        return cls(kind_name="", values=data)


def read_fact(
    *, run: str, kind: str, name: str, at: float, data: Mapping[str, object], epoch: int = 0, seq: int = 0
) -> Fact:
    """Decode a fact from its stored values.

    Raises:
        ValueError: a value is invalid; the text names it and the required value.
    """
    require("kind", kind, TEXT)
    require("name", name, TEXT)
    require("at", at, INSTANT)
    require("epoch", epoch, NUMBER)
    found = KINDS.get(kind)
    read = UnknownFact(kind_name=kind, values=data) if found is None else found.from_data(data, at)
    return Fact(run=run, name=name, at=at, data=read, epoch=epoch, seq=seq)
