"""The kinds of facts by name, and the decoder of all of them. Pure.

In: a fact as a store keeps it. Out: the fact. Kinds that are not known are passed on as they are: a later version may have
written them.
"""

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
#: Those that are only told of runs as a whole: a store finds them however many facts a run has.
KINDS_OF_RUN = frozenset(name for name, each in KINDS.items() if each.IS_OF_RUN)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownFact(FactData):
    """Something happened of which this version knows nothing."""

    kind_name: str
    values: Mapping[str, object]

    @property
    def kind(self) -> str:
        """The name of its kind in the record."""
        return self.kind_name

    def to_data(self) -> dict[str, object]:
        """Return it as it is recorded."""
        return dict(self.values)

    @classmethod
    def from_data(cls, data: Mapping[str, object], at: float) -> Self:
        """Return what is recorded; see `FactData`."""
        del at
        return cls(kind_name="", values=data)


def read_fact(
    *, run: str, kind: str, name: str, at: float, data: Mapping[str, object], epoch: int = 0, seq: int = 0
) -> Fact:
    """Return a recorded fact; the arguments are what a store keeps of it.

    Raises:
        ValueError: something of it is not what it is in every record; says what, and what it should be.
    """
    require("kind", kind, TEXT)
    require("name", name, TEXT)
    require("at", at, INSTANT)
    require("epoch", epoch, NUMBER)
    found = KINDS.get(kind)
    read = UnknownFact(kind_name=kind, values=data) if found is None else found.from_data(data, at)
    return Fact(run=run, name=name, at=at, data=read, epoch=epoch, seq=seq)
