"""What the instances of a run are called, what they are part of, and what they are. Package: studio. Pure.

In: a recorded plan, and instances such as `loop:refine#2/writer#0`. Out: their steps without anything that happened.
A unit has a step by its path without an occurrence, and each of its executions one by its path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, cast

from ensemble_ray.facts.lenient import as_mapping, as_sequence, as_text
from ensemble_ray.plan.plan import MANAGER_KEY
from ensemble_ray.record.identity.map_reduce import DIRECT, FINAL, position_of
from ensemble_ray.studio.views.step_state import StepState, title_of
from ensemble_ray.values.ids import delegating_call, instance_of, key_of, node_key

if TYPE_CHECKING:
    from ensemble_ray.studio.schemas.steps import StepKind

__all__ = ["StepNames"]

#: What units and their executions are, by the beginning of their keys.
_UNITS: Mapping[str, tuple[StepKind, StepKind]] = {
    "loop": ("loop", "iteration"),
    "phase": ("phase", "attempt"),
    "graph": ("graph", "state"),
}
_ROUND: Mapping[str, str] = {"iteration": "Iteration", "attempt": "Attempt", "state": "Step"}
_LEVEL_KINDS = frozenset({"map", "reduce", "final-reduce", "direct"})


class StepNames:
    """Names of the steps of one run.

    Attributes:
        nodes: The plan's tasks by key, as they are recorded.
        units: Its loops, phases and graphs by key.
        is_dynamic: Whether its tasks are made while it goes on.
        is_hierarchical: Whether a manager leads it.
    """

    def __init__(self, plan: Mapping[str, object], *, is_dynamic: bool) -> None:
        self.is_dynamic = is_dynamic
        self.is_hierarchical = bool(plan.get("hierarchy"))
        nodes = [] if is_dynamic else [*map(as_mapping, as_sequence(plan.get("nodes")))]
        units = [] if is_dynamic else [*map(as_mapping, as_sequence(plan.get("units")))]
        self.nodes = {as_text(node.get("key")): node for node in nodes}
        self.units = {as_text(unit.get("key")): unit for unit in units}
        agents = map(as_mapping, as_sequence(plan.get("agents")))
        self.roles = {as_text(agent.get("key")): as_text(agent.get("role")) for agent in agents}
        #: levels of groups of a dynamic run, by key
        self.levels: dict[str, int] = {}

    def list_declared(self) -> Iterator[StepState]:
        """Yield the steps that are known before anything runs: tasks and units that are in no unit, in declared order."""
        inside = {member for unit in self.units.values() for member in self.members_of(unit)}
        for key in self.nodes:
            if key not in inside:
                yield self.task(instance_of(key))
        for key, unit in self.units.items():
            if key not in inside:
                yield self.unit(key, as_text(unit.get("name")))

    @staticmethod
    def members_of(unit: Mapping[str, object]) -> list[str]:
        """Return the keys of what runs inside a recorded unit."""
        states = [as_text(as_mapping(state).get("member")) for state in as_sequence(unit.get("states"))]
        review = as_text(unit.get("review"))
        named = [*as_sequence(unit.get("body")), *as_sequence(unit.get("members"))]
        return [*map(str, named), *states, *([review] if review else [])]

    def chain(self, instance: str) -> Iterator[StepState]:
        """Yield the steps that an instance is part of, outermost first; the instance itself is not among them."""
        parent = self.parent_of(instance)
        if parent is None:
            return
        yield from self.chain(parent)
        yield self.of(parent)

    def of(self, step: str) -> StepState:
        """Return the step of a name."""
        if "#" not in step.rpartition("/")[2]:
            return self.unit(step, as_text(self.units.get(step.rpartition("/")[2], {}).get("name")))
        if self._kinds_of(node_key(step)) is not None:
            return self._execution(step)
        return self.task(step)

    def parent_of(self, step: str) -> str | None:
        """Return the step that one is part of; None: the run alone."""
        call = delegating_call(step)
        if call is not None:
            return call.rsplit("/", 2)[0]
        own = step.rpartition("/")[2]
        if "#" in own and self._kinds_of(own.rpartition("#")[0]) is not None:
            return key_of(step)
        return step.rpartition("/")[0] or None

    def task(self, instance: str) -> StepState:
        """Return the step of a task."""
        key = node_key(instance)
        node = self.nodes.get(key, {})
        position = position_of(key) if self.is_dynamic else None
        level = node.get("level") if isinstance(node.get("level"), int) else None
        if position is not None:
            level = position[0]
        elif self.is_dynamic and key in self.levels:
            level = self.levels[key]
        elif self.is_dynamic and key == DIRECT:
            level = 0
        return StepState(
            id=instance,
            kind=self._kind_of(key, node),
            title=title_of(as_text(node.get("description"))) or key,
            agent=as_text(node.get("agent_role")),
            node=key if key in self.nodes else None,
            parent=self.parent_of(instance),
            number=None if position is None else position[1],
            level=cast("int | None", level),
        )

    def unit(self, path: str, name: str) -> StepState:
        """Return the step of a loop, a phase or a graph."""
        key = path.rpartition("/")[2]
        kinds = self._kinds_of(key) or ("loop", "iteration")
        return StepState(
            id=path,
            kind=kinds[0],
            title=title_of(name) or key,
            node=key if key in self.units else None,
            parent=self.parent_of(path),
        )

    def state_name(self, step: str) -> str:
        """Return the name of the graph's state that a task or a loop is; empty: of none."""
        parent = self.parent_of(step)
        if parent is None:
            return ""
        states = self.units.get(node_key(parent), {}).get("states")
        key = node_key(step) if "#" in step.rpartition("/")[2] else step.rpartition("/")[2]
        found = (each for each in map(as_mapping, as_sequence(states)) if each.get("member") == key)
        return as_text(next(found, {}).get("name"))

    def _execution(self, path: str) -> StepState:
        kind = (self._kinds_of(node_key(path)) or ("loop", "iteration"))[1]
        number = int(path.rpartition("#")[2]) + 1 if path.rpartition("#")[2].isdecimal() else None
        return StepState(
            id=path, kind=kind, title=f"{_ROUND[kind]} {number}", parent=self.parent_of(path), number=number
        )

    def _kind_of(self, key: str, node: Mapping[str, object]) -> StepKind:
        if self.is_hierarchical and key == MANAGER_KEY:
            return "manager"
        node_type = node.get("node_type")
        if node_type in _LEVEL_KINDS:
            return cast("StepKind", node_type)
        if self.is_dynamic:
            if key in {DIRECT, FINAL}:
                return cast("StepKind", key)
            position = position_of(key)
            return "task" if position is None else "reduce" if position[0] else "map"
        return "handler" if "agent_key" in node and node["agent_key"] is None else "task"

    def _kinds_of(self, key: str) -> tuple[StepKind, StepKind] | None:
        """Return what a unit of that key and its executions are; None: it is a task."""
        if not self.is_dynamic and key not in self.units:
            return None
        kind, colon, _ = key.partition(":")
        return _UNITS.get(kind) if colon else None
