"""The graph of a run, as a `Flow` whose nodes have the ids of the steps. Pure.

1. Each execution of a task is a node. Executions of a loop or phase are frames inside the frame of their unit; a single one
   is the frame itself. Of many executions the first and last ones are shown, and one node replaces the others.
2. Dependencies of the plan are edges inside a frame; in a sequential one each step precedes the next.
3. Each step of a graph is connected with the newest earlier step whose state has an edge to its state.
4. Without a plan, each level of a map-reduce is a node, connected with the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.plan.plan import EdgeEntry, ForkEntry, GraphUnit, JoinEntry, LoopUnit, PhaseUnit, Plan
from ensemble_ray.values.ids import delegating_call, key_of, node_key
from ensemble_ray.visualization.declared import LEVEL_TITLES, title_of, tree_badges
from ensemble_ray.visualization.flow import (
    TREE_KINDS,
    EdgeKind,
    Flow,
    FlowEdge,
    FlowGroup,
    FlowNode,
    GroupKind,
    PathStep,
    fold_flow,
    mark_path,
    shared_title,
)

_CONTAINERS = frozenset({"loop", "iteration", "phase", "attempt", "graph", "state", "fork"})
_NOT_BEGUN = frozenset({"pending", "ready"})
#: If a unit has more executions than the first number, the second is shown at the beginning and at the end.
_MAX_EXECUTIONS, _SHOWN_OF_MANY = 12, 3
_SEQUENTIAL = "sequential"
_EXECUTION_WORDS: Mapping[GroupKind, str] = {"loop": "iteration", "phase": "attempt", "graph": "step"}


def ran_flow(
    steps: Iterable[FlowNode], plan: Plan | None = None, *, workflow: str = "", item_count: int | None = None
) -> Flow:
    """Return the graph of a run. `item_count` is the number of items of a map-reduce without a plan, if known."""
    flow = _whole_flow(steps, plan, workflow, item_count)
    return mark_path(fold_flow(flow), _critical_path(flow))


def critical_path(steps: Iterable[FlowNode], plan: Plan | None = None, *, workflow: str = "") -> list[PathStep]:
    """Return the steps that determine the end of a run, the first one first (S-VIZ-90). An active run has none."""
    return _critical_path(_whole_flow(steps, plan, workflow))


def _whole_flow(steps: Iterable[FlowNode], plan: Plan | None, workflow: str, item_count: int | None = None) -> Flow:
    rules = _Rules(plan, workflow)
    leaves = [
        step
        for step in steps
        if step.kind not in _CONTAINERS
        and (step.status not in _NOT_BEGUN or (step.kind in TREE_KINDS and not rules.has_plan))
    ]
    maker = _Maker(rules, item_count)
    root = _Scope(path="")
    for step in leaves:
        maker.insert(step, root)
    maker.add(root, None)
    return Flow(nodes=tuple(maker.nodes), edges=tuple(maker.edges), groups=tuple(maker.groups))


_ACTIVE, _STOPPED = frozenset({"running", "waiting"}), frozenset({"skipped", "cancelled"})


def _critical_path(flow: Flow) -> list[PathStep]:
    path = _Path(flow)
    is_active = any(node.status in _ACTIVE or not _ACTIVE.isdisjoint(node.counts) for node in flow.nodes)
    found = [] if is_active else path.steps()
    # A path over all steps has no meaning.
    return found if len(found) < len(path.ended) else []


class _Path:
    """Walks back from the step that ended last: each time to the dependency that ended last before the step began."""

    def __init__(self, flow: Flow) -> None:
        #: Steps that ended by themselves, in the order of their start, with the instants of their start and end.
        self.ended = {
            node.id: (node.ended_at if node.started_at is None else node.started_at, node.ended_at)
            for node in flow.nodes
            if node.ended_at is not None and node.status not in _STOPPED
        }
        self._places = {each: place for place, each in enumerate(self.ended)}
        self._nodes = {node.id: node for node in flow.nodes}
        self._parents = {group.id: group.parent for group in flow.groups}
        self._inside: dict[str, list[str]] = {}  # ended steps of a frame
        for each in self.ended:
            for group in self._around(each)[1:]:
                self._inside.setdefault(group, []).append(each)
        self._sources: dict[str, list[str]] = {}
        self._delegated: dict[str, list[str]] = {}
        for edge in flow.edges:
            if edge.kind != "delegation":
                self._sources.setdefault(edge.target, []).append(edge.source)
            elif edge.target in self.ended:
                self._delegated.setdefault(edge.source, []).append(edge.target)

    def steps(self) -> list[PathStep]:
        delegated = {each for found in self._delegated.values() for each in found}
        at = self._latest(each for each in self.ended if each not in delegated)
        path: list[str] = []
        while at is not None and at not in path:
            path.insert(0, at)
            at = self._latest_before(at)
        steps: list[PathStep] = []
        before: Sequence[str] = ()
        for each in path:
            own = self._ids(each)
            steps += [(before, own), *self._delegations(each)]
            before = own
        return steps

    def _delegations(self, step: str) -> list[PathStep]:
        """Return the delegated work that the delegating step waited for."""
        found: list[PathStep] = []
        earlier = self._delegated.get(step, [])
        while (at := self._latest(earlier)) is not None:
            found = [(self._ids(step), self._ids(at)), *self._delegations(at), *found]
            begun = self.ended[at][0]
            earlier = [each for each in earlier if each != at and self.ended[each][1] <= begun]
        return found

    def _latest_before(self, step: str) -> str | None:
        sources = [source for each in self._around(step) for source in self._sources.get(each, ())]
        known = [each for source in sources for each in self._inside.get(source, [source]) if each in self.ended]
        begun = self.ended[step][0]
        # Clocks of several machines differ: without an earlier one, the last one counts.
        return self._latest(each for each in known if self.ended[each][1] <= begun) or self._latest(known)

    def _latest(self, steps: Iterable[str]) -> str | None:
        """Return the step that ended last. If several ended in one instant, return their latest start."""
        return max(steps, key=lambda each: (self.ended[each][1], self.ended[each][0], self._places[each]), default=None)

    def _around(self, step: str) -> list[str]:
        """Return a step and its frames, from inside to outside."""
        found, group = [step], self._nodes[step].group
        while group is not None:
            found.append(group)
            group = self._parents[group]
        return found

    def _ids(self, step: str) -> Sequence[str]:
        return self._nodes[step].folded or (step,)


class _Rules:
    def __init__(self, plan: Plan | None, workflow: str) -> None:
        units = () if plan is None else plan.units
        self.waits_for: dict[str, Sequence[str]] = {} if plan is None else {n.key: n.context for n in plan.nodes}
        self.has_plan = plan is not None and plan.hierarchy is None
        self._sequential = {""} if (workflow if plan is None else plan.workflow) == _SEQUENTIAL else set[str]()
        self.graphs: dict[str, GraphUnit] = {}
        self.loops: dict[str, LoopUnit] = {}
        for unit in units:
            match unit:
                case LoopUnit():
                    self.loops[unit.key] = unit
                    self.waits_for[unit.key] = unit.context
                case PhaseUnit():
                    self.waits_for[unit.key] = unit.after
                    self._sequential.discard("")
                    if unit.workflow == _SEQUENTIAL:
                        self._sequential.add(unit.key)
                case GraphUnit():
                    self.graphs[unit.key] = unit
                    self._sequential.discard("")

    def is_sequential(self, path: str) -> bool:
        """Whether steps run one by one; "": outside of all units."""
        key = node_key(path)
        return key in self._sequential or key.startswith("loop:")


class _Scope(Struct, kw_only=True):
    """An execution of a unit, or the part outside of all units."""

    path: str
    #: steps, and units by their paths without occurrence
    members: dict[str, FlowNode | _Unit] = msgspec.field(default_factory=dict[str, "FlowNode | _Unit"])


class _Unit(Struct, kw_only=True):
    path: str  # `loop:refine`, or `graph:triage#3/loop:refine`
    executions: dict[str, _Scope] = msgspec.field(default_factory=dict[str, _Scope])

    def steps(self) -> Iterable[FlowNode]:
        for scope in self.executions.values():
            for member in scope.members.values():
                if isinstance(member, FlowNode):
                    yield member
                else:
                    yield from member.steps()


class _Maker(Struct):
    rules: _Rules
    item_count: int | None = None
    nodes: list[FlowNode] = msgspec.field(default_factory=list[FlowNode])
    edges: list[FlowEdge] = msgspec.field(default_factory=list[FlowEdge])
    groups: list[FlowGroup] = msgspec.field(default_factory=list[FlowGroup])
    _delegated: dict[str, list[FlowNode]] = msgspec.field(
        default_factory=dict[str, list[FlowNode]]
    )  # by their delegating step

    def insert(self, step: FlowNode, root: _Scope) -> None:
        call = delegating_call(step.id)
        if call is not None:
            self._delegated.setdefault(call.rsplit("/", 2)[0], []).append(step)
            return
        scope = root
        path = ""
        for part in step.id.split("/")[:-1]:
            path = f"{path}/{part}" if path else part
            unit_path = key_of(path)
            unit = scope.members.setdefault(unit_path, _Unit(path=unit_path))
            if isinstance(unit, FlowNode):
                return
            scope = unit.executions.setdefault(path, _Scope(path=path))
        scope.members[step.id] = step

    def add(self, scope: _Scope, group: str | None) -> list[str]:
        """Add the content of an execution; return the ids of its nodes and frames."""
        members = scope.members
        if not self.rules.has_plan and any(
            isinstance(each, FlowNode) and each.level is not None for each in members.values()
        ):
            return self._add_levels([each for each in members.values() if isinstance(each, FlowNode)])
        ranks = _ranks(members, self.rules, is_sequential=self.rules.is_sequential(scope.path))
        shown: dict[str, str] = {}
        for path, member in members.items():
            if isinstance(member, FlowNode):
                self._add_step(member, group, rank=ranks[path])
                shown[path] = member.id
            else:
                shown[path] = self._add_unit(member, group, rank=ranks[path])
        self._connect(scope, shown)
        return list(shown.values())

    def _connect(self, scope: _Scope, shown: Mapping[str, str]) -> None:
        """Add edges between members (rule 2)."""
        by_key = {_key(path): name for path, name in shown.items()}
        known: set[tuple[str, str]] = set()
        for path, name in shown.items():
            for before in self.rules.waits_for.get(_key(path), ()):
                if before in by_key and by_key[before] != name:
                    known.add((by_key[before], name))
                    self.edges.append(FlowEdge(source=by_key[before], target=name))
        if self.rules.is_sequential(scope.path):
            self.edges += [
                FlowEdge(source=source, target=target, kind="unconditional")
                for source, target in pairwise(shown.values())
                if (source, target) not in known
            ]

    def _add_step(self, step: FlowNode, group: str | None, *, rank: int, badges: tuple[str, ...] = ()) -> None:
        badges = badges or tree_badges(step.kind, step.level)
        title, agent = title_of(step.title), title_of(step.agent)
        self.nodes.append(replace(step, title=title, agent=agent, rank=rank, group=group, badges=badges))
        for worker in self._delegated.get(step.id, ()):
            self._add_step(worker, group, rank=rank + 1)
            self.edges.append(FlowEdge(source=step.id, target=worker.id, kind="delegation"))

    def _add_levels(self, steps: Sequence[FlowNode]) -> list[str]:
        """Add a node for each level of a map-reduce (rule 4)."""
        places: dict[tuple[int, int], list[FlowNode]] = {}
        is_direct = any(step.kind == "direct" for step in steps)  # then no item is mapped
        for step in steps:
            if step.kind in TREE_KINDS and not (is_direct and step.kind == "map"):
                places.setdefault((step.level or 0, TREE_KINDS.index(step.kind)), []).append(step)
        names: list[str] = []
        for (level, _), found in sorted(places.items(), key=lambda place: place[0]):
            first = found[0]
            total = max(len(found), self.item_count or 0) if first.kind == "map" else len(found)
            if total == 1:
                self._add_step(first, None, rank=level)
                names.append(first.id)
            else:
                self.nodes.append(_level_node(found, total))
                names.append(self.nodes[-1].id)
        self.edges += [FlowEdge(source=source, target=target) for source, target in pairwise(names)]
        return names

    # Units.

    def _add_unit(self, unit: _Unit, group: str | None, *, rank: int) -> str:
        """Return the id of the unit's frame."""
        graph = self.rules.graphs.get(node_key(f"{unit.path}#0"))
        what, _, name = _key(unit.path).partition(":")
        kind: GroupKind = "phase" if what == "phase" else "graph" if what == "graph" else "loop"
        scopes = list(unit.executions.values())
        is_single = len(scopes) == 1 and graph is None
        frame = scopes[0].path if is_single else unit.path
        title = f"{kind.upper()} {title_of(name)}"
        if (loop := self.rules.loops.get(_key(unit.path))) is not None:
            title = f"LOOP {title_of(loop.name)}, {len(scopes)} of {loop.max_iterations}"
        self.groups.append(FlowGroup(id=frame, kind=kind, title=title, parent=group))
        if graph is not None:
            self._add_states(scopes, frame, graph)
        elif is_single:
            self.add(scopes[0], frame)
        else:
            self._add_executions(unit, scopes, frame, kind, rank=rank)
        return frame

    def _add_executions(self, unit: _Unit, scopes: Sequence[_Scope], frame: str, kind: GroupKind, *, rank: int) -> None:
        """Follow rule 1."""
        word = _EXECUTION_WORDS[kind]
        is_long = len(scopes) > _MAX_EXECUTIONS
        first, last = (_SHOWN_OF_MANY, len(scopes) - _SHOWN_OF_MANY) if is_long else (len(scopes), len(scopes))
        names: list[str] = []
        for number, scope in enumerate(scopes, start=1):
            if first < number <= last:
                continue
            self.groups.append(FlowGroup(id=scope.path, kind=kind, title=f"{word} {number}", parent=frame))
            self.add(scope, scope.path)
            names.append(scope.path)
            if is_long and number == first:
                between = _Unit(path=unit.path, executions={each.path: each for each in scopes[first:last]})
                names.append(self._add_between(between, frame, f"{word}s {first + 1} to {last}", rank=rank))
        way: EdgeKind = "unconditional" if kind == "graph" else "loop"
        self.edges += [FlowEdge(source=source, target=target, kind=way) for source, target in pairwise(names)]

    def _add_between(self, unit: _Unit, frame: str, title: str, *, rank: int) -> str:
        steps = list(unit.steps())
        self.nodes.append(
            FlowNode(
                id=f"{frame}..more",
                kind="task",
                title=title,
                rank=rank,
                group=frame,
                folded=tuple(step.id for step in steps),
                counts=Counter(step.status or "" for step in steps),
                started_at=min((step.started_at for step in steps if step.started_at is not None), default=None),
                ended_at=max((step.ended_at for step in steps if step.ended_at is not None), default=None),
            )
        )
        return self.nodes[-1].id

    # Graphs.

    def _add_states(self, scopes: Sequence[_Scope], frame: str, graph: GraphUnit) -> None:
        """Follow rule 3."""
        states = {state.member: state.name for state in graph.states}
        visits: list[tuple[str, str]] = []
        for number, scope in enumerate(scopes, start=1):
            for path, member in scope.members.items():
                state = states.get(_key(path), _key(path))
                if isinstance(member, FlowNode):
                    name = member.id
                    named = replace(member, title=f"{state}: {member.title}")
                    self._add_step(named, frame, rank=number, badges=(f"STEP {number}",))
                else:
                    name = self._add_unit(member, frame, rank=number)
                visits.append((state, name))
        leads = [(source, target) for entry in graph.edges for source, target in _ends(entry)]
        joins = {entry.to_state: entry.from_states for entry in graph.edges if isinstance(entry, JoinEntry)}
        newest: dict[str, tuple[int, str]] = {}
        for number, (state, name) in enumerate(visits):
            before = [newest[source] for source, target in leads if target == state and source in newest]
            chosen = {newest[source] for source in joins.get(state, ()) if source in newest}
            chosen.update([max(before)] if before else [])
            self.edges += [
                FlowEdge(source=source, target=name, kind="unconditional", fired=True) for _, source in sorted(chosen)
            ]
            newest[state] = number, name


