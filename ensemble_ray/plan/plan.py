"""The plan of a run. Models, tools, handlers and types stay in the definition and are found by key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Literal, Union

from ensemble_ray.values.messages import JsonValue

if TYPE_CHECKING:
    from pydantic import TypeAdapter

#: No worker may have that role, so the key is unique.
MANAGER_KEY = "manager"
MANAGER_ROLE = "Manager"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopUnit:
    unit: Literal["loop"] = "loop"
    key: str
    name: str
    #: in declared order
    body: tuple[str, ...]
    #: in histories and events (S-LOOP-4), in the same order
    body_names: tuple[str, ...]
    #: its first task sees their outputs (S-LOOP-124)
    context: tuple[str, ...] = ()
    #: as `Node.context_tasks`
    context_tasks: tuple[str, ...] = ()
    #: at least 1, since every loop has a limit (S-LOOP-20)
    max_iterations: int = 5
    has_until: bool = False
    on_max_iterations: Literal["return_last", "throw", "return_with_flag"] = "return_last"
    output_mode: Literal["last_iteration", "final_task_only", "all_iterations"] = "last_iteration"
    memory_mode: Literal["accumulate", "fresh_per_iteration", "window"] = "accumulate"
    memory_window_size: int = 0
    #: of the body's tasks; empty if the ensemble has no store
    memory_scopes: tuple[str, ...] = ()
    inject_feedback: bool = True
    #: of all iterations together
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseUnit:
    unit: Literal["phase"] = "phase"
    key: str
    name: str
    #: tasks, then loops; in a sequential phase a task that waits for a loop follows it (S-LOOP-168)
    members: tuple[str, ...]
    workflow: Literal["sequential", "parallel"] = "sequential"
    after: tuple[str, ...] = ()
    #: None: every attempt is accepted
    review: str | None = None
    max_retries: int = 2
    max_predecessor_retries: int = 2
    #: tasks that reflect on an accepted attempt; without a review tasks reflect when they complete (S-REFL-19)
    reflecting: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StateEntry:
    name: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeEntry:
    """Edges are tried in declared order (S-GRAPH-42)."""

    entry: Literal["edge"] = "edge"
    from_state: str
    to_state: str
    label: str | None = None
    has_condition: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkEntry:
    entry: Literal["fork"] = "fork"
    from_state: str
    to_states: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinEntry:
    entry: Literal["join"] = "join"
    from_states: tuple[str, ...]
    to_state: str
    #: after so many arrivals the other branches are cancelled; None: all
    count: int | None = None


GraphEntry = Union[EdgeEntry, ForkEntry, JoinEntry]  # noqa: UP007  usable at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphUnit:
    unit: Literal["graph"] = "graph"
    key: str
    name: str
    #: in declared order
    states: tuple[StateEntry, ...]
    #: the position is the index of an edge
    edges: tuple[GraphEntry, ...]
    start: str
    max_steps: int = 50
    on_max_steps: Literal["return_last", "throw", "return_with_flag"] = "return_last"
    inject_feedback_on_revisit: bool = True
    no_feedback_states: tuple[str, ...] = ()


Unit = Union[LoopUnit, PhaseUnit, GraphUnit]  # noqa: UP007  usable at run time


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEntry:
    """An agent of the run."""

    key: str
    role: str
    goal: str
    background: str | None = None
    tool_names: tuple[str, ...] = ()
    is_synthesized: bool = False
    #: to the others (S-DEL-1)
    allow_delegation: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HierarchyRules:
    """Limits of a manager. Roles are spelled as the workers spell them."""

    required_workers: tuple[str, ...] = ()
    #: empty: all
    allowed_workers: tuple[str, ...] = ()
    max_calls_per_worker: Mapping[str, int] = field(default_factory=dict[str, int])
    #: 0: no limit
    global_max_delegations: int = 0
    required_stages: tuple[tuple[str, ...], ...] = ()
    #: `remind` or `fail`
    enforce_required: str = "remind"
    #: 0: no limit
    stall_turns: int = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A planned task."""

    #: the name, or the ordinal in the plan
    key: str
    #: 1-based, in the task list or in its level of a map-reduce (S-MR-95)
    index: int
    #: of the user's task, for the process that made the plan
    object_id: str = field(default="", compare=False)
    #: resolved
    description: str
    #: resolved
    expected_output: str
    #: `(deterministic)` for a handler, `(synthesized)` before synthesis (S-ENG-18)
    agent_role: str
    agent_key: str | None
    #: keys of context entries in the plan, in order
    context: tuple[str, ...] = ()
    #: the only body task that counts per entry; "": all its outputs. Empty: "" for all entries (S-LOOP-174)
    context_tasks: tuple[str, ...] = ()
    #: of context tasks outside the plan (S-ENG-11, S-PAR-13)
    context_outside: tuple[str, ...] = ()
    is_streaming: bool = False
    node_type: str | None = None
    level: int | None = None
    #: of the tasks that events count it among (S-LOOP-47, S-PHASE-38); None: all
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Order of work of a run, and its rules."""

    #: `sequential`, `parallel` or `hierarchical`
    workflow: str
    nodes: tuple[Node, ...]
    agents: tuple[AgentEntry, ...] = ()
    #: `fail_fast` or `continue_on_error`
    error_strategy: str = "fail_fast"
    #: None: no limit (S-PAR-17)
    max_parallel_tasks: int | None = None
    inputs: Mapping[str, str] = field(default_factory=dict[str, str])
    hierarchy: HierarchyRules | None = None
    shown_as: str | None = None
    #: in declared order; `nodes` contains their tasks after the plain tasks
    units: tuple[Unit, ...] = ()

    @property
    def shown_workflow(self) -> str:
        """Workflow for people: `graph`, `phases`, the name of a map-reduce, else `workflow`."""
        if any(isinstance(unit, GraphUnit) for unit in self.units):
            return "graph"
        if any(isinstance(unit, PhaseUnit) for unit in self.units):
            return "phases"
        return self.shown_as or self.workflow

    @property
    def top_level(self) -> tuple[str, ...]:
        """Keys of tasks and units that are in no other unit, in the order of a sequential run.

        Tasks come first, then units, as declared; but each follows its context.
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
        """Whether the order of completion affects names or inputs of later tasks.

        Branches of a graph number their steps as they start, and one of several phases may request a retry of another.
        """
        return self.has_forks or sum(isinstance(unit, PhaseUnit) for unit in self.units) > 1

    @property
    def has_levels(self) -> bool:
        """Whether the nodes are the tree of a map-reduce, ordered by levels."""
        return self.shown_as is not None

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the plan as JSON data, without the hidden ids, which have no meaning in other processes."""
        data: dict[str, JsonValue] = {name: getattr(self, name) for name in _PLAN_FIELDS}
        names = (*_NODE_FIELDS, *_LEVEL_FIELDS) if self.has_levels else _NODE_FIELDS
        data["nodes"] = [
            {name: getattr(node, name) for name in names}
            | ({} if node.total is None else {"total": node.total})
            | ({"context_tasks": node.context_tasks} if node.context_tasks else {})
            for node in self.nodes
        ]
        data["agents"] = [
            {name: getattr(agent, name) for name in _AGENT_FIELDS}
            | ({"allow_delegation": True} if agent.allow_delegation else {})
            for agent in self.agents
        ]
        if self.hierarchy is not None:
            data["hierarchy"] = asdict(self.hierarchy)
        if self.shown_as is not None:
            data["shown_as"] = self.shown_as
        if self.units:
            data["units"] = [
                {name: value for name, value in asdict(unit).items() if value or name != "reflecting"}
                for unit in self.units
            ]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, JsonValue]) -> Plan:
        """Return the plan that `to_dict` stored."""
        return _plan_adapter().validate_python(data)


def members_of(unit: Unit) -> tuple[str, ...]:
    """A loop counts as one member."""
    match unit:
        case LoopUnit():
            return unit.body
        case PhaseUnit():
            return unit.members if unit.review is None else (*unit.members, unit.review)
        case GraphUnit():
            return tuple(state.member for state in unit.states)


def in_waiting_order(keys: Sequence[str], waits_for: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return keys in stable topological order; keys in a cycle, which validation refuses, are omitted."""
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


@cache
def _plan_adapter() -> TypeAdapter[Plan]:
    from pydantic import TypeAdapter  # needed only by readers of records

    return TypeAdapter(Plan)


# `to_dict` uses `asdict` only for small parts, since it copies deeply and a plan may have thousands of nodes. It leaves out
# empty parts: a plan without delegation or levels keeps the form that it had before they existed, so that older recorded runs
# can be resumed.
_PLAN_FIELDS = tuple(entry.name for entry in fields(Plan) if entry.name not in {"hierarchy", "shown_as", "units"})
_LEVEL_FIELDS = ("node_type", "level")
_LEFT_OUT = {"object_id", "total", "context_tasks", *_LEVEL_FIELDS}
_NODE_FIELDS = tuple(entry.name for entry in fields(Node) if entry.name not in _LEFT_OUT)
_AGENT_FIELDS = tuple(entry.name for entry in fields(AgentEntry) if entry.name != "allow_delegation")
