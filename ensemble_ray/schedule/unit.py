"""What every machine of a unit is: the port that the nesting source asks. Contracts only.

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

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, Union, assert_never

from ensemble_ray.plan.plan import Plan, Unit
from ensemble_ray.schedule.instructions import ContextPart, Instruction, TaskChanges, UnitResult
from ensemble_ray.schedule.stimuli import UnitFact
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.outputs import ExitReason

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import LoopUnit


#: What one entry of a context gives.
Parts = tuple[ContextPart, ...]
_NOTHING: Mapping[str, Parts] = MappingProxyType({})


def scope_of(instance: str) -> str:
    """Return the scope that an instance runs in.

    Examples:
        >>> scope_of("loop:refine#2/writer#0")
        'loop:refine#2'
    """
    return instance.rpartition("/")[0]


def scope_keys(context: Sequence[str], tasks: Sequence[str]) -> Iterator[str]:
    """Return under which keys the entries of a context are looked up.

    Args:
        context: Keys of tasks and units.
        tasks: In the place of each entry the body task that alone is meant, or ""; empty: there is none.

    Examples:
        >>> list(scope_keys(["notes", "loop:refine"], ["", "writer"]))
        ['notes', 'loop:refine/writer']
    """
    return (body_of(key, task) if task else key for key, task in zip_longest(context, tasks, fillvalue=""))


def body_of(unit: str, task: str) -> str:
    """Return the key under which a scope has what a body task of a loop gave in the last iteration."""
    return f"{unit}/{task}"


class Scopes:
    """The outputs of a run by scope and key."""

    def __init__(self) -> None:
        self._scopes: dict[str, dict[str, Parts]] = {}
        self._outer: dict[str, tuple[str, ...]] = {}

    def put(self, scope: str, key: str, parts: Parts) -> None:
        """Let a key stand for these outputs in a scope, the newest last."""
        outputs = self._scopes.setdefault(scope, {})
        outputs.pop(key, None)
        outputs[key] = parts

    def withdraw(self, scope: str, key: str) -> None:
        """Let a key stand for nothing in a scope any more."""
        self._scopes.get(scope, {}).pop(key, None)

    def enclose(self, scope: str, outer: Sequence[str]) -> None:
        """Look from this scope into these next, in order, and nowhere else; not where they look, nor where its path says.

        So a phase sees the attempts that were accepted when it started (S-PHASE-36).
        """
        self._outer[scope] = tuple(outer)

    def drop(self, scope: str) -> None:
        """Forget a scope that nothing looks into any more."""
        self._scopes.pop(scope, None)
        self._outer.pop(scope, None)

    def own(self, scope: str) -> Mapping[str, Parts]:
        """Return what completed in a scope itself, by key, in the order of completion."""
        return self._scopes.get(scope, _NOTHING)

    def find(self, scope: str, key: str) -> Parts | None:
        """Return what an entry of a context gives in a scope; None where it has no output yet."""
        while True:
            if (parts := self.own(scope).get(key)) is not None:
                return parts
            if scope in self._outer:
                found = (self.own(outer).get(key) for outer in self._outer[scope])
                return next((parts for parts in found if parts is not None), None)
            if not scope:
                return None
            scope = _outwards(scope)

    def last_output(self, instance: str) -> str:
        """Return the instance of the last output of a task or a unit that completed; "" where it gave none."""
        parts = self.own(scope_of(instance)).get(node_key(instance), ())
        return parts[-1].instances[-1] if parts and parts[-1].instances else ""

    def __len__(self) -> int:
        """Return how many scopes are kept."""
        return len(self._scopes)


def _outwards(scope: str) -> str:
    """Return the next scope: of `a#0/b#1` it is `a#0/b`, and of that `a#0`."""
    before, _, last = scope.rpartition("/")
    key, mark, _ = last.rpartition("#")
    if not mark:
        return before
    return f"{before}/{key}" if before else key


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


def list_shown(unit: LoopUnit, iterations: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the instances of each output that a loop shows, in body order; those of several are joined to one.

    Args:
        unit: The loop.
        iterations: Per iteration what completed; the last one may be unfinished (S-LOOP-112).
    """
    # A review may end an iteration before its first task gave anything: then the one before it is the last.
    last = next((each for each in reversed(iterations) if each), ())
    match unit.output_mode:
        case "last_iteration":
            return [(name,) for name in last]
        case "final_task_only":
            return _of_task(unit.body[-1], [last])
        case "all_iterations":
            given = (tuple(name for (name,) in _of_task(key, iterations)) for key in unit.body)
            return [names for names in given if names]
        case _:
            assert_never(unit.output_mode)


def _of_task(key: str, iterations: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    return [(name,) for names in iterations for name in names if node_key(name) == key]