def _level_node(steps: Sequence[FlowNode], total: int) -> FlowNode:
    """Return the node of a level. Its id is the same while the level grows."""
    first = steps[0]
    titles = [
        title_of(step.title) for step in steps if step.title != node_key(step.id)
    ]  # a task has its text at its end
    agents = {step.agent for step in steps if step.agent}
    counts = Counter(step.status or "" for step in steps)
    done = [step for step in steps if step.ended_at is not None and step.status not in _STOPPED]
    if total > len(steps):
        counts["pending"] += total - len(steps)
    return FlowNode(
        id=f"level:{first.level}:{first.kind}",
        kind=first.kind,
        title=(shared_title(titles) if len(titles) > 1 else None) or LEVEL_TITLES[first.kind],
        agent=f"{len(agents)} agents" if len(agents) > 1 else title_of("".join(agents)),
        level=first.level,
        rank=first.level or 0,
        counts=counts,
        count=total,
        started_at=min((step.started_at for step in done if step.started_at is not None), default=None),
        ended_at=max((step.ended_at for step in done if step.ended_at is not None), default=None),
        badges=tree_badges(first.kind, first.level),
    )


def _ends(entry: EdgeEntry | ForkEntry | JoinEntry) -> list[tuple[str, str]]:
    match entry:
        case EdgeEntry():
            return [(entry.from_state, entry.to_state)]
        case ForkEntry():
            return [(entry.from_state, state) for state in entry.to_states]
        case JoinEntry():
            return [(state, entry.to_state) for state in entry.from_states]


def _key(path: str) -> str:
    """Return the key in an instance, or in the path of a unit, which has no occurrence at its end."""
    last = path.rpartition("/")[2]
    return last.rpartition("#")[0] if "#" in last else last


def _ranks(members: Mapping[str, FlowNode | _Unit], rules: _Rules, *, is_sequential: bool) -> Mapping[str, int]:
    """Return the longest dependency chain before each member; in a sequential frame its position."""
    if is_sequential:
        return {path: position for position, path in enumerate(members)}
    ranks: dict[str, int] = {}
    by_key: dict[str, int] = {}
    for path in members:
        before = [by_key[each] for each in rules.waits_for.get(_key(path), ()) if each in by_key]
        ranks[path] = by_key[_key(path)] = 1 + max(before, default=-1)
    return ranks
