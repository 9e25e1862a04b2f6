"""Loops, phases and a graph as units of a plan, and the nodes of their tasks. Package: plan. Pure.

In: a definition, its resolved tasks with their keys in the order of `all_tasks`, and the maker of nodes. Out: nodes and units
in that order; each name of a unit is given out once, in the name space of the tasks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.graph_edges import GraphEdge, GraphFork, GraphJoin
from ensemble_ray.definition.loop import Loop, body_key
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.task import Task
from ensemble_ray.definition.workflow import Workflow
from ensemble_ray.plan.nodes import Names, NodeMaker, Scope, unit_key
from ensemble_ray.plan.plan import Node
from ensemble_ray.plan.units import (
    EdgeEntry,
    ForkEntry,
    GraphEntry,
    GraphUnit,
    JoinEntry,
    LoopUnit,
    PhaseUnit,
    StateEntry,
    Unit,
    in_waiting_order,
)

__all__ = ["PlannedMembers", "plan_members"]

#: A resolved task and its key.
KeyedTask = tuple[Task, str]


@dataclass(slots=True)
class PlannedMembers:
    """What a plan holds."""

    nodes: list[Node] = field(default_factory=list[Node])
    units: list[Unit] = field(default_factory=list[Unit])
    #: as the user declared them, by key of the unit
    definitions: dict[str, Loop | Phase | Graph] = field(default_factory=dict[str, Loop | Phase | Graph])


def plan_members(definition: EnsembleDefinition, tasks: Sequence[KeyedTask], maker: NodeMaker) -> PlannedMembers:
    """Return the nodes and units of a definition.

    Args:
        definition: Validated.
        tasks: All of them, resolved, in the order of `all_tasks`.
        maker: Makes the nodes.
    """
    plain = tasks[: len(definition.tasks)]
    return _Planner(definition, tasks[len(definition.tasks) :], maker).plan(plain)


class _Planner:
    """Makes nodes and units in one pass over the definition."""

    def __init__(self, definition: EnsembleDefinition, tasks: Sequence[KeyedTask], maker: NodeMaker) -> None:
        self._definition = definition
        self._rest: Iterator[KeyedTask] = iter(tasks)
        self._maker = maker
        self._made = PlannedMembers()
        self._names = Names()
        #: of units, by object id
        self._keys: dict[str, str] = {}
        #: of body tasks, by the object ids of their loop and of the task
        self._bodies: dict[tuple[str, str], str] = {}

    def plan(self, plain: Sequence[KeyedTask]) -> PlannedMembers:
        definition = self._definition
        if definition.has_units:
            rest = list(self._rest)
            for _, key in (*plain, *rest):
                self._names.claim(key)
            self._rest = iter(rest)
            self._claim_keys()
            self._find_bodies(iter(rest))
        scope = {loop.object_id: self._keys[loop.object_id] for loop in definition.loops}
        for task, key in plain:
            scope.setdefault(task.object_id, key)
        for index, (task, key) in enumerate(plain, start=1):
            self._made.nodes.append(self._maker.node(task, key, index=index, scope=Scope(scope, self._bodies)))
        for loop in definition.loops:
            self._add_loop(loop, scope)
        self._add_phases()
        if definition.graph is not None:
            self._add_graph(definition.graph)
        return self._made

    def _claim_keys(self) -> None:
        definition = self._definition
        for phase in definition.phases:
            self._claim("phase", phase)
        if definition.graph is not None:
            self._claim("graph", definition.graph)
        for loop in definition.all_loops:
            self._claim("loop", loop)

    def _claim(self, kind: str, unit: Loop | Phase | Graph) -> None:
        key = self._names.claim(unit_key(kind, unit.name))
        self._keys[unit.object_id] = key

    def _find_bodies(self, rest: Iterator[KeyedTask]) -> None:
        """Note the keys of body tasks, whatever may name them: tasks before their loop do."""
        definition = self._definition
        for member in (*definition.loops, *(each for phase in definition.phases for each in _members_of(phase))):
            self._find_body(member, rest)
        for state in () if definition.graph is None else definition.graph.states.values():
            self._find_body(state, rest)

    def _find_body(self, member: Task | Loop, rest: Iterator[KeyedTask]) -> None:
        if isinstance(member, Task):
            next(rest)
            return
        for task in member.body:
            self._bodies[member.object_id, task.object_id] = next(rest)[1]

    def _add_loop(self, loop: Loop, scope: Mapping[str, str]) -> LoopUnit:
        key = self._keys[loop.object_id]
        body = self._take(len(loop.body))
        self._add_nodes(body, {task.object_id: name for task, name in body})
        outer = Scope(scope, self._bodies)
        self._made.definitions[key] = loop
        unit = LoopUnit(
            key=key,
            name=loop.name,
            body=tuple(name for _, name in body),
            # Of the declared tasks: a description is the name of its task with variables as they were written.
            body_names=tuple(body_key(task) for task in loop.body),
            context=outer.keys_of(loop.context),
            context_tasks=outer.bodies_of(loop.context),
            max_iterations=loop.cap,
            has_until=loop.until is not None,
            on_max_iterations=loop.on_max_iterations.value,
            output_mode=loop.output_mode.value,
            memory_mode=loop.memory_mode.value,
            memory_window_size=loop.memory_window_size,
            memory_scopes=() if self._definition.memory_store is None else _scopes_of(loop),
            inject_feedback=loop.inject_feedback,
            max_tokens=loop.max_tokens,
        )
        self._made.units.append(unit)
        return unit

    def _add_phases(self) -> None:
        phases = self._definition.phases
        taken = [(phase, self._take(len(phase.all_tasks))) for phase in phases]
        scope = {member.object_id: self._keys[member.object_id] for phase in phases for member in (phase, *phase.loops)}
        for phase, tasks in taken:
            scope.update({task.object_id: key for task, key in tasks[: len(phase.tasks)]})
        for phase, tasks in taken:
            self._rest = iter(tasks)
            self._add_phase(phase, scope)

    def _add_phase(self, phase: Phase, scope: Mapping[str, str]) -> None:
        key = self._keys[phase.object_id]
        is_parallel = (phase.workflow or self._definition.workflow) is Workflow.PARALLEL
        tasks = self._take(len(phase.tasks))
        waits_for = {node.key: node.context for node in self._add_nodes(tasks, scope)}
        rest = self._take(sum(len(loop.body) for loop in phase.loops))
        inside = (*tasks, *rest)
        self._rest = iter((*rest, *self._rest))
        place = len(self._made.units)
        for loop in phase.loops:
            unit = self._add_loop(loop, scope)
            waits_for[unit.key] = unit.context
        review = phase.review
        reviewer = self._take(0 if review is None else 1)
        self._add_nodes(reviewer, scope)
        self._made.definitions[key] = phase
        phase_unit = PhaseUnit(
            key=key,
            name=phase.name,
            members=tuple(waits_for) if is_parallel else in_waiting_order(tuple(waits_for), waits_for),
            workflow="parallel" if is_parallel else "sequential",
            after=tuple(dict.fromkeys(self._keys[before.object_id] for before in phase.after)),
            review=next((name for _, name in reviewer), None),
            max_retries=0 if review is None else review.max_retries,
            max_predecessor_retries=0 if review is None else review.max_predecessor_retries,
            reflecting=()
            if review is None
            else tuple(key for task, key in inside if task.reflection_config is not None),
        )
        self._made.units.insert(place, phase_unit)

    def _add_graph(self, graph: Graph) -> None:
        key = self._keys[graph.object_id]
        rest = list(self._rest)
        waiting = iter(rest)
        members: dict[str, str] = {}
        scope: dict[str, str] = {}
        bodies: dict[str, list[KeyedTask]] = {}
        for name, state in graph.states.items():
            if isinstance(state, Loop):
                bodies[name] = [next(waiting) for _ in state.body]
                members[name] = self._keys[state.object_id]
            else:
                bodies[name] = [next(waiting)]
                members[name] = bodies[name][0][1]
            scope.setdefault(state.object_id, members[name])
        self._made.definitions[key] = graph
        self._made.units.append(_graph_unit(graph, key, members))
        for name, state in graph.states.items():
            self._rest = iter(bodies[name])
            if isinstance(state, Loop):
                self._add_loop(state, scope)
            else:
                self._add_nodes(self._take(1), scope)

    def _add_nodes(self, tasks: Sequence[KeyedTask], scope: Mapping[str, str]) -> list[Node]:
        """Add tasks that events count among each other (S-LOOP-47, S-PHASE-38)."""
        nodes = [
            self._maker.node(task, key, index=index, total=len(tasks), scope=Scope(scope, self._bodies))
            for index, (task, key) in enumerate(tasks, start=1)
        ]
        self._made.nodes.extend(nodes)
        return nodes

    def _take(self, count: int) -> list[KeyedTask]:
        return [next(self._rest) for _ in range(count)]


def _graph_unit(graph: Graph, key: str, members: Mapping[str, str]) -> GraphUnit:
    return GraphUnit(
        key=key,
        name=graph.name,
        states=tuple(StateEntry(name=name, member=member) for name, member in members.items()),
        edges=tuple(_entry_of(edge) for edge in graph.edges),
        start=graph.start,
        max_steps=graph.max_steps,
        on_max_steps=graph.on_max_steps.value,
        inject_feedback_on_revisit=graph.inject_feedback_on_revisit,
        no_feedback_states=tuple(sorted(graph.no_feedback_states)),
    )


def _entry_of(edge: GraphEdge | GraphFork | GraphJoin) -> GraphEntry:
    match edge:
        case GraphEdge():
            return EdgeEntry(
                from_state=edge.from_state,
                to_state=edge.to_state,
                label=edge.label,
                has_condition=edge.condition is not None,
            )
        case GraphFork():
            return ForkEntry(from_state=edge.from_state, to_states=tuple(edge.to_states))
        case GraphJoin():
            return JoinEntry(from_states=tuple(edge.from_states), to_state=edge.to_state, count=edge.count)


def _scopes_of(loop: Loop) -> tuple[str, ...]:
    """Return the names of the memory scopes that a body declares, each once (S-LOOP-94, S-LOOP-95)."""
    return tuple(dict.fromkeys(scope.name for task in loop.body for scope in task.memory_scopes))


def _members_of(phase: Phase) -> tuple[Task | Loop, ...]:
    """Return tasks and loops of a phase such that their tasks are in the order of `Phase.all_tasks`."""
    return (*phase.tasks, *phase.loops, *(() if phase.review is None else (phase.review.task,)))
