"""What every machine of a unit is: the port that the nesting source asks. Package: schedule. Contracts only.

A machine schedules members: tasks or units, by instance. It knows nothing of what is inside of them. Rules:
1. It wants a member done with `Start`, and is told its end by exactly one of `Completed`, `Failed`, `Exited` and
   `Cancelled`, a unit's like a task's. The instances it starts lie below its own path, and none is started twice.
2. What it wants first in a task's context, it gives with the `Start`; the context of the plan's node follows, looked up in
   the `Scopes`. The output of a member that completed is in the scope of the member's parent path before the machine hears
   of it. `Start.changes` of a unit go to its machine; `prior` is then an earlier execution of the same unit.
3. It asks with `Evaluate` and is told the answer with `Evaluated`. Everything else that it may want: `Skip`, `Cancel` of a
   member, `Announce`, `Inform`, `Warn`, `Forget`.
4. It ends once, with `End` as its last instruction: completed, failed, exited (the exit reason of what asked for that) or
   cancelled. Its result is in `End.units`, and in `End.unit_failures` why it failed where no member did.
5. `CancelRequested`: it cancels what runs, and ends when nothing runs. `StopRequested`: the run is ending around it; it
   starts nothing more, lets what runs end, and ends then.
6. When it starts nothing more because a member failed or exited, it `is_stopping`: the nesting source then asks the units
   below it to stop, and takes back what still waits for a slot, as cancelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Union

from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.units import Unit
from ensemble_ray.schedule.instructions import Instruction, TaskChanges
from ensemble_ray.schedule.results import UnitResult
from ensemble_ray.schedule.scopes import Parts, Scopes
from ensemble_ray.schedule.stimuli import UnitFact
from ensemble_ray.values.outputs import ExitReason

__all__ = ["Execution", "HistoryEntry", "Member", "StopRequested", "UnitMachine", "UnitMember", "UnitStimulus"]


class Member(Protocol):
    """A task or a unit, as the machine above it knows it; nodes and loops of a plan are that."""

    @property
    def key(self) -> str:
        """Return its key."""
        ...

    @property
    def context(self) -> tuple[str, ...]:
        """Return the keys of what it waits for; those that are no members of the same machine do not count."""
        ...


class UnitMember(NamedTuple):
    """A unit that is a member without being one by its own fields, such as a graph."""

    key: str
    context: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The run is ending around a unit. Only between machines; never recorded, since it follows from what is."""

    at: float
    #: why; None: something failed
    exit_reason: ExitReason | None = None


UnitStimulus = Union[UnitFact, StopRequested]  # noqa: UP007  a name for the union, also at run time


class HistoryEntry(NamedTuple):
    """An iteration or a step, as predicates and conditions are shown it."""

    #: body names of an iteration, or the one name of a state
    names: tuple[str, ...]
    #: of their outputs, in the same order
    instances: tuple[str, ...]
    #: whether these are the one output of a state, as the iterations of a loop may be (S-GRAPH-120)
    is_joined: bool = False


class UnitMachine(Protocol):
    """The machine of a unit, or of the whole run."""

    def handle(self, *stimuli: UnitStimulus) -> list[Instruction]:
        """Take facts, give what is to be done now, in order."""
        ...

    @property
    def is_stopping(self) -> bool:
        """Whether it starts nothing more, though it has not ended."""
        ...

    @property
    def history(self) -> Sequence[HistoryEntry]:
        """Return what its predicates are shown, oldest first; it only grows. Empty where it asks none."""
        ...

    def results(self) -> Sequence[UnitResult]:
        """Return what became of its unit so far, and of a run's phases; empty before it begins, and for a plain workflow."""
        ...

    def projection(self) -> Parts:
        """Return what a context entry that names the unit gives, once it completed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One execution of a unit: what its machine is made of."""

    #: as the machine above started it: `loop:refine#0`, `phase:draft#1`, `graph:triage#3/loop:refine#0`; "": the run itself
    instance: str
    plan: Plan
    #: of the whole plan, by key
    units: Mapping[str, Unit]
    #: tasks and units of the whole plan, by key
    members: Mapping[str, Member]
    scopes: Scopes
    #: what the machine above wants changed; `prior` is an earlier execution of the same unit
    changes: TaskChanges | None = None
