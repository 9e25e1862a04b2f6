"""The plan: a frozen, JSON-able order of work.

Made from one definition and its inputs; holds no state and no callables. What cannot be data (models, tools,
handlers, types) stays in the definition and is found through the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal, Union

from ensemble_ray.values.messages import JsonValue

if TYPE_CHECKING:
    from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopUnit:
    """Tasks that are repeated in order until a predicate holds or a cap is reached (20)."""

    unit: Literal["loop"] = "loop"
    key: str
    name: str
    #: in declared order
    body: tuple[str, ...]
    #: names of the body in histories and events (S-LOOP-4), in the same order
    body_names: tuple[str, ...]
    #: tasks or units outside that it waits for, and whose outputs its first task is shown (S-LOOP-124)
    context: tuple[str, ...] = ()
    #: as `Node.context_tasks`
    context_tasks: tuple[str, ...] = ()
    #: at least 1; never None, since no loop is without a cap (S-LOOP-20)
    max_iterations: int = 5
    #: whether the user's predicate is asked after each iteration
    has_until: bool = False
    on_max_iterations: Literal["return_last", "throw", "return_with_flag"] = "return_last"
    output_mode: Literal["last_iteration", "final_task_only", "all_iterations"] = "last_iteration"
    memory_mode: Literal["accumulate", "fresh_per_iteration", "window"] = "accumulate"
    memory_window_size: int = 0
    #: names of the memory scopes that the body declares, each once; empty where the ensemble has no store
    memory_scopes: tuple[str, ...] = ()
    inject_feedback: bool = True
    #: tokens that its iterations may spend together; None: no limit
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUnit:
    """A named group of tasks and loops; phases form a dependency graph (21)."""

    unit: Literal["phase"] = "phase"
    key: str
    name: str
    #: tasks in declared order, then loops; in a sequential phase what waits for a loop stands behind it (S-LOOP-168)
    members: tuple[str, ...]
    workflow: Literal["sequential", "parallel"] = "sequential"
    #: keys of the phases that have to be completed first
    after: tuple[str, ...] = ()
    #: the task whose answer is the decision about an attempt; None: every attempt is accepted
    review: str | None = None
    max_retries: int = 2
    max_predecessor_retries: int = 2
    #: tasks inside of it whose outputs are reflected on when an attempt was accepted; without a review that is when they
    #: have completed, and nothing stands here (S-REFL-19)
    reflecting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    """A state of a graph."""

    name: str
    #: the task or the loop that is run at each visit
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeEntry:
    """From one state to the next; tried in declared order (S-GRAPH-42)."""

    entry: Literal["edge"] = "edge"
    from_state: str
    to_state: str
    label: str | None = None
    #: whether the user's condition is asked; else it matches always
    has_condition: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkEntry:
    """From one state to several that run side by side."""

    entry: Literal["fork"] = "fork"
    from_state: str
    to_states: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEntry:
    """From several branches to one state, when enough of them have arrived."""

    entry: Literal["join"] = "join"
    from_states: tuple[str, ...]
    to_state: str
    #: None: all; else as many as that, and the others are cancelled
    count: int | None = None


GraphEntry = Union[EdgeEntry, ForkEntry, JoinEntry]  # noqa: UP007  a name for the union, also at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphUnit:
    """A state machine of tasks (22)."""

    unit: Literal["graph"] = "graph"
    key: str
    name: str
    #: in declared order
    states: tuple[StateEntry, ...]
    #: in declared order; the index of one is its position here
    edges: tuple[GraphEntry, ...]
    start: str
    max_steps: int = 50
    on_max_steps: Literal["return_last", "throw", "return_with_flag"] = "return_last"
    inject_feedback_on_revisit: bool = True
    no_feedback_states: tuple[str, ...] = ()


Unit = Union[LoopUnit, PhaseUnit, GraphUnit]  # noqa: UP007  a name for the union, also at run time


def members_of(unit: Unit) -> tuple[str, ...]:
    """Return the keys of what runs inside a unit; of a loop in it the loop alone."""
    match unit:
        case LoopUnit():
            return unit.body
        case PhaseUnit():
            return unit.members if unit.review is None else (*unit.members, unit.review)
        case GraphUnit():
            return tuple(state.member for state in unit.states)


def in_waiting_order(keys: Sequence[str], waits_for: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the keys such that each stands behind those it waits for; the first that can go goes first.

    Args:
        keys: In declared order. What waits in a circle is left out; such definitions are refused.
        waits_for: Keys by key; those that are not among `keys` are waited for elsewhere.
    """
    listed = set(keys)
    waiting = {key: {each for each in waits_for.get(key, ()) if each in listed} for key in keys}
    rank = {key: position for position, key in enumerate(keys)}
    dependents: dict[str, list[str]] = {}
    for key, needed in waiting.items():
        for each in needed:
            dependents.setdefault(each, []).append(key)
    ready = [rank[key] for key in keys if not waiting[key]]
    ordered: list[str] = []
    while ready:
        key = keys[heappop(ready)]
        ordered.append(key)
        for dependent in dependents.get(key, ()):
            waiting[dependent].discard(key)
            if not waiting[dependent]:
                heappush(ready, rank[dependent])
    return tuple(ordered)


