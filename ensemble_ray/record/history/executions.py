"""The executions of one run as a tree. The states of loops, phases and graphs follow from their members.

An execution of a unit is completed when its round is announced, when the next execution begins, or when all its members
are completed. A loop ends with its predicate or cap, a graph with its route to the end, a phase with a completed attempt
that no other follows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast

from msgspec import Struct

from ensemble_ray.facts.effects import ToolIntended
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import ReviewRequested
from ensemble_ray.plan.plan import MANAGER_KEY, GraphUnit, LoopUnit, Node, PhaseUnit, Plan, Unit, members_of
from ensemble_ray.record.identity.definition import DIRECT, FINAL, position_of
from ensemble_ray.schedule.instructions import End, IterationEnded, PhaseResult, StepEnded
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.ids import delegating_call, instance_of, key_of, node_key
from ensemble_ray.values.messages import ToolCall

ExecutionKind = Literal[
    "task",
    "handler",
    "manager",
    "delegation",
    "map",
    "reduce",
    "final-reduce",
    "direct",
    "loop",
    "iteration",
    "phase",
    "attempt",
    "graph",
    "state",
]
ExecutionStatus = Literal[
    "pending", "running", "waiting", "completed", "failed", "exited", "skipped", "cancelled", "interrupted"
]
UNIT_KINDS: frozenset[ExecutionKind] = frozenset({"loop", "phase", "graph"})
ROUND_KINDS: frozenset[ExecutionKind] = frozenset({"iteration", "attempt", "state"})
_RESULTS: frozenset[ExecutionStatus] = frozenset({"completed", "failed", "exited"})
_ENDS: frozenset[ExecutionStatus] = frozenset({*_RESULTS, "skipped", "cancelled", "interrupted"})
_ERROR = 300


class RecordedExecution(Struct, kw_only=True, eq=False):
    """One execution. Times are Unix times, s."""

    id: str
    kind: ExecutionKind
    node: str | None = None  # key in the plan; None if it is in no plan
    parent: RecordedExecution | None = None  # the unit, its execution, or the delegating task that it is part of
    agent: str = ""
    number: int | None = None  # 1-based for an execution of a unit; 0-based within the level for an item or a reduce
    level: int | None = None  # in the tree of a map-reduce
    label: str = ""  # description of delegated work, or a graph's state
    status: ExecutionStatus = "pending"
    attempts: int = 0
    epoch: int | None = None
    is_announced: bool = False  # whether a change reported its start, or the end of an execution of a unit
    requested_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    error: str | None = None  # one line
    requested: tuple[ToolCall, ...] = ()
    open_calls: dict[str, ToolIntended] | None = None
    gates: dict[str, Fact[ReviewRequested]] | None = None
    children: dict[str, RecordedExecution] | None = None
    changed: int = 0
    version: int = 0

    @property
    def is_unit(self) -> bool:
        """Whether it is a loop, a phase, a graph or an execution of one, which only has members."""
        return self.kind in UNIT_KINDS or self.kind in ROUND_KINDS

    @property
    def is_ended(self) -> bool:
        """It may start again when the run is resumed."""
        return self.status in _ENDS

    @property
    def has_result(self) -> bool:
        return self.status in _RESULTS

    @property
    def task(self) -> RecordedExecution:
        found = self
        while found.kind == "delegation" and found.parent is not None:
            found = found.parent
        return found

    def touch(self, seq: int) -> None:
        self.changed = max(self.changed, seq)
        self.version += 1

    def mark_requested(self, at: float) -> None:
        if self.requested_at is None or self.status in _ENDS:
            self.requested_at = at
        self.attempts = max(1, self.attempts)
        self.started_at = at if self.started_at is None else self.started_at
        self.ended_at, self.status = None, "running"

    def dispatch(self, epoch: int) -> None:
        """Note the epoch of a fact: a higher one is another attempt."""
        if self.epoch is None:
            self.epoch = epoch
        elif epoch > self.epoch:
            self.epoch = epoch
            self.attempts += 1

    def begin(self, at: float) -> None:
        if self.started_at is None or at < self.started_at:
            self.started_at = at
        if not self.attempts:
            self.attempts = 1
        if self.status not in _ENDS or self.status in {"interrupted", "skipped"}:
            self.status, self.ended_at = "waiting" if self.gates else "running", None

    def open_call(self, name: str, intent: ToolIntended) -> None:
        if self.open_calls is None:
            self.open_calls = {}
        self.open_calls[name] = intent

    def close_call(self, name: str) -> ToolIntended | None:
        if self.open_calls is None:
            return None
        intent = self.open_calls.pop(name, None)
        if not self.open_calls:
            self.open_calls = None
        return intent

    def open_gate(self, fact: Fact[ReviewRequested]) -> None:
        if self.gates is None:
            self.gates = {}
        self.gates.setdefault(fact.name, fact)
        self.status = "waiting"

    def close_gate(self, name: str) -> Fact[ReviewRequested] | None:
        asked = None if self.gates is None else self.gates.pop(name, None)
        if not self.gates:
            self.gates = None
            if self.status not in _ENDS:
                self.status = "running"
        return asked

    def end(self, status: ExecutionStatus, at: float, error: str | None = None) -> None:
        self.status, self.ended_at, self.requested = status, at, ()
        self.error = None if error is None else str(one_line(error, _ERROR))

    def close(self, status: ExecutionStatus, at: float | None) -> None:
        """Set the status of a unit or of its execution; the time is used only if the status is an end."""
        self.status = status
        self.ended_at = at if status in _ENDS else None

    def resume(self) -> None:
        if self.status in {"cancelled", "skipped", "interrupted", "running"}:
            self.status, self.ended_at, self.error = "pending", None, None


_END_STATE = "__END__"
_UNITS: Mapping[str, tuple[ExecutionKind, ExecutionKind]] = {
    "loop": ("loop", "iteration"),
    "phase": ("phase", "attempt"),
    "graph": ("graph", "state"),
}
_LEVEL_KINDS = frozenset({"map", "reduce", "final-reduce", "direct"})


class ExecutionTree:
    """The executions of one run, in the order in which they became known.

    Attributes:
        found: By instance; units by their path without an occurrence.
        left_out: Hashes of the instances beyond the limit.
    """

    def __init__(self, limit: int | None) -> None:
        self.found: dict[str, RecordedExecution] = {}
        self.left_out: set[int] = set()
        self.nodes: Mapping[str, Node] = {}
        self.units: Mapping[str, Unit] = {}
        self.seq = 0
        self._limit = limit
        self._is_dynamic = False
        self._is_hierarchical = False
        self._levels: dict[str, int] = {}

    # Executions.

    def begin(self, plan: Plan, *, is_dynamic: bool) -> None:
        self._is_dynamic = is_dynamic
        self._is_hierarchical = plan.hierarchy is not None
        self.nodes = {node.key: node for node in plan.nodes}
        self.units = {unit.key: unit for unit in plan.units}

    def add_declared(self) -> None:
        """Add the tasks and units that are in no unit, in declared order, before any of them runs."""
        inside = {member for unit in self.units.values() for member in members_of(unit)}
        for key in self.nodes:
            if key not in inside:
                self._store(self._make(instance_of(key)))
        for key in self.units:
            if key not in inside:
                self._store(self._make(key))

    def get(self, instance: str) -> RecordedExecution:
        """Return an execution, or a unit by its path. A new one is added with all its parents."""
        found = self.found.get(instance)
        if found is not None:
            return found
        made = self._make(instance)
        if self._limit is not None and len(self.found) >= self._limit:
            self.left_out.add(hash(instance))
            return made
        path = self._parent_of(instance)
        made.parent = None if path is None else self.get(path)
        self._store(made)
        if made.parent is not None and made.parent.kind == "state":
            unit = self.units.get(node_key(made.parent.id))
            key = node_key(made.id) or made.id.rpartition("/")[2]
            states = unit.states if isinstance(unit, GraphUnit) else ()
            made.parent.label = next((state.name for state in states if state.member == key), "") or made.parent.label
        return made

    def add_group(self, instance: str, level: int) -> RecordedExecution:
        self._levels[node_key(instance)] = level
        return self.get(instance)

    def mark(self, execution: RecordedExecution) -> None:
        execution.touch(self.seq)
        parent = execution.parent
        if parent is not None:
            if not parent.is_unit:
                if parent.started_at is None and execution.started_at is not None:
                    parent.begin(execution.started_at)  # an item of several tasks
                parent.touch(execution.changed)
            elif (
                execution.status != "running"
                or parent.status != "running"
                or (execution.started_at or 0.0) < (parent.started_at or 0.0)
                or execution.id not in (parent.children or ())
            ):  # otherwise a known member runs in a unit that runs, as after most facts
                self._member_changed(parent, execution)

    def _store(self, execution: RecordedExecution) -> None:
        if self._limit is not None and len(self.found) >= self._limit:
            self.left_out.add(hash(execution.id))
            return
        self.found[execution.id] = execution
        execution.touch(max(1, self.seq))

    def _make(self, instance: str) -> RecordedExecution:
        own = instance.rpartition("/")[2]
        key, is_execution, occurrence = own.rpartition("#")
        if not is_execution:
            kind, _ = self._kinds_of(own) or _UNITS["loop"]
            return RecordedExecution(id=instance, kind=kind, node=own if own in self.units else None)
        kinds = self._kinds_of(key)
        if kinds is not None:
            number = int(occurrence) + 1 if occurrence.isdecimal() else None
            return RecordedExecution(id=instance, kind=kinds[1], number=number)
        if delegating_call(instance) is not None:
            return RecordedExecution(id=instance, kind="delegation")
        node = self.nodes.get(key)
        if node is not None:
            kind = "task" if node.agent_key is not None else "handler"
            if self._is_hierarchical and node.key == MANAGER_KEY:
                kind = "manager"
            elif node.node_type in _LEVEL_KINDS:
                kind = cast("ExecutionKind", node.node_type)
            return RecordedExecution(id=instance, kind=kind, node=node.key, agent=node.agent_role, level=node.level)
        return self._make_dynamic(instance, key) if self._is_dynamic else RecordedExecution(id=instance, kind="task")

    def _make_dynamic(self, instance: str, key: str) -> RecordedExecution:
        if key in {DIRECT, FINAL}:
            level = self._levels.get(key, 0 if key == DIRECT else None)
            return RecordedExecution(id=instance, kind=cast("ExecutionKind", key), level=level)
        position = position_of(key)
        if position is None:
            return RecordedExecution(id=instance, kind="task", level=self._levels.get(key))
        level, number = position
        return RecordedExecution(id=instance, kind="reduce" if level else "map", level=level, number=number)

    def _kinds_of(self, key: str) -> tuple[ExecutionKind, ExecutionKind] | None:
        if not self._is_dynamic and key not in self.units:
            return None
        kind, colon, _ = key.partition(":")
        return _UNITS.get(kind) if colon else None

    def _parent_of(self, instance: str) -> str | None:
        call = delegating_call(instance)
        if call is not None:
            return call.rsplit("/", 2)[0]
        path, _, own = instance.rpartition("/")
        if "#" in own and self._kinds_of(own.rpartition("#")[0]) is not None:
            return key_of(instance)
        return path or None

    # Units.

    def _member_changed(self, parent: RecordedExecution, child: RecordedExecution) -> None:
        before = (parent.status, parent.started_at, parent.ended_at, parent.attempts)
        siblings = parent.children
        if siblings is None:
            siblings = parent.children = {}
        is_new = child.id not in siblings
        siblings[child.id] = child
        if child.started_at is not None and (parent.started_at is None or child.started_at < parent.started_at):
            parent.started_at = child.started_at
        parent.attempts = parent.attempts or 1
        if parent.kind in UNIT_KINDS:
            if is_new:
                self._close_earlier(parent, child)
            if child.status != "completed":
                self._follow(parent, child)
            elif parent.kind == "phase":
                parent.close("completed", _last_end(parent) or child.ended_at)
        elif child.status != "completed":
            self._follow(parent, child)
        else:
            unit = self.units.get(node_key(parent.id))
            wanted = 1 if parent.kind == "state" else 0 if unit is None else len(members_of(unit))
            # The members are counted only once all of them are known: there may be many.
            if 0 < wanted <= len(siblings) and wanted <= len(
                {node_key(name) for name, each in siblings.items() if each.status == "completed"}
            ):
                parent.close("completed", _last_end(parent) or child.ended_at)
        if is_new or before != (parent.status, parent.started_at, parent.ended_at, parent.attempts):
            self.mark(parent)

    @staticmethod
    def _follow(parent: RecordedExecution, child: RecordedExecution) -> None:
        if child.status in {"running", "waiting", "failed", "exited"}:
            parent.close(child.status, child.ended_at)

    def _close_earlier(self, unit: RecordedExecution, child: RecordedExecution) -> None:
        """Complete the earlier executions of a unit; before a new phase, also the phases that it waited for."""
        if unit.kind == "graph":
            return
        for earlier in reversed((unit.children or {}).values()):
            if earlier is child:
                continue
            if earlier.is_ended:
                break
            earlier.close("completed", child.started_at)
            earlier.touch(child.changed)
        declared = self.units.get(unit.node or "")
        if isinstance(declared, PhaseUnit):
            path, slash, _ = unit.id.rpartition("/")
            for key in declared.after:
                if (before := self.found.get(f"{path}{slash}{key}")) is not None:
                    _close_rounds(before, "completed", child.started_at, child.changed)

    def end_round(self, what: IterationEnded | StepEnded, at: float) -> RecordedExecution:
        number = what.iteration if isinstance(what, IterationEnded) else what.step
        found = self.get(instance_of(what.unit, occurrence=number - 1))
        found.close("completed", at)
        self.mark(found)
        unit = self.units.get(what.unit.rpartition("/")[2])
        if isinstance(what, IterationEnded):
            if isinstance(unit, LoopUnit) and what.iteration == unit.max_iterations:
                self.complete(what.unit, at)
        elif what.next_state == _END_STATE:
            self.complete(what.unit, at)
        return found

    def complete(self, path: str, at: float) -> None:
        found = self.get(path)
        found.close("completed", at)
        self.mark(found)

    def end_units(self, end: End, at: float) -> None:
        failed = {each.unit: each for each in end.unit_failures}
        for result in end.units:
            unit = self.found.get(result.unit)
            if unit is None:
                continue
            status: ExecutionStatus = "completed"
            if isinstance(result, PhaseResult):
                status = result.status
            elif result.termination_reason is None:
                status = "failed" if result.unit in failed or unit.status == "failed" else "cancelled"
            _close_rounds(unit, status, at, unit.changed)
            unit.close(status, unit.ended_at or at)
            unit.error = failed[result.unit].message if result.unit in failed else unit.error
            self.mark(unit)

    def close(self, begun: ExecutionStatus, pending: ExecutionStatus, at: float) -> None:
        """`begun` is the new status of the active executions, `pending` of the others."""
        for each in self.found.values():
            if each.is_ended or each.is_unit:
                continue
            if each.status in {"running", "waiting"}:
                each.end(begun, max(at, each.started_at or at))
            elif each.status != pending:
                each.end(pending, at)
            else:
                continue
            each.touch(self.seq)
        for unit in self.found.values():
            if not unit.is_unit or unit.is_ended:
                continue
            if unit.started_at is None:
                if begun != "interrupted":
                    unit.close("skipped", at)
                    self.mark(unit)
                continue
            inside = unit.children.values() if unit.children else ()
            is_done = bool(inside) and all(each.status == "completed" for each in inside)
            unit.close("completed" if is_done and begun != "interrupted" else begun, at)
            self.mark(unit)


def _close_rounds(unit: RecordedExecution, status: ExecutionStatus, at: float | None, seq: int) -> None:
    for each in unit.children.values() if unit.children else ():
        if not each.is_ended:
            each.close(status, _last_end(each) or at)
            each.touch(seq)
    if not unit.is_ended:
        unit.close(status, _last_end(unit) or at)
        unit.touch(seq)


def _last_end(parent: RecordedExecution) -> float | None:
    inside = (each.ended_at for each in parent.children.values()) if parent.children else ()
    return max((at for at in inside if at is not None), default=None)
