"""Nodes of tasks, and units for loops, phases and a graph. Keys of units and tasks are unique together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from ensemble_ray.definition.agent import Agent
from ensemble_ray.definition.ensemble import EnsembleDefinition
from ensemble_ray.definition.fields import Workflow
from ensemble_ray.definition.graph import Graph, GraphEdge, GraphFork, GraphJoin
from ensemble_ray.definition.loop import Loop, body_key
from ensemble_ray.definition.phase import Phase
from ensemble_ray.definition.task import Task, UnitOutput
from ensemble_ray.definition.validation import TeamModels, declared_agents
from ensemble_ray.plan.plan import (
    MANAGER_KEY,
    AgentEntry,
    EdgeEntry,
    ForkEntry,
    GraphEntry,
    GraphUnit,
    JoinEntry,
    LoopUnit,
    Node,
    PhaseUnit,
    StateEntry,
    Unit,
    in_waiting_order,
)
from ensemble_ray.ports import ChatModel
from ensemble_ray.values.delegation import Peer

DETERMINISTIC = "(deterministic)"
SYNTHESIZED = "(synthesized)"
KeyedTask = tuple[Task, str]


def task_keys(tasks: Iterable[Task]) -> tuple[str, ...]:
    """Return the name of each task, else its position. A repeated name gets `~2`, `~3` and so on."""
    names = Names()
    return tuple(
        names.claim(_clean(task.name) if task.name else f"task-{index}") for index, task in enumerate(tasks, start=1)
    )


def tool_names(agent: Agent) -> tuple[str, ...]:
    """The tools of a provider are known only when a task begins."""
    if not agent.tools:
        return ()
    from ensemble_ray.tools.tool import AgentTool, marked_functions, tool_mark  # needed only with tools

    names: list[str] = []
    for entry in agent.tools:
        if isinstance(entry, AgentTool):
            names.append(entry.name)
            continue
        methods = marked_functions(type(entry)) if tool_mark(entry) is None else ()
        marks = (tool_mark(getattr(entry, method)) for method in methods) if methods else (tool_mark(entry),)
        names.extend(mark.name for mark in marks if mark is not None)
    return tuple(names)


class Scope(Struct, frozen=True):
    """Tasks and units that the context of a task or loop may name."""

    #: by object id
    keys: Mapping[str, str] = msgspec.field(default_factory=dict[str, str])
    #: keys of body tasks by the object ids of their loop and of the task
    bodies: Mapping[tuple[str, str], str] = msgspec.field(default_factory=dict[tuple[str, str], str])

    def keys_of(self, context: Iterable[Task | UnitOutput]) -> tuple[str, ...]:
        return tuple([self.keys[entry.object_id] for entry in context if entry.object_id in self.keys])

    def bodies_of(self, context: Iterable[Task | UnitOutput]) -> tuple[str, ...]:
        found = tuple(
            [
                self.bodies[entry.object_id, entry.task_id] if isinstance(entry, UnitOutput) and entry.task_id else ""
                for entry in context
                if entry.object_id in self.keys
            ]
        )
        return found if any(found) else ()


class NodeMaker:
    """Makes nodes, and the entries of agents in the order of their first use (S-DOM-65)."""

    def __init__(
        self, definition: EnsembleDefinition, models: TeamModels, synthesized: Mapping[str, Agent] | None = None
    ) -> None:
        self.entries: list[AgentEntry] = []
        self.agents: dict[str, Agent] = {}
        self._definition = definition
        self._models = models
        self._synthesized = synthesized or {}
        self._agent_keys: dict[str, str] = {}
        self._names = Names()

    def node(self, task: Task, key: str, *, index: int, total: int | None = None, scope: Scope) -> Node:
        """Return the node of a resolved task, at its 1-based position among the `total` tasks that events count it with."""
        agent = task.agent if task.agent is not None else self._synthesized.get(task.object_id)
        role, agent_key = SYNTHESIZED, None
        if task.handler is not None:
            role = DETERMINISTIC
        elif agent is not None:
            role = agent.role
            is_synthesized = task.agent is None and key != MANAGER_KEY
            agent_key = self.agent_key(agent, is_synthesized=is_synthesized, task_model=task.llm)
        return Node(
            key=key,
            index=index,
            object_id=task.object_id,
            description=task.description,
            expected_output=task.expected_output,
            agent_role=role,
            agent_key=agent_key,
            context=scope.keys_of(task.context),
            context_tasks=scope.bodies_of(task.context),
            context_outside=tuple([entry.description for entry in task.context if entry.object_id not in scope.keys]),
            is_streaming=task.handler is None and _streams(agent, task, self._definition),
            total=total,
        )

    def peers(self, *, but: Agent | None = None) -> tuple[Peer, ...]:
        """Return the agents that may receive delegated work; an empty tuple if no agent may delegate."""
        if but is None and not any(agent.allow_delegation for agent in self.agents.values()):
            return ()
        rank = {agent: position for position, agent in enumerate(declared_agents(self._definition))}
        order = sorted(self.agents.items(), key=lambda entry: rank.get(entry[1], len(rank)))
        return tuple(
            Peer(key=key, role=agent.role, is_streaming=_streams(agent, None, self._definition))
            for key, agent in order
            if agent is not but
        )

    def agent_key(self, agent: Agent, *, is_synthesized: bool = False, task_model: ChatModel | None = None) -> str:
        """Return the key of an agent, which is part of the plan from now on."""
        key = self._agent_keys.get(agent.object_id)
        if key is not None:
            return key
        key = self._names.claim(re.sub(r"\W+", "-", agent.role.lower()).strip("-") or "agent")
        self._agent_keys[agent.object_id] = key
        self.agents[key] = self._models.resolve_agent(agent, task_model)
        self.entries.append(
            AgentEntry(
                key=key,
                role=agent.role,
                goal=agent.goal,
                background=agent.background,
                tool_names=tool_names(agent),
                is_synthesized=is_synthesized,
                allow_delegation=agent.allow_delegation,
            )
        )
        return key


class PlannedMembers(Struct):
    nodes: list[Node] = msgspec.field(default_factory=list[Node])
    units: list[Unit] = msgspec.field(default_factory=list[Unit])
    definitions: dict[str, Loop | Phase | Graph] = msgspec.field(default_factory=dict[str, Loop | Phase | Graph])


def plan_members(definition: EnsembleDefinition, tasks: Sequence[KeyedTask], maker: NodeMaker) -> PlannedMembers:
    plain = tasks[: len(definition.tasks)]
    return _Planner(definition, tasks[len(definition.tasks) :], maker).plan(plain)


class _Planner:
    def __init__(self, definition: EnsembleDefinition, tasks: Sequence[KeyedTask], maker: NodeMaker) -> None:
        self._definition = definition
        self._rest: Iterator[KeyedTask] = iter(tasks)
        self._maker = maker
        self._made = PlannedMembers()
        self._names = Names()
        self._keys: dict[str, str] = {}
        #: keys of body tasks by the object ids of their loop and of the task
        self._bodies: dict[tuple[str, str], str] = {}

    def plan(self, plain: Sequence[KeyedTask]) -> PlannedMembers:
        definition = self._definition
        if definition.has_units:
            rest = list(self._rest)
            for _, key in (*plain, *rest):
                self._names.claim(key)
            self._rest = iter(rest)
            graph = () if definition.graph is None else (definition.graph,)
            for kind, units in (("phase", definition.phases), ("graph", graph), ("loop", definition.all_loops)):
                for unit in units:
                    self._keys[unit.object_id] = self._names.claim(f"{kind}:{_clean(unit.name)}")
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

    def _find_bodies(self, rest: Iterator[KeyedTask]) -> None:
        """Tasks before a loop may name its body tasks too."""
        definition = self._definition
        members: list[Task | Loop] = [*definition.loops]
        for phase in definition.phases:
            members += (*phase.tasks, *phase.loops, *(() if phase.review is None else (phase.review.task,)))
        members += () if definition.graph is None else definition.graph.states.values()
        for member in members:
            if isinstance(member, Task):
                next(rest)
                continue
            for task in member.body:
                self._bodies[member.object_id, task.object_id] = next(rest)[1]

    def _add_loop(self, loop: Loop, scope: Mapping[str, str]) -> LoopUnit:
        key = self._keys[loop.object_id]
        body = self._take(len(loop.body))
        self._add_nodes(body, {task.object_id: name for task, name in body})
        outer = Scope(scope, self._bodies)
        self._made.definitions[key] = loop
        scopes: dict[str, None] = {}
        if self._definition.memory_store is not None:  # S-LOOP-94, S-LOOP-95
            scopes = {scope.name: None for task in loop.body for scope in task.memory_scopes}
        unit = LoopUnit(
            key=key,
            name=loop.name,
            body=tuple(name for _, name in body),
            # names of the declared tasks, since a description counts as a name with its variables
            body_names=tuple(body_key(task) for task in loop.body),
            context=outer.keys_of(loop.context),
            context_tasks=outer.bodies_of(loop.context),
            max_iterations=loop.cap,
            has_until=loop.until is not None,
            on_max_iterations=loop.on_max_iterations.value,
            output_mode=loop.output_mode.value,
            memory_mode=loop.memory_mode.value,
            memory_window_size=loop.memory_window_size,
            memory_scopes=tuple(scopes),
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
        unit = GraphUnit(
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
        self._made.units.append(unit)
        for name, state in graph.states.items():
            self._rest = iter(bodies[name])
            if isinstance(state, Loop):
                self._add_loop(state, scope)
            else:
                self._add_nodes(self._take(1), scope)

    def _add_nodes(self, tasks: Sequence[KeyedTask], scope: Mapping[str, str]) -> list[Node]:
        """Add tasks that events count together (S-LOOP-47, S-PHASE-38)."""
        nodes = [
            self._maker.node(task, key, index=index, total=len(tasks), scope=Scope(scope, self._bodies))
            for index, (task, key) in enumerate(tasks, start=1)
        ]
        self._made.nodes.extend(nodes)
        return nodes

    def _take(self, count: int) -> list[KeyedTask]:
        return [next(self._rest) for _ in range(count)]


@dataclass(slots=True)
class Names:
    _used: set[str] = field(default_factory=set[str])
    _next: dict[str, int] = field(default_factory=dict[str, int])

    def claim(self, wanted: str) -> str:
        name = wanted
        while name in self._used:
            # The next number is stored per name: otherwise 1,000 equal names would need 500,000 look-ups.
            number = self._next.get(wanted, 2)
            self._next[wanted] = number + 1
            name = f"{wanted}~{number}"
        self._used.add(name)
        return name


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


def _streams(agent: Agent | None, task: Task | None, definition: EnsembleDefinition) -> bool:
    """Return the first value that agent, task or ensemble declares (S-STR-1)."""
    for chosen in (None if agent is None else agent.is_streaming, None if task is None else task.stream):
        if chosen is not None:
            return chosen
    return definition.is_streaming


def _clean(name: str) -> str:
    return re.sub(r"[/#]", "_", name)