#: Key of the manager's task and of the manager itself; a worker of that role is refused, so nobody else has it.
MANAGER_KEY = "manager"
#: Role of every manager (S-HIER-3).
MANAGER_ROLE = "Manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEntry:
    """An agent that takes part."""

    key: str
    role: str
    goal: str
    background: str | None = None
    #: without injected tools
    tool_names: tuple[str, ...] = ()
    #: made for a task that named none
    is_synthesized: bool = False
    #: whether it may hand work to the others (S-DEL-1)
    allow_delegation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyRules:
    """What a manager is held to; roles as the workers have them (06)."""

    #: in the order in which violations are told
    required_workers: tuple[str, ...] = ()
    #: none: all
    allowed_workers: tuple[str, ...] = ()
    max_calls_per_worker: Mapping[str, int] = field(default_factory=dict[str, int])
    #: 0: no cap
    global_max_delegations: int = 0
    required_stages: tuple[tuple[str, ...], ...] = ()
    #: `remind` or `fail`
    enforce_required: str = "remind"
    #: turns without progress that end the run; 0: none do
    stall_turns: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A task in its place."""

    #: task key: the name, or the ordinal in the plan
    key: str
    #: 1-based position in the task list; with levels, in its level (S-MR-95)
    index: int
    #: hidden id of the user's task; for look-up in the process that made the plan
    object_id: str = field(default="", compare=False)
    #: resolved
    description: str
    #: resolved
    expected_output: str
    #: as shown: `(deterministic)` for handler tasks, `(synthesized)` before synthesis (S-ENG-18)
    agent_role: str
    #: None for a handler task
    agent_key: str | None
    #: keys of the context tasks that are in the plan, in the order of the task's context list
    context: tuple[str, ...] = ()
    #: of entries that are loops, in their places: the body task that alone is meant, by key; "": the whole unit. Empty: all
    #: entries are meant whole (S-LOOP-174)
    context_tasks: tuple[str, ...] = ()
    #: descriptions of context tasks that are not in the plan (S-ENG-11, S-PAR-13)
    context_outside: tuple[str, ...] = ()
    is_streaming: bool = False
    #: what it is in the tree of a map-reduce
    node_type: str | None = None
    #: in which level it stands there
    level: int | None = None
    #: how many tasks events count it among (S-LOOP-47, S-PHASE-38); None: all of the run
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run, in which order, under which rules."""

    #: `sequential`, `parallel` or `hierarchical`
    workflow: str
    nodes: tuple[Node, ...]
    agents: tuple[AgentEntry, ...] = ()
    #: `fail_fast` or `continue_on_error`
    error_strategy: str = "fail_fast"
    #: tasks that may run at the same time; None: no cap (S-PAR-17)
    max_parallel_tasks: int | None = None
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    #: of a hierarchical run
    hierarchy: HierarchyRules | None = None
    #: of a map-reduce: what its trace calls the workflow
    shown_as: str | None = None
    #: loops, phases and a graph, in declared order; the nodes hold the tasks of all of them, after the plain tasks
    units: tuple[Unit, ...] = ()

    @property
    def shown_workflow(self) -> str:
        """Return what people are told: `parallel`, of phases and a graph what they are, of a map-reduce its own name."""
        if any(isinstance(unit, GraphUnit) for unit in self.units):
            return "graph"
        if any(isinstance(unit, PhaseUnit) for unit in self.units):
            return "phases"
        return self.shown_as or self.workflow

    @property
    def top_level(self) -> tuple[str, ...]:
        """Keys of tasks and units that are in no other unit, in the order of a sequential run.

        That is: tasks, then units, as declared; what waits for one of them comes behind it.
        """
        if not self.units:
            return tuple(node.key for node in self.nodes)
        inside = {key for unit in self.units for key in members_of(unit)}
        waits_for = {node.key: node.context for node in self.nodes}
        waits_for |= {unit.key: unit.context if isinstance(unit, LoopUnit) else () for unit in self.units}
        return in_waiting_order([key for key in waits_for if key not in inside], waits_for)

    @property
    def has_forks(self) -> bool:
        """Whether branches of its graph run side by side."""
        graphs = (unit for unit in self.units if isinstance(unit, GraphUnit))
        return any(isinstance(entry, ForkEntry) for graph in graphs for entry in graph.edges)

    @property
    def depends_on_order(self) -> bool:
        """Whether the order in which tasks completed decides what others are called, or what they are given.

        So it is where branches of a graph run side by side, whose steps are numbered as they start, and where phases may send
        one phase back.
        """
        return self.has_forks or sum(isinstance(unit, PhaseUnit) for unit in self.units) > 1

    @property
    def has_levels(self) -> bool:
        """Whether the nodes are the tree of a map-reduce, in the order of levels."""
        return self.shown_as is not None

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the plan as JSON-able data, without the hidden ids: those mean nothing outside the planning process."""
        data: dict[str, JsonValue] = {name: getattr(self, name) for name in _PLAN_FIELDS}
        fields_of_nodes = (*_NODE_FIELDS, *_LEVEL_FIELDS) if self.has_levels else _NODE_FIELDS
        data["nodes"] = [_data_of_node(node, fields_of_nodes) for node in self.nodes]
        data["agents"] = [_data_of(agent) for agent in self.agents]
        if self.hierarchy is not None:
            data["hierarchy"] = asdict(self.hierarchy)
        if self.shown_as is not None:
            data["shown_as"] = self.shown_as
        if self.units:
            data["units"] = [_data_of_unit(unit) for unit in self.units]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, JsonValue]) -> Plan:
        """Return the plan that `to_dict` wrote."""
        return _plan_adapter().validate_python(data)


@cache
def _plan_adapter() -> TypeAdapter[Plan]:
    from pydantic import TypeAdapter  # only readers of records pay for it

    return TypeAdapter(Plan)


def _data_of_node(node: Node, names: Sequence[str]) -> dict[str, JsonValue]:
    data: dict[str, JsonValue] = {name: getattr(node, name) for name in names}
    if node.total is not None:
        data["total"] = node.total
    if node.context_tasks:
        data["context_tasks"] = node.context_tasks
    return data


def _data_of_unit(unit: Unit) -> dict[str, JsonValue]:
    data: dict[str, JsonValue] = asdict(unit)
    if not data.get("reflecting"):
        data.pop("reflecting", None)
    return data


def _data_of(agent: AgentEntry) -> dict[str, JsonValue]:
    data: dict[str, JsonValue] = {name: getattr(agent, name) for name in _AGENT_FIELDS}
    if agent.allow_delegation:
        data["allow_delegation"] = True
    return data


#: `asdict` copies every node deeply, and a plan may have many thousands. What says nothing is left out: a plan without
#: delegation or levels is the same data as before there was any, so that runs which were recorded then still go on.
_PLAN_FIELDS = tuple(entry.name for entry in fields(Plan) if entry.name not in {"hierarchy", "shown_as", "units"})
_LEVEL_FIELDS = ("node_type", "level")
_LEFT_OUT = {"object_id", "total", "context_tasks", *_LEVEL_FIELDS}
_NODE_FIELDS = tuple(entry.name for entry in fields(Node) if entry.name not in _LEFT_OUT)
_AGENT_FIELDS = tuple(entry.name for entry in fields(AgentEntry) if entry.name != "allow_delegation")
