"""The graph of a plan as data. Package: visualization. Pure.

In: a plan, as it was made for a run or as a record has it, and of a graph what a run did. Out: a `DagModel`.

Rules:
1. Ids are positions: the tasks in the order of the plan, those of loops left out, then the loops (S-VIZ-11, S-VIZ-20).
2. A level is 0 without dependencies, else 1 + the highest of theirs (S-VIZ-12, S-VIZ-22).
3. The critical path ends at the last task of the highest level, and goes back to the dependency of the highest level, the
   first one on a tie (S-VIZ-14); loops are always on it (S-VIZ-23).
4. A task of a phase depends on the last tasks of the phases before it, too (S-VIZ-50).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

from ensemble_ray.plan.units import EdgeEntry, ForkEntry, GraphUnit, LoopUnit, PhaseUnit, in_waiting_order
from ensemble_ray.visualization.dag_model import DagAgentNode, DagGraphEdge, DagModel, DagPhase, DagTaskNode, NodeType

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import Node, Plan
    from ensemble_ray.plan.units import GraphEntry
    from ensemble_ray.values.unit_traces import GraphTrace

__all__ = ["END_ID", "END_STATE", "dag_of_plan", "groups_of", "mode_of", "type_of"]

#: Id of the node behind the last state of a graph, and what plans call it.
END_ID, END_STATE = "END", "__END__"
_LOOP_ROLE = "(loop)"
_ADAPTIVE = "map_reduce_adaptive"
_TREE_TYPES = frozenset({"map", "reduce", "final-reduce", "direct"})


def dag_of_plan(plan: Plan, graph_trace: GraphTrace | None = None) -> DagModel:
    """Return the graph of a plan.

    Args:
        plan: Of one run.
        graph_trace: What the run did in its graph; None: it has none, or has not run.
    """
    reader = _Reader(plan)
    for unit in plan.units:
        if isinstance(unit, GraphUnit):
            return reader.graph(unit, graph_trace)
    return reader.dag()


def groups_of(levels: Sequence[int], ids: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return ids by level, in their order (S-VIZ-13)."""
    groups: list[list[str]] = [[] for _ in range(max(levels, default=-1) + 1)]
    for each, level in zip(ids, levels, strict=True):
        groups[level].append(each)
    return tuple(map(tuple, groups))


def mode_of(workflow: str) -> Literal["static", "adaptive"] | None:
    """Return which kind of map-reduce a trace calls by that name; None: no map-reduce."""
    if not workflow.startswith("map_reduce"):
        return None
    return "adaptive" if workflow == _ADAPTIVE else "static"


def type_of(node_type: str | None) -> NodeType | None:
    """Return what a node of a map-reduce is; None: it is a plain task."""
    return cast("NodeType", node_type) if node_type in _TREE_TYPES else None


@dataclass(slots=True, kw_only=True)
class _Entry:
    """A task or a loop that gets an id of its own."""

    id: str
    of: Node | LoopUnit
    phase: str | None
    #: ids, each once
    waits_for: tuple[str, ...] = ()
    level: int = 0
    is_critical: bool = False


