"""The graph of a team or a run as data, in version 1.3 of its JSON schema. Later fields are left out of the JSON if empty."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.graph import Graph
from ensemble_ray.definition.map_reduce import MapDefinition
from ensemble_ray.definition.validation import TeamModels, declared_agents
from ensemble_ray.map_reduce import MapReduceEnsemble
from ensemble_ray.plan.plan import (
    EdgeEntry,
    ForkEntry,
    GraphEntry,
    GraphUnit,
    LoopUnit,
    Node,
    PhaseUnit,
    Plan,
    in_waiting_order,
    members_of,
)
from ensemble_ray.plan.planner import in_levels
from ensemble_ray.plan.unit_plans import NodeMaker, plan_members, task_keys
from ensemble_ray.ports import ChatModel
from ensemble_ray.values.trace import ExecutionTrace, GraphTrace
from ensemble_ray.values.value import Instant, Value, utc_now

NodeType = Literal["map", "reduce", "final-reduce", "direct", "loop", "graph-state", "graph-end"]


class DagAgentNode(Value):
    """An agent of the team."""

    role: str
    goal: str
    background: str | None = None
    tool_names: tuple[str, ...] = ()
    allow_delegation: bool = False


class DagTaskNode(Value):
    """A task, a loop or a state.

    Attributes:
        id: Position among the tasks as text; of a task in a loop `{loop}.{position}`.
        agent_role: Also `(deterministic)` for a handler, `(synthesized)` before the agent is made, `(loop)`.
        parallel_group: Its level; 0 waits for no other task.
        node_type: None: a plain task.
        key: Its name in plans, traces and records, if it has one.
    """

    id: str
    description: str
    expected_output: str = ""
    agent_role: str
    depends_on: tuple[str, ...] = ()
    parallel_group: int = 0
    on_critical_path: bool = False
    node_type: NodeType | None = None
    map_reduce_level: int | None = None
    loop_max_iterations: int | None = None
    loop_body: tuple[DagTaskNode, ...] = ()
    phase: str | None = None
    key: str | None = Field(default=None, exclude_if=operator.not_)


class DagGraphEdge(Value):
    """An edge between two states of a graph; `fired`: a run followed it."""

    from_state_id: str
    to_state_id: str
    condition_description: str | None = None
    unconditional: bool = True
    fired: bool = False
    branching: Literal["fork", "join"] | None = Field(default=None, exclude_if=operator.not_)


class DagPhase(Value):
    """A phase and its predecessors; `key` is its name in plans, traces and records."""

    name: str
    workflow: str = "sequential"
    after: tuple[str, ...] = ()
    review_id: str | None = None
    key: str


class DagModel(Value):
    """A graph of tasks.

    Attributes:
        critical_path: Ids of the longest chain by the number of tasks, then loops: an estimate, since a graph has no times.
        mode: `graph`: the tasks are states, connected by `graph_edges`; None: they are connected by `depends_on`.
    """

    schema_version: str = "1.3"
    type: Literal["dag"] = "dag"
    workflow: str
    generated_at: Instant = Field(default_factory=utc_now)
    agents: tuple[DagAgentNode, ...] = ()
    tasks: tuple[DagTaskNode, ...]
    parallel_groups: tuple[tuple[str, ...], ...] = ()
    critical_path: tuple[str, ...] = ()
    map_reduce_mode: Literal["static", "adaptive"] | None = None
    mode: Literal["graph"] | None = None
    graph_edges: tuple[DagGraphEdge, ...] = ()
    graph_start_state_id: str | None = None
    graph_termination_reason: str | None = None
    graph_steps_run: int | None = None
    phases: tuple[DagPhase, ...] = Field(default=(), exclude_if=operator.not_)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return indented JSON text, and write it to `path` if given. Parent folders are created.

        Raises:
            OSError: The file cannot be written.
        """
        text = self.model_dump_json(indent=2)
        if path is not None:
            target = Path(path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return text


END_ID, END_STATE = "END", "__END__"  # id of the end of a graph in the drawing, and its name in plans
_LOOP_ROLE = "(loop)"
_ADAPTIVE = "map_reduce_adaptive"
_TREE_TYPES = frozenset({"map", "reduce", "final-reduce", "direct"})


def dag_of_plan(plan: Plan, graph_trace: GraphTrace | None = None) -> DagModel:
    """A trace of its graph marks the edges that the run followed."""
    reader = _Reader(plan)
    for unit in plan.units:
        if isinstance(unit, GraphUnit):
            return reader.graph(unit, graph_trace)
    return reader.dag()


def _groups(levels: Sequence[int], ids: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    groups: list[list[str]] = [[] for _ in range(max(levels, default=-1) + 1)]
    for each, level in zip(ids, levels, strict=True):
        groups[level].append(each)
    return tuple(map(tuple, groups))


def _map_reduce_mode(workflow: str) -> Literal["static", "adaptive"] | None:
    if not workflow.startswith("map_reduce"):
        return None
    return "adaptive" if workflow == _ADAPTIVE else "static"


def _node_type(node_type: str | None) -> NodeType | None:
    return cast("NodeType", node_type) if node_type in _TREE_TYPES else None


@dataclass(slots=True, kw_only=True)
class _Entry:
    id: str
    of: Node | LoopUnit
    phase: str | None
    waits_for: tuple[str, ...] = ()  # ids without duplicates
    level: int = 0
    is_critical: bool = False


class _Reader:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._nodes = {node.key: node for node in plan.nodes}
        self._loops = {unit.key: unit for unit in plan.units if isinstance(unit, LoopUnit)}
        self._phases = {unit.key: unit for unit in plan.units if isinstance(unit, PhaseUnit)}
        self._in_loops = {key for loop in self._loops.values() for key in loop.body}
        self._phase_of = {key: phase for phase in self._phases.values() for key in members_of(phase)}

    def dag(self) -> DagModel:
        entries = self._entries()
        path = _mark_critical_path(entries)
        return DagModel(
            workflow=self._plan.workflow,
            agents=self._agents(),
            tasks=tuple(map(self._entry, entries.values())),
            parallel_groups=_groups([each.level for each in entries.values()], list(entries)),
            critical_path=tuple(path),
            map_reduce_mode=_map_reduce_mode(self._plan.shown_as or ""),
            phases=tuple(self._phase(unit, entries) for unit in self._phases.values()),
        )

    def graph(self, unit: GraphUnit, trace: GraphTrace | None) -> DagModel:
        ids = {state.name: str(position) for position, state in enumerate(unit.states)} | {END_STATE: END_ID}
        states = [
            self._shown(
                self._loops.get(state.member) or self._nodes[state.member],
                ids[state.name],
                state.name,
                node_type="graph-state",
            )
            for state in unit.states
        ]
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
        found: list[Node | LoopUnit] = [node for node in self._plan.nodes if node.key not in self._in_loops]
        found += self._loops.values()
        ids = {each.key: str(position) for position, each in enumerate(found)}
        entries: dict[str, _Entry] = {}
        for each in found:
            phase, context = self._phase_of.get(each.key), each.context
            if phase is not None:
                context = (*context, *(phase.members if each.key == phase.review else ()), *phase.after)
            waits_for = dict.fromkeys(key for before in context for key in self._last_of(before))
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

    def _last_of(self, key: str) -> tuple[str, ...]:
        """Return the tasks that complete a task or unit."""
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

    def _shown(self, of: Node | LoopUnit, node_id: str, state: str = "", **fields: Any) -> DagTaskNode:
        before = f"{state}: " if state else ""
        if isinstance(of, LoopUnit):
            return DagTaskNode(
                id=node_id,
                description=f"{before}Loop: {of.name}",
                agent_role=_LOOP_ROLE,
                loop_max_iterations=of.max_iterations,
                loop_body=self._body(node_id, of),
                key=of.key,
                **fields,
            )
        return DagTaskNode(
            id=node_id,
            description=f"{before}{of.description}",
            expected_output=of.expected_output,
            agent_role=of.agent_role,
            key=of.key,
            **fields,
        )

    def _entry(self, entry: _Entry) -> DagTaskNode:
        of = entry.of
        kind, level = ("loop", None) if isinstance(of, LoopUnit) else (_node_type(of.node_type), of.level)
        return self._shown(
            of,
            entry.id,
            depends_on=entry.waits_for,
            parallel_group=entry.level,
            on_critical_path=entry.is_critical,
            node_type=kind,
            map_reduce_level=level,
            phase=entry.phase,
        )

    def _body(self, loop_id: str, loop: LoopUnit) -> tuple[DagTaskNode, ...]:
        ids = {key: f"{loop_id}.{position}" for position, key in enumerate(loop.body)}
        nodes = [self._nodes[key] for key in loop.body]
        return tuple(
            self._shown(
                node,
                ids[node.key],
                depends_on=tuple(ids[key] for key in node.context if key in ids),
                parallel_group=position,
            )
            for position, node in enumerate(nodes)
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
        return tuple(DagAgentNode.model_validate(entry, from_attributes=True) for entry in self._plan.agents)


def _mark_critical_path(entries: Mapping[str, _Entry]) -> list[str]:
    """Mark and return the longest chain of tasks, followed by the loops."""
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


class DagExporter:
    """Builds graphs of tasks as data."""

    @staticmethod
    def build(
        source: EnsembleDefinition | MapDefinition | Graph | ExecutionTrace | None,
        graph_trace: GraphTrace | None = None,
    ) -> DagModel:
        """Return the graph of a team, a state machine or a run, without running it.

        Args:
            source: An ensemble, a map-reduce, a graph, or the trace of a run.
            graph_trace: For a graph: `output.trace.graph_trace`, to mark the edges that the run followed.

        Raises:
            ValueError: The source is None or empty.
            NotImplementedError: The map-reduce creates its tasks during the run. Use the trace of a run.
        """
        match source:
            case None:
                raise ValueError("ensemble must not be None")
            case ExecutionTrace():
                return _of_trace(source)
            case Graph():
                return dag_of_plan(_plan_of(EnsembleDefinition(graph=source)), graph_trace)
            case MapReduceEnsemble() if source.is_planned:  # S-VIZ-40, S-VIZ-41
                return dag_of_plan(_plan_of(source.to_ensemble()))
            case MapDefinition():
                raise NotImplementedError(
                    f"The tasks of this {type(source).__name__} are made while it runs, so there is no graph of them before. "
                    "Build it from the trace of a run: DagExporter.build(output.trace)"
                )
            case EnsembleDefinition():
                if not source.all_tasks:
                    raise ValueError("ensemble must have at least one task or loop")
                return dag_of_plan(_plan_of(source), graph_trace)


class _AsDeclared(TeamModels):
    """Accepts agents without a model."""

    def resolve_agent(self, agent: Agent, task_model: ChatModel | None = None) -> Agent:
        del task_model
        return agent


def _plan_of(definition: EnsembleDefinition) -> Plan:
    """Plan without inputs: texts keep their variables."""
    tasks = definition.all_tasks
    maker = NodeMaker(definition, _AsDeclared(definition))
    members = plan_members(definition, list(zip(tasks, task_keys(tasks), strict=True)), maker)
    for agent in declared_agents(definition):
        maker.agent_key(agent)
    levels = definition.levels
    nodes = members.nodes if levels is None else in_levels(members.nodes, levels)
    return Plan(
        workflow="sequential" if definition.workflow is None else definition.workflow.value,
        nodes=tuple(nodes),
        agents=tuple(maker.entries),
        units=tuple(members.units),
        shown_as=None if levels is None else levels.workflow,
    )


def _of_trace(trace: ExecutionTrace) -> DagModel:
    if not trace.task_traces:
        raise ValueError("trace must contain at least one task trace")
    levels = [task.map_reduce_level or 0 for task in trace.task_traces]
    tasks = [
        DagTaskNode(
            id=str(position),
            description=task.task_description,
            expected_output=task.expected_output,
            agent_role=task.agent_role,
            parallel_group=level,
            node_type=_node_type(task.node_type),
            map_reduce_level=task.map_reduce_level,
            key=str(task.metadata["instance"]) if "instance" in task.metadata else None,
        )
        for position, (task, level) in enumerate(zip(trace.task_traces, levels, strict=True))
    ]
    return DagModel(
        workflow=trace.workflow,
        generated_at=trace.completed_at,
        agents=tuple(DagAgentNode(**agent.model_dump()) for agent in trace.agents),
        tasks=tuple(tasks),
        parallel_groups=_groups(levels, [task.id for task in tasks]),
        map_reduce_mode=_map_reduce_mode(trace.workflow),
    )
