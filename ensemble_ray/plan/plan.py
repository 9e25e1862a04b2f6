"""The plan: a frozen, JSON-able order of work. Package: plan.

Made from one definition and its inputs; holds no state and no callables. What cannot be data (models, tools,
handlers, types) stays in the definition and is found through the keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING

from ensemble_ray.plan.units import ForkEntry, GraphUnit, LoopUnit, PhaseUnit, Unit, in_waiting_order, members_of
from ensemble_ray.values.messages import JsonValue

if TYPE_CHECKING:
    from pydantic import TypeAdapter

__all__ = ["MANAGER_KEY", "MANAGER_ROLE", "AgentEntry", "HierarchyRules", "Node", "Plan"]

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