class _Reader:
    """Reads one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._nodes = {node.key: node for node in plan.nodes}
        self._loops = {unit.key: unit for unit in plan.units if isinstance(unit, LoopUnit)}
        self._phases = {unit.key: unit for unit in plan.units if isinstance(unit, PhaseUnit)}
        self._in_loops = {key for loop in self._loops.values() for key in loop.body}
        self._phase_of = {key: phase for phase in self._phases.values() for key in _members(phase)}

    def dag(self) -> DagModel:
        entries = self._entries()
        path = _mark_critical_path(entries)
        return DagModel(
            workflow=self._plan.workflow,
            agents=self._agents(),
            tasks=tuple(map(self._task, entries.values())),
            parallel_groups=groups_of([each.level for each in entries.values()], list(entries)),
            critical_path=tuple(path),
            map_reduce_mode=mode_of(self._plan.shown_as or ""),
            phases=tuple(self._phase(unit, entries) for unit in self._phases.values()),
        )

    def graph(self, unit: GraphUnit, trace: GraphTrace | None) -> DagModel:
        """S-VIZ-30 to S-VIZ-32."""
        ids = {state.name: str(position) for position, state in enumerate(unit.states)} | {END_STATE: END_ID}
        states = [self._state(ids[state.name], state.name, state.member) for state in unit.states]
        taken = set() if trace is None else {(step.state_name, step.next_state) for step in trace.steps}
        return DagModel(
            workflow="sequential",
            agents=self._agents(),
            tasks=(*states, DagTaskNode(id=END_ID, description="END", agent_role="", node_type="graph-end")),
            mode="graph",
            graph_edges=tuple(edge for entry in unit.edges for edge in _edges(entry, ids, taken)),
            graph_start_state_id=ids[unit.start],
            graph_termination_reason=None if trace is None else trace.termination_reason,
            graph_steps_run=None if trace is None else trace.steps_run,
        )

    def _entries(self) -> dict[str, _Entry]:
        """Return the tasks and loops by id, each with its level."""
        found: list[Node | LoopUnit] = [node for node in self._plan.nodes if node.key not in self._in_loops]
        found += self._loops.values()
        ids = {each.key: str(position) for position, each in enumerate(found)}
        entries: dict[str, _Entry] = {}
        for each in found:
            phase = self._phase_of.get(each.key)
            waits_for = dict.fromkeys(key for before in self._context(each) for key in self._last_of(before))
            entries[ids[each.key]] = _Entry(
                id=ids[each.key],
                of=each,
                phase=None if phase is None else phase.name,
                waits_for=tuple(ids[key] for key in waits_for if key in ids and key != each.key),
            )
        for name in in_waiting_order(list(entries), {key: entry.waits_for for key, entry in entries.items()}):
            entry = entries[name]
            entry.level = 1 + max((entries[before].level for before in entry.waits_for), default=-1)
        return entries

    def _context(self, each: Node | LoopUnit) -> tuple[str, ...]:
        """Return the keys of tasks and units that a task or loop waits for."""
        phase = self._phase_of.get(each.key)
        if phase is None:
            return each.context
        inside = phase.members if each.key == phase.review else ()
        return (*each.context, *inside, *phase.after)

    def _last_of(self, key: str) -> tuple[str, ...]:
        """Return what has to be completed for a task or unit to be: of a phase its last tasks."""
        phase = self._phases.get(key)
        if phase is None:
            return (key,)
        if phase.review is not None:
            return (phase.review,)
        if phase.workflow == "sequential":
            return phase.members[-1:]
        waited_for = {
            before for member in phase.members for before in (self._nodes.get(member) or self._loops[member]).context
        }
        return tuple(member for member in phase.members if member not in waited_for)

    def _task(self, entry: _Entry) -> DagTaskNode:
        of = entry.of
        if isinstance(of, LoopUnit):
            return self._loop_node(entry, of)
        return DagTaskNode(
            id=entry.id,
            description=of.description,
            expected_output=of.expected_output,
            agent_role=of.agent_role,
            depends_on=entry.waits_for,
            parallel_group=entry.level,
            on_critical_path=entry.is_critical,
            node_type=type_of(of.node_type),
            map_reduce_level=of.level,
            phase=entry.phase,
            key=of.key,
        )

    def _loop_node(self, entry: _Entry, loop: LoopUnit) -> DagTaskNode:
        return DagTaskNode(
            id=entry.id,
            description=f"Loop: {loop.name}",
            agent_role=_LOOP_ROLE,
            depends_on=entry.waits_for,
            parallel_group=entry.level,
            on_critical_path=True,
            node_type="loop",
            loop_max_iterations=loop.max_iterations,
            loop_body=self._body(entry.id, loop),
            phase=entry.phase,
            key=loop.key,
        )

    def _body(self, loop_id: str, loop: LoopUnit) -> tuple[DagTaskNode, ...]:
        ids = {key: f"{loop_id}.{position}" for position, key in enumerate(loop.body)}
        nodes = [self._nodes[key] for key in loop.body]
        return tuple(
            DagTaskNode(
                id=ids[node.key],
                description=node.description,
                expected_output=node.expected_output,
                agent_role=node.agent_role,
                depends_on=tuple(ids[key] for key in node.context if key in ids),
                parallel_group=position,
                key=node.key,
            )
            for position, node in enumerate(nodes)
        )

    def _state(self, state_id: str, name: str, member: str) -> DagTaskNode:
        loop = self._loops.get(member)
        if loop is not None:
            return DagTaskNode(
                id=state_id,
                description=f"{name}: Loop: {loop.name}",
                agent_role=_LOOP_ROLE,
                node_type="graph-state",
                loop_max_iterations=loop.max_iterations,
                loop_body=self._body(state_id, loop),
                key=loop.key,
            )
        node = self._nodes[member]
        return DagTaskNode(
            id=state_id,
            description=f"{name}: {node.description}",
            expected_output=node.expected_output,
            agent_role=node.agent_role,
            node_type="graph-state",
            key=node.key,
        )

    def _phase(self, unit: PhaseUnit, entries: Mapping[str, _Entry]) -> DagPhase:
        reviews = [each.id for each in entries.values() if unit.review is not None and each.of.key == unit.review]
        return DagPhase(
            name=unit.name,
            workflow=unit.workflow,
            after=tuple(self._phases[key].name for key in unit.after),
            review_id=reviews[0] if reviews else None,
            key=unit.key,
        )

    def _agents(self) -> tuple[DagAgentNode, ...]:
        return tuple(
            DagAgentNode(
                role=entry.role,
                goal=entry.goal,
                background=entry.background,
                tool_names=entry.tool_names,
                allow_delegation=entry.allow_delegation,
            )
            for entry in self._plan.agents
        )


def _members(phase: PhaseUnit) -> tuple[str, ...]:
    return phase.members if phase.review is None else (*phase.members, phase.review)


def _mark_critical_path(entries: Mapping[str, _Entry]) -> list[str]:
    """Mark and return the longest chain of tasks, then the loops (rule 3)."""
    tasks = [each for each in entries.values() if not isinstance(each.of, LoopUnit)]
    highest = max((each.level for each in tasks), default=0)
    at = next((each for each in reversed(tasks) if each.level == highest), None)
    path: list[str] = []
    while at is not None:
        path.append(at.id)
        at = max((entries[key] for key in at.waits_for), key=lambda each: each.level, default=None)
    path.reverse()
    path += [each.id for each in entries.values() if isinstance(each.of, LoopUnit) and each.id not in path]
    for each in path:
        entries[each].is_critical = True
    return path


def _edges(entry: GraphEntry, ids: Mapping[str, str], taken: set[tuple[str, str | None]]) -> list[DagGraphEdge]:
    """Return an edge, the edges of a fork, or those of a join."""
    if isinstance(entry, EdgeEntry):
        return [
            DagGraphEdge(
                from_state_id=ids[entry.from_state],
                to_state_id=ids[entry.to_state],
                condition_description=entry.label,
                unconditional=not entry.has_condition,
                fired=(entry.from_state, entry.to_state) in taken,
            )
        ]
    if isinstance(entry, ForkEntry):
        is_taken = (entry.from_state, ", ".join(entry.to_states)) in taken
        return [
            DagGraphEdge(from_state_id=ids[entry.from_state], to_state_id=ids[state], fired=is_taken, branching="fork")
            for state in entry.to_states
        ]
    return [
        DagGraphEdge(
            from_state_id=ids[state],
            to_state_id=ids[entry.to_state],
            condition_description=None if entry.count is None else f"first {entry.count}",
            fired=(state, entry.to_state) in taken,
            branching="join",
        )
        for state in entry.from_states
    ]
