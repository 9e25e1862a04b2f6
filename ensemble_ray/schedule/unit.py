"""The port of a unit's machine, and the scopes in which tasks find their context."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from types import MappingProxyType
from typing import NamedTuple, Protocol, Union, assert_never

from msgspec import Struct

from ensemble_ray.plan.plan import LoopUnit, Plan, Unit
from ensemble_ray.schedule.instructions import ContextPart, Instruction, TaskChanges, UnitResult
from ensemble_ray.schedule.stimuli import UnitFact
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.outputs import ExitReason

#: The outputs of one context entry.
Parts = tuple[ContextPart, ...]
_NO_OUTPUTS: Mapping[str, Parts] = MappingProxyType({})


class StopRequested(Struct, frozen=True, kw_only=True):
    """The run around a unit is ending. Machines send it to each other; it is not recorded."""

    at: float
    exit_reason: ExitReason | None = None


UnitStimulus = Union[UnitFact, StopRequested]  # noqa: UP007  a name for the union, also at run time


class HistoryEntry(NamedTuple):
    """An iteration or a step, as predicates and conditions see it."""

    names: tuple[str, ...]
    instances: tuple[str, ...]
    #: whether the instances form one output (S-GRAPH-120)
    is_joined: bool = False


class UnitMachine(Protocol):
    """The machine of a unit, or of the whole run. Its members are tasks or units.

    1. Exactly one `Completed`, `Failed`, `Exited` or `Cancelled` answers a `Start`. No instance starts twice.
    2. `Start.context` comes first in a task's context; the nested source appends the context of the plan's node. It stores
       an output before the machine receives `Completed`. `Start.changes` of a unit go to the unit's machine.
    3. The last instruction is one `End`.
    4. After `CancelRequested` the machine cancels the running members. After `StopRequested` it starts no more members.
    5. Once `is_stopping` is true, the nested source stops the units below and cancels members that wait for a slot.
    """

    def handle(self, *stimuli: UnitStimulus) -> list[Instruction]: ...

    @property
    def is_stopping(self) -> bool: ...

    @property
    def history(self) -> Sequence[HistoryEntry]:
        """What predicates see, oldest first; it only grows."""
        ...

    def results(self) -> Sequence[UnitResult]: ...

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
    key: str
    context: tuple[str, ...] = ()


class Execution(Struct, frozen=True, kw_only=True):
    """The arguments of a unit's machine."""

    #: such as `graph:triage#3/loop:refine#0`; "": the run itself
    instance: str
    plan: Plan
    units: Mapping[str, Unit]
    members: Mapping[str, Member]
    scopes: Scopes
    #: `prior` is an earlier execution of the same unit
    changes: TaskChanges | None = None


class Scopes:
    def __init__(self) -> None:
        self._scopes: dict[str, dict[str, Parts]] = {}
        self._outer: dict[str, tuple[str, ...]] = {}

    def put(self, scope: str, key: str, parts: Parts) -> None:
        """Store the outputs of a key; the newest key is last."""
        outputs = self._scopes.setdefault(scope, {})
        outputs.pop(key, None)
        outputs[key] = parts

    def withdraw(self, scope: str, key: str) -> None:
        self._scopes.get(scope, {}).pop(key, None)

    def enclose(self, scope: str, outer: Sequence[str]) -> None:
        """After the scope itself, search only these: the attempts that were accepted when a phase started (S-PHASE-36)."""
        self._outer[scope] = tuple(outer)

    def drop(self, scope: str) -> None:
        self._scopes.pop(scope, None)
        self._outer.pop(scope, None)

    def own(self, scope: str) -> Mapping[str, Parts]:
        """Return the outputs of the scope itself, in the order of completion."""
        return self._scopes.get(scope, _NO_OUTPUTS)

    def find(self, scope: str, key: str) -> Parts | None:
        """Return the outputs of a context entry, from this scope outwards."""
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
        """Return the instance of the last output of a task or unit; "" without an output."""
        parts = self.own(scope_of(instance)).get(node_key(instance), ())
        return parts[-1].instances[-1] if parts and parts[-1].instances else ""

    def __len__(self) -> int:
        return len(self._scopes)


def scope_of(instance: str) -> str:
    """Return `loop:refine#2` for `loop:refine#2/writer#0`."""
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
    """Return the instances of each output that a loop shows, in body order; several instances form one joined output."""
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
