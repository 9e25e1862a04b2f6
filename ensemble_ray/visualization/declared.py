"""The graph of a team before it runs, as a `Flow`. Pure.

- Nodes and groups have the keys of the plan, so that the steps of a run can be assigned to them.
- Edges connect tasks inside one frame. If only the order of work connects two tasks, the edge is `unconditional`.
- The back edge of a loop, and edges of a graph to a state on the path to their source, point back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import msgspec
from msgspec import Struct

from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.definition.task import Task
from ensemble_ray.execute.callables import callable_name
from ensemble_ray.plan.plan import MANAGER_KEY, MANAGER_ROLE, Plan, in_waiting_order
from ensemble_ray.plan.unit_plans import DETERMINISTIC
from ensemble_ray.record.units import LevelTally
from ensemble_ray.text.foreign_text import one_line
from ensemble_ray.values.trace import GraphTrace
from ensemble_ray.visualization.dag_model import DagModel, DagPhase, DagTaskNode, dag_of_plan
from ensemble_ray.visualization.flow import Flow, FlowEdge, FlowGroup, FlowNode, fold_flow

_MAX_TITLE = 300
_TASKS_GROUP = "manager:tasks"
_TREE_BADGES = {"map": "MAP", "reduce": "REDUCE", "final-reduce": "AGGREGATE", "direct": "DIRECT"}


def declared_flow(plan: Plan, graph_trace: GraphTrace | None = None) -> Flow:
    return dag_flow(dag_of_plan(plan, graph_trace))


def dag_flow(dag: DagModel) -> Flow:
    maker = _Maker(dag)
    if dag.mode == "graph":
        maker.add_states()
    elif dag.workflow == "hierarchical":
        maker.add_manager()
    elif dag.phases:
        maker.add_phases(dag.phases)
    else:
        is_sequential = dag.workflow == "sequential" and dag.map_reduce_mode is None
        maker.add_members(dag.tasks, is_sequential=is_sequential)
    return fold_flow(maker.flow())


def title_of(text: str) -> str:
    shown = " ".join(text[: 2 * _MAX_TITLE].split())
    return str(one_line(shown, None)) if len(shown) <= _MAX_TITLE else f"{one_line(shown[:_MAX_TITLE], None)}…"


def tree_badges(kind: str | None, level: int | None) -> tuple[str, ...]:
    badge = _TREE_BADGES.get(kind or "")
    if badge is None:
        return ()
    return (f"{badge} L{level}",) if kind == "reduce" and level is not None else (badge,)


def loop_title(name: str, max_iterations: int | None) -> str:
    return f"LOOP ≤{max_iterations} {title_of(name)}" if max_iterations is not None else f"LOOP {title_of(name)}"


def worker_id(role: str) -> str:
    return f"worker:{role}"


class _Maker(Struct):
    dag: DagModel
    _nodes: list[FlowNode] = msgspec.field(default_factory=list[FlowNode])
    _edges: list[FlowEdge] = msgspec.field(default_factory=list[FlowEdge])
    _groups: list[FlowGroup] = msgspec.field(default_factory=list[FlowGroup])

    def flow(self) -> Flow:
        return Flow(
            nodes=tuple(self._nodes),
            edges=tuple(self._edges),
            groups=tuple(self._groups),
            mode="graph" if self.dag.mode == "graph" else "dag",
        )

    # Tasks and loops.

    def add_members(self, tasks: Sequence[DagTaskNode], group: str | None = None, *, is_sequential: bool) -> None:
        inside = {task.id: task for task in tasks}
        waits_for = {task.id: [each for each in task.depends_on if each in inside] for task in tasks}
        order = in_waiting_order(list(inside), waits_for) if is_sequential else tuple(inside)
        for position, each in enumerate(order):
            task = inside[each]
            rank = position if is_sequential else task.parallel_group
            if task.node_type == "loop":
                title = loop_title(task.description.removeprefix("Loop: "), task.loop_max_iterations)
                self._add_loop(task, group, title, rank=rank)
                continue
            badges = tree_badges(task.node_type, task.map_reduce_level)
            self._add_node(task, group, kind=_kind(task), rank=rank, badges=badges)
        for target, sources in waits_for.items():
            self._edges += [FlowEdge(source=_key(inside[each]), target=_key(inside[target])) for each in sources]
        if is_sequential:
            self._add_order([inside[each] for each in order])

    def _add_order(self, tasks: Sequence[DagTaskNode]) -> None:
        self._edges += [
            FlowEdge(source=_key(before), target=_key(task), kind="unconditional")
            for before, task in pairwise(tasks)
            if before.id not in task.depends_on
        ]

    def _add_loop(self, loop: DagTaskNode, group: str | None, title: str, *, rank: int) -> None:
        key = _key(loop)
        self._groups.append(FlowGroup(id=key, kind="loop", title=title, parent=group))
        for position, task in enumerate(loop.loop_body):
            self._add_node(task, key, kind=_kind(task), rank=rank + position)
        self._edges += [
            FlowEdge(source=_key(source), target=_key(target))
            for target in loop.loop_body
            for source in loop.loop_body
            if source.id in target.depends_on
        ]
        self._add_order(loop.loop_body)
        first, last = loop.loop_body[0], loop.loop_body[-1]
        self._edges.append(
            FlowEdge(source=_key(last), target=_key(first), kind="loop", label="again", is_back=first is not last)
        )

    def _add_node(
        self,
        task: DagTaskNode,
        group: str | None,
        *,
        kind: str,
        rank: int,
        badges: tuple[str, ...] = (),
    ) -> None:
        self._nodes.append(
            FlowNode(
                id=_key(task),
                kind=kind,
                title=title_of(task.description),
                agent=title_of(task.agent_role),
                level=task.parallel_group if task.map_reduce_level is None else task.map_reduce_level,
                rank=rank,
                group=group,
                badges=badges,
            )
        )

    # Phases.

    def add_phases(self, phases: Sequence[DagPhase]) -> None:
        keys = {phase.name: phase.key for phase in phases}
        for phase in phases:
            self._groups.append(FlowGroup(id=phase.key, kind="phase", title=f"PHASE {title_of(phase.name)}"))
            tasks = [task for task in self.dag.tasks if task.phase == phase.name]
            members = [task for task in tasks if task.id != phase.review_id]
            self.add_members(members, phase.key, is_sequential=phase.workflow == "sequential")
            self._add_review(phase, members, next((task for task in tasks if task.id == phase.review_id), None))
            self._edges += [FlowEdge(source=keys[name], target=phase.key) for name in phase.after if name in keys]

    def _add_review(self, phase: DagPhase, members: Sequence[DagTaskNode], review: DagTaskNode | None) -> None:
        """Add the review after the tasks that no other task of the phase waits for."""
        if review is None:
            return
        self._add_node(review, phase.key, kind=_kind(review), rank=review.parallel_group, badges=("REVIEW",))
        inside = {_key(task) for task in members}
        waited_for = {edge.source for edge in self._edges if edge.target in inside}
        self._edges += [
            FlowEdge(source=_key(task), target=_key(review), kind="unconditional")
            for task in members
            if _key(task) not in waited_for
        ]

    # A graph.

    def add_states(self) -> None:
        dag = self.dag
        states = {task.id: task for task in dag.tasks}
        back = _back_edges(dag)
        ranks = _ranks(dag, back)
        for task in dag.tasks:
            if task.loop_body:
                name, _, loop = task.description.partition(": Loop: ")
                title = f"STATE {title_of(name)}: {loop_title(loop, task.loop_max_iterations)}"
                self._add_loop(task, None, title, rank=ranks[task.id])
                continue
            kind = "end" if task.node_type == "graph-end" else "state"
            badge = "END" if kind == "end" else "START" if task.id == dag.graph_start_state_id else None
            self._add_node(task, None, kind=kind, rank=ranks[task.id], badges=(badge,) if badge else ())
        is_over = dag.graph_steps_run is not None
        for edge in dag.graph_edges:
            label = edge.condition_description or edge.branching
            self._edges.append(
                FlowEdge(
                    source=_key(states[edge.from_state_id]),
                    target=_key(states[edge.to_state_id]),
                    kind="unconditional" if edge.unconditional else "conditional",
                    label=None if label is None else title_of(label),
                    fired=edge.fired if is_over else None,
                    is_back=(edge.from_state_id, edge.to_state_id) in back,
                )
            )

    # A manager.

    def add_manager(self) -> None:
        manager = next((task for task in self.dag.tasks if task.key == MANAGER_KEY), None)
        tasks = [task for task in self.dag.tasks if task is not manager]
        if tasks:
            self._groups.append(FlowGroup(id=_TASKS_GROUP, kind="manager", title="TASKS"))
            self.add_members(tasks, _TASKS_GROUP, is_sequential=False)
            self._edges.append(FlowEdge(source=_TASKS_GROUP, target=MANAGER_KEY, kind="unconditional"))
        title = "Manager" if manager is None else title_of(manager.description)
        self._nodes.append(FlowNode(id=MANAGER_KEY, kind="manager", title=title, agent=MANAGER_ROLE))
        for agent in self.dag.agents:
            if agent.role == MANAGER_ROLE:
                continue
            role = title_of(agent.role)
            worker = worker_id(agent.role)
            self._nodes.append(FlowNode(id=worker, kind="delegation", title=title_of(agent.goal), agent=role, rank=1))
            self._edges.append(FlowEdge(source=MANAGER_KEY, target=worker, kind="delegation"))


def _key(task: DagTaskNode) -> str:
    return task.id if task.key is None else task.key


def _kind(task: DagTaskNode) -> str:
    if task.node_type in _TREE_BADGES:
        return task.node_type
    return "handler" if task.agent_role == DETERMINISTIC else "task"


def _back_edges(dag: DagModel) -> set[tuple[str, str]]:
    """Return the edges to a state on the depth-first path to their source, in declared order."""
    leaving: dict[str, list[str]] = {task.id: [] for task in dag.tasks}
    for edge in dag.graph_edges:
        leaving[edge.from_state_id].append(edge.to_state_id)
    back: set[tuple[str, str]] = set()
    is_done: dict[str, bool] = {}
    for first in (dag.graph_start_state_id, *leaving):
        if first is None or first in is_done:
            continue
        is_done[first] = False
        way: list[tuple[str, Iterator[str]]] = [(first, iter(leaving[first]))]
        while way:
            state, targets = way[-1]
            target = next(targets, None)
            if target is None:
                is_done[state] = True
                way.pop()
            elif target not in is_done:
                is_done[target] = False
                way.append((target, iter(leaving[target])))
            elif not is_done[target] and target != state:
                back.add((state, target))
    return back


def _ranks(dag: DagModel, back: set[tuple[str, str]]) -> Mapping[str, int]:
    """Return the longest path to each state without back edges."""
    waits_for: dict[str, list[str]] = {task.id: [] for task in dag.tasks}
    for edge in dag.graph_edges:
        ends = (edge.from_state_id, edge.to_state_id)
        if ends not in back and ends[0] != ends[1]:
            waits_for[ends[1]].append(ends[0])
    ranks: dict[str, int] = {}
    for state in in_waiting_order(list(waits_for), waits_for):
        ranks[state] = 1 + max((ranks[before] for before in waits_for[state]), default=-1)
    return ranks


_NAMELESS = "<lambda>"
LEVEL_TITLES = {"map": "items", "reduce": "groups", "final-reduce": "the last group", "direct": "all items at once"}


def map_reduce_flow(definition: MapDefinition) -> Flow:
    """Return a graph with one node for each kind of task, before the run."""
    count = definition.item_source.count
    nodes = [_side(definition, "map", "map", count=count)]
    if not isinstance(definition, MapReduceDefinition):
        return Flow(nodes=tuple(nodes))
    nodes += [_side(definition, "reduce", "reduce"), _side(definition, "reduce", "final-reduce")]
    edges = [FlowEdge(source=one.id, target=other.id) for one, other in pairwise(nodes)]
    size = f"{definition.budget:,} tokens" if definition.budget else f"{definition.effective_chunk_size} outputs"
    edges.append(FlowEdge(source="reduce", target="reduce", kind="loop", label=f"groups of {size}"))
    if definition.direct_task is not None:
        nodes.append(_side(definition, "direct", "direct"))
    return Flow(nodes=tuple(nodes), edges=tuple(edges))


def _side(definition: MapDefinition, side: str, kind: str, *, count: int | None = None) -> FlowNode:
    factory = getattr(definition, f"{side}_task", None)
    task: Task | None = getattr(factory, "task", None)
    role = "" if task is None or task.agent is None else task.agent.role
    name = callable_name(factory)
    title = task.description if task is not None else LEVEL_TITLES[kind] if name == _NAMELESS else name
    return FlowNode(
        id=kind, kind=kind, title=title_of(title), agent=title_of(role), badges=tree_badges(kind, None), count=count
    )


def tally_flow(levels: Sequence[LevelTally]) -> Flow:
    nodes: list[FlowNode] = []
    for tally in levels:
        running = max(0, tally.total - tally.done - tally.failed)
        counts = {"completed": tally.done, "failed": tally.failed, "running": running}
        nodes.append(
            FlowNode(
                id=f"level:{tally.level}",
                kind=tally.node_type,
                title=LEVEL_TITLES.get(tally.node_type, tally.node_type),
                level=tally.level,
                rank=tally.level,
                counts={status: count for status, count in counts.items() if count},
                badges=tree_badges(tally.node_type, tally.level) or (tally.node_type.upper(),),
                count=tally.total,
            )
        )
    edges = [FlowEdge(source=one.id, target=other.id) for one, other in pairwise(nodes)]
    return Flow(nodes=tuple(nodes), edges=tuple(edges))
