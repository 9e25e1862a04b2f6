"""The port of a unit's machine, and the scopes in which tasks find their context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple, Protocol, Union, assert_never

from ensemble_ray.plan.plan import LoopUnit, Plan, Unit
from ensemble_ray.schedule.instructions import ContextPart, Instruction, TaskChanges, UnitResult
from ensemble_ray.schedule.stimuli import UnitFact
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.outputs import ExitReason

#: The outputs of one context entry.
Parts = tuple[ContextPart, ...]
_NO_OUTPUTS: Mapping[str, Parts] = MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The run around a unit is ending. Machines send it to each other; it is not recorded, since it follows from the record."""

    at: float
    #: None: a task or a unit failed
    exit_reason: ExitReason | None = None


UnitStimulus = Union[UnitFact, StopRequested]  # noqa: UP007  a name for the union, also at run time


class HistoryEntry(NamedTuple):
    """An iteration or a step, as predicates and conditions see it."""

    #: body names of an iteration, or the one name of a state
    names: tuple[str, ...]
    #: of their outputs, in the same order
    instances: tuple[str, ...]
    #: whether the instances form one output, as the iterations of a loop may (S-GRAPH-120)
    is_joined: bool = False


class UnitMachine(Protocol):
    """The machine of a unit, or of the whole run. It schedules its members, which are tasks or units.

    1. `Start` runs a member; exactly one `Completed`, `Failed`, `Exited` or `Cancelled` reports its end. Instances are
       below the machine's own path, and no instance starts twice.
    2. `Start.context` comes first in a task's context; the nested source appends the context of the plan's node. It puts
       an output into the scope of the parent path before the machine receives `Completed`. `Start.changes` of a unit
       go to the unit's machine; `prior` is then an earlier execution of the unit.
    3. `Evaluate` asks a question; `Evaluated` answers it. The machine may also return `Skip`, `Cancel` of a member,
       `Announce`, `Inform` and `Warn`.
    4. The last instruction is one `End`: completed, failed, exited or cancelled. `End.units` holds the result, and
       `End.unit_failures` the failures that no member caused.
    5. After `CancelRequested` the machine cancels the running members and ends when all have ended. After `StopRequested`
       it starts no more members and ends when the running ones have ended.
    6. `is_stopping` is true once it starts no more members because one failed or exited. The nested source then stops the
       units below and cancels the members that wait for a slot.
    """

    def handle(self, *stimuli: UnitStimulus) -> list[Instruction]: ...

    @property
    def is_stopping(self) -> bool:
        """Whether it starts no more members, although it has not ended."""
        ...

    @property
    def history(self) -> Sequence[HistoryEntry]:
        """The history that predicates see, oldest first; it only grows. Empty without predicates."""
        ...

    def results(self) -> Sequence[UnitResult]:
        """Return the results of its unit or phases so far; empty before it begins, and for a plain workflow."""
        ...

    def projection(self) -> Parts:
        """Return the outputs of the completed unit for a context entry."""
        ...


class Member(Protocol):
    """A task or a unit, as its machine sees it; a node and a loop of a plan match."""

    @property
    def key(self) -> str: ...

    @property
    def context(self) -> tuple[str, ...]:
        """Keys that it waits for; a machine ignores keys of other machines' members."""
        ...


class UnitMember(NamedTuple):
    """A phase or a graph as a member."""

    key: str
    context: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """One execution of a unit: the arguments of its machine."""

    #: `loop:refine#0`, `phase:draft#1`, `graph:triage#3/loop:refine#0`; "": the run itself
    instance: str
    plan: Plan
    #: of the whole plan, by key
    units: Mapping[str, Unit]
    #: tasks and units of the whole plan, by key
    members: Mapping[str, Member]
    scopes: Scopes
    #: from the machine above; `prior` is an earlier execution of the same unit
    changes: TaskChanges | None = None


class Scopes:
    """The outputs of a run by scope and key."""

    def __init__(self) -> None:
        self._scopes: dict[str, dict[str, Parts]] = {}
        self._outer: dict[str, tuple[str, ...]] = {}

    def put(self, scope: str, key: str, parts: Parts) -> None:
        """Store the outputs of a key in a scope; the newest key is last."""
        outputs = self._scopes.setdefault(scope, {})
        outputs.pop(key, None)
        outputs[key] = parts

    def withdraw(self, scope: str, key: str) -> None:
        self._scopes.get(scope, {}).pop(key, None)

    def enclose(self, scope: str, outer: Sequence[str]) -> None:
        """After the scope itself, search only these scopes: a phase sees the attempts that were accepted when it started (S-PHASE-36)."""
        self._outer[scope] = tuple(outer)

    def drop(self, scope: str) -> None:
        self._scopes.pop(scope, None)
        self._outer.pop(scope, None)

    def own(self, scope: str) -> Mapping[str, Parts]:
        """Return the outputs of a scope itself by key, in the order of completion."""
        return self._scopes.get(scope, _NO_OUTPUTS)

    def find(self, scope: str, key: str) -> Parts | None:
        """Return the outputs of a context entry, from this scope outwards; None if it has no output yet."""
        while True:
            if (parts := self.own(scope).get(key)) is not None:
                return parts
            if scope in self._outer:
                found = (self.own(outer).get(key) for outer in self._outer[scope])
                return next((parts for parts in found if parts is not None), None)
            if not scope:
                return None
            # The next scope of `a#0/b#1` is `a#0/b`, and then `a#0`.
            before, _, last = scope.rpartition("/")
            name, mark, _ = last.rpartition("#")
            scope = f"{before}/{name}" if mark and before else name if mark else before

    def last_output(self, instance: str) -> str:
        """Return the instance of the last output of a completed task or unit; "" without an output."""
        parts = self.own(scope_of(instance)).get(node_key(instance), ())
        return parts[-1].instances[-1] if parts and parts[-1].instances else ""

    def __len__(self) -> int:
        return len(self._scopes)


def scope_of(instance: str) -> str:
    """Return the scope that an instance runs in: `loop:refine#2` for `loop:refine#2/writer#0`."""
    return instance.rpartition("/")[0]


def scope_keys(context: Sequence[str], tasks: Sequence[str]) -> Iterator[str]:
    """Return the keys of context entries in a scope; `tasks` names the one body task to read of each entry, or "".

    Examples:
        >>> list(scope_keys(["notes", "loop:refine"], ["", "writer"]))
        ['notes', 'loop:refine/writer']
    """
    return (body_of(key, task) if task else key for key, task in zip_longest(context, tasks, fillvalue=""))


def body_of(unit: str, task: str) -> str:
    """Return the key of a body task's last output in the scope around its loop."""
    return f"{unit}/{task}"


def list_shown(unit: LoopUnit, iterations: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """Return the instances of each output that a loop shows, in body order; several instances form one joined output.

    `iterations` are the completed instances per iteration; the last one may be unfinished (S-LOOP-112).
    """
    # A review may end an iteration before its first output: then the iteration before it is the last.
    last = next((each for each in reversed(iterations) if each), ())
    match unit.output_mode:
        case "last_iteration":
            return [(name,) for name in last]
        case "final_task_only":
            return [(name,) for name in _of_task(unit.body[-1], [last])]
        case "all_iterations":
            outputs = (tuple(_of_task(key, iterations)) for key in unit.body)
            return [names for names in outputs if names]
        case _:
            assert_never(unit.output_mode)


def _of_task(key: str, iterations: Iterable[Sequence[str]]) -> Iterator[str]:
    return (name for names in iterations for name in names if node_key(name) == key)
