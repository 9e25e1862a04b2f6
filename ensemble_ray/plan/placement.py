"""Placement of agents in groups of processes, and of orders on processes. Pure.

An agent is an id. A process needs up to a second to start, and 30 to 60 MB. Rules:
1. An agent with `isolation="process"` gets its own group.
2. All others are placed by category: agents without tools share a group, and so do agents with the same tools and model; role
   and prompts travel with the task.
3. Each category gets one of `max_own` groups. After that it joins the group with the fewest categories, so that no task waits
   for a process.
4. A group has as many processes as any of its agents requires. If one of them has no requirement, the group grows to the
   limit of the cluster under load, as long as the whole run has fewer than `max_own` processes.
5. Agents with requirements for their node share processes only with agents of equal requirements. Such a process may wait
   for its node. So a group starts the next process only after the last one has started, and its orders go to started ones.
6. An agent with tasks only before evaluations of a predicate is placed in the process of the predicates, if possible: a
   step of a loop or a graph then needs one round trip instead of two (S-LOOP-189).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from ensemble_ray.plan.plan import EdgeEntry, GraphUnit, LoopUnit, PhaseUnit, Plan
from ensemble_ray.values.ids import REDISPATCH_STEP

#: A group without a required number of processes grows when it has had more than `GROWS_ABOVE` tasks in flight for
#: `GROWS_AFTER_S` seconds (S-MR-141). Work that has lasted so long is expected to last as long again, which is more than the
#: start of a process costs. Measured on two processors with other load, 2,000 items of 200 ms, medians of two series: a second
#: process costs 0.2 to 0.3 s of processor time, and the wall time does not differ beyond noise.
GROWS_ABOVE = 64
GROWS_AFTER_S = 2.0
#: Deaths of processes after which an order fails.
MOST_DEATHS = 3
#: Most runs of a shared process.
MOST_RUNS = 64
#: Most processes of a group without a required number.
_MOST_REPLICAS = 8
#: Largest amount of cluster memory per process of a run, bytes.
_PROCESS_BYTES = 200_000_000
#: Prefix of groups that belong to one agent.
_OWN = "own:"
#: Tolerance when amounts are compared; Ray counts four decimal places.
_ROUNDING = 1e-6
#: Most kinds of nodes in a message.
_SHOWN = 5
_CHOICE = re.compile(r"(!?)in\((.*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequirements:
    """Requirements of one process for its node."""

    num_cpus: float = 0
    num_gpus: float = 0
    #: name -> amount, sorted
    resources: tuple[tuple[str, float], ...] = ()
    #: name -> value, sorted; as Ray's label selectors
    labels: tuple[tuple[str, str], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.num_cpus or self.num_gpus or self.resources or self.labels)

    def __str__(self) -> str:
        parts = [f"{name}={amount:g}" for name in ("num_cpus", "num_gpus") if (amount := getattr(self, name))]
        if self.resources:
            parts.append("resources={" + ", ".join(f"{name}: {amount:g}" for name, amount in self.resources) + "}")
        if self.labels:
            parts.append("labels={" + ", ".join(f"{name}: {value}" for name, value in self.labels) + "}")
        return ", ".join(parts)

    @property
    def amounts(self) -> dict[str, float]:
        """Required amounts by Ray's names."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **dict(self.resources)}
        return {name: amount for name, amount in amounts.items() if amount}


#: Requirements of a process that only waits for its models.
NOTHING = ResourceRequirements()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """Total resources of a node, in use or not."""

    #: Ray's id; empty for a node that does not exist yet
    node_id: str = ""
    resources: Mapping[str, float]
    #: None: unknown, for a node that an autoscaler may add
    labels: Mapping[str, str] | None = field(default_factory=dict[str, str])
    #: number of such nodes, at most
    count: float = 1

    def has(self, wanted: ResourceRequirements) -> bool:
        """Return whether a process with these requirements fits on the node if the node is otherwise empty."""
        has_amounts = all(self.resources.get(name, 0) + _ROUNDING >= amount for name, amount in wanted.amounts.items())
        return has_amounts and (self.labels is None or all(_matches(self.labels, *label) for label in wanted.labels))

    def __str__(self) -> str:
        amounts = {name: self.resources.get(name, 0) for name in ("CPU", "GPU")}
        # Ray adds resources for the node's name, its accelerators and its memory, which agents rarely require.
        hidden = ("node:", "accelerator_type:", "memory", "object_store_memory")
        amounts.update((name, amount) for name, amount in self.resources.items() if not name.startswith(hidden))
        shown = ", ".join(f"{name} {amount:g}" for name, amount in amounts.items())
        labels = ", ".join(f"{n}={v}" for n, v in sorted((self.labels or {}).items()) if not n.startswith("ray.io/"))
        return f"{shown}; {labels}" if labels else shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDemand:
    """Processes that exist at the same time."""

    #: in messages: `Agent 'Coder'`
    who: str
    requirements: ResourceRequirements
    count: int = 1


def find_obstacle(demands: Iterable[ProcessDemand], nodes: Sequence[ClusterNode]) -> str | None:
    """Return why these processes do not fit into an empty cluster together, with the cluster's resources; None if they do.

    The check adds up the resources of all nodes, and ignores how they are divided.
    """
    demanding = [demand for demand in demands if demand.requirements]
    for demand in demanding:
        if not any(node.has(demand.requirements) for node in nodes):
            return f"{demand.who} asks for {demand.requirements}, which no node has. {show_nodes(nodes)}"
    total: Counter[str] = Counter()
    for demand in demanding:
        for name, amount in demand.requirements.amounts.items():
            total[name] += amount * demand.count  # type: ignore[assignment]  # a Counter adds fractions as well
    for name, amount in total.items():
        total_there = sum(node.resources.get(name, 0) * node.count for node in nodes)
        if amount > total_there + _ROUNDING:
            who = ", ".join(dict.fromkeys(each.who for each in demanding if name in each.requirements.amounts))
            return f"{who}: the processes ask for {amount:g} {name} together, and the nodes have {total_there:g}. {show_nodes(nodes)}"
    return None


def room_for(requirements: ResourceRequirements, nodes: Sequence[ClusterNode]) -> float:
    """Return how many processes with these requirements fit on otherwise empty nodes; may be infinite."""
    amounts = requirements.amounts
    fitting = [node for node in nodes if node.has(requirements)]
    if not amounts:
        return float("inf") if fitting else 0
    return sum(
        min(int((node.resources[name] + _ROUNDING) / amount) for name, amount in amounts.items()) for node in fitting
    )


def least_used(nodes: Sequence[ClusterNode], processes: Mapping[str, int]) -> str:
    """Return the id of the node with the fewest processes per processor; nodes without processors come last."""
    working = [node for node in nodes if node.resources.get("CPU", 0)] or nodes
    return min(
        working, key=lambda each: (processes.get(each.node_id, 0) + 1) / max(each.resources.get("CPU", 0), 1)
    ).node_id


def show_nodes(nodes: Sequence[ClusterNode]) -> str:
    kinds = Counter(str(node) for node in nodes)
    shown = "; ".join(f"{count} x [{kind}]" for kind, count in kinds.most_common(_SHOWN))
    more = f" and {len(kinds) - _SHOWN} other kinds of nodes" if len(kinds) > _SHOWN else ""
    return f"The cluster has {shown or 'no node'}{more}"


def max_own_processes(cluster: Mapping[str, float], *, cpus_here: int) -> int:
    """Return how many processes a run may have: max(4, 2 x CPUs), at most one per 200 MB of memory."""
    cpus = int(cluster.get("CPU", cpus_here))
    memory_bytes = int(cluster.get("memory", 0))
    bound = max(1, memory_bytes // _PROCESS_BYTES) if memory_bytes else cpus * 2
    return max(1, min(max(4, 2 * cpus), bound))


def most_replicas(cluster: Mapping[str, float]) -> int:
    """Return the most processes of a group without a required number, on a cluster with these resources (S-MR-141)."""
    return max(1, min(_MOST_REPLICAS, int(cluster.get("CPU", 1))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """Properties of an agent that decide about its placement."""

    key: str
    #: agents of one category may share a process
    category: str
    isolation: str | None = None
    #: required number of processes; None: no requirement
    replicas: int | None = 1
    #: of its processes for their nodes
    requirements: ResourceRequirements = NOTHING


def find_beside_predicates(plan: Plan, requests: Iterable[PlacementRequest]) -> frozenset[str]:
    """Return the agents that live in the process of their run's predicates.

    All their tasks are in loops and graphs, and one of them is the last before a predicate. Tasks run one after the
    other, no agent may delegate, and these agents need no tools (which may block their process), isolation, replicas or
    resources.
    """
    is_side_by_side = plan.workflow != "sequential" or plan.depends_on_order
    for unit in plan.units:
        is_side_by_side = is_side_by_side or (isinstance(unit, PhaseUnit) and unit.workflow != "sequential")
    if is_side_by_side or any(each.allow_delegation for each in plan.agents):
        return frozenset()
    before_predicates: set[str] = set()
    repeated: set[str] = set()
    for unit in plan.units:
        if isinstance(unit, LoopUnit):
            repeated.update(unit.body)
            before_predicates.update(unit.body[-1:] if unit.has_until else ())
        elif isinstance(unit, GraphUnit):
            conditional = {
                entry.from_state for entry in unit.edges if isinstance(entry, EdgeEntry) and entry.has_condition
            }
            repeated.update(state.member for state in unit.states)
            before_predicates.update(state.member for state in unit.states if state.name in conditional)
    candidates = {node.agent_key for node in plan.nodes if node.key in before_predicates}
    elsewhere = {node.agent_key for node in plan.nodes if node.key not in repeated}
    with_tools = {each.key for each in plan.agents if each.tool_names}
    modest = {
        each.key for each in requests if each.isolation is None and each.replicas in {None, 1} and not each.requirements
    }
    return frozenset(key for key in candidates - elsewhere - with_tools if key in modest)


class Placement:
    """Groups of processes of a run, and their agents. Agents may be added and removed during the run."""

    def __init__(self, *, max_own: int, most_replicas: int) -> None:
        self._max_own = max_own
        self._most_replicas = most_replicas
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}
        #: shared group by category and requirements
        self._shared: dict[tuple[str, ResourceRequirements], str] = {}

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups, in the order of their creation."""
        return tuple(self._groups)

    def __contains__(self, key: str) -> bool:
        return key in self._group_of

    def group_of(self, key: str) -> str:
        return self._group_of[key]

    def members(self, group: str) -> tuple[str, ...]:
        return tuple(self._groups[group].members)

    def requirements_of(self, group: str) -> ResourceRequirements:
        return self._groups[group].requirements

    def is_isolated(self, group: str) -> bool:
        """Return whether an agent of a group requires processes that no other agent uses."""
        return any(request.isolation == "process" for request in self._groups[group].members.values())

    def begins_with(self, group: str) -> int:
        return self._groups[group].required

    def resize(self, *, max_own: int, most_replicas: int) -> None:
        """Set new limits after a change of the cluster; placed agents stay in their groups."""
        self._max_own, self._most_replicas = max_own, most_replicas

    def place(self, requests: Iterable[PlacementRequest]) -> None:
        """Place agents that became known at the same time; an agent with a group keeps it."""
        new = [request for request in requests if request.key not in self._group_of]
        for request in new:
            group = f"{_OWN}{request.key}" if request.isolation == "process" else self._share(request)
            self._group_of[request.key] = group
            self._groups.setdefault(group, _Group(request.requirements)).members[request.key] = request

    def release(self, key: str) -> str | None:
        """Remove an agent that is not needed any more. Return its group if the group ends with it."""
        group = self._group_of.pop(key, None)
        if group is None:
            return None  # it never had a task
        request = self._groups[group].members.pop(key)
        if group.startswith(_OWN):
            del self._groups[group]
            return group
        if request.category not in self._groups[group].categories:
            del self._shared[request.category, request.requirements]
        return None  # other agents use its processes

    def missing(
        self,
        group: str,
        *,
        alive: int,
        in_flight: int,
        in_run: int,
        busy_s: float = 0.0,
        starting: int = 0,
        room: float = math.inf,
    ) -> int:
        """Return how many processes to add to a group now.

        `in_flight` are tasks that its `alive` processes have, or will receive next; for `busy_s` they were more than
        `GROWS_ABOVE`; `in_run` are processes of all groups;
        `starting` ones have not started yet, or wait for a node; `room` for its processes is on the nodes.
        """
        found = self._groups[group]
        needed = max(0, found.required - alive)
        is_open = any(request.replicas is None for request in found.members.values())
        if is_open and in_flight > GROWS_ABOVE and busy_s >= GROWS_AFTER_S:
            free_slots = max(0, self._max_own - in_run - needed)
            needed += min(free_slots, max(0, int(min(self._most_replicas, room)) - alive - needed))
        return needed if not found.requirements else min(needed, 0 if starting else 1)

    def _share(self, request: PlacementRequest) -> str:
        """Return the group of a category: an empty one, else a new one within the limit, else the one with the fewest."""
        kind = (request.category, request.requirements)
        if kind not in self._shared:
            shared = [name for name in self._groups if not name.startswith(_OWN)]
            fitting = [name for name in shared if self._groups[name].requirements == request.requirements]
            sizes = {name: len(self._groups[name].categories) for name in fitting}
            emptiest = min(sizes, key=sizes.__getitem__, default=None)
            if emptiest is None or (sizes[emptiest] and len(shared) < self._max_own):
                emptiest = f"shared:{len(shared)}"
            self._shared[kind] = emptiest
        return self._shared[kind]


@dataclass(slots=True)
class _Group:
    requirements: ResourceRequirements
    #: by agent key
    members: dict[str, PlacementRequest] = field(default_factory=dict[str, PlacementRequest])

    @property
    def categories(self) -> set[str]:
        return {request.category for request in self.members.values()}

    @property
    def required(self) -> int:
        return max((request.replicas or 1 for request in self.members.values()), default=1)


@dataclass(frozen=True, slots=True)
class RedispatchDecision:
    """Handling of the orders of a process that died."""

    #: orders to dispatch again, with their new epoch from the table
    to_retry: Sequence[str]
    #: orders that fail; `abandon` selects the ones to report
    hopeless: Sequence[str]


@dataclass(slots=True)
class _Dispatch:
    process: str
    epoch: int
    #: processes that died with it
    deaths: int = 0
    #: whether it is to end
    is_stopped: bool = False
    #: whether it will be reported in place of its process
    is_abandoned: bool = False


@dataclass(slots=True)
class DispatchTable:
    """Dispatched orders without a report, by instance. Processes are names."""

    #: whether another process can continue an order
    is_recorded: bool
    _dispatches: dict[str, _Dispatch] = field(default_factory=dict[str, _Dispatch])
    #: orders by process
    _busy: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def __len__(self) -> int:
        return len(self._dispatches)

    def record_dispatch(self, instance: str, epoch: int, process: str) -> None:
        """Store that a process received an order, perhaps after another process had it."""
        held = self._dispatches.get(instance)
        if held is None:
            self._dispatches[instance] = _Dispatch(process, epoch)
        else:
            self._busy.get(held.process, set()).discard(instance)
            held.process, held.epoch = process, epoch
        self._busy.setdefault(process, set()).add(instance)

    def count_death(self, instance: str) -> None:
        """Count a process that died with an order which it had started by itself."""
        self._dispatches[instance].deaths += 1

    def epoch_of(self, instance: str) -> int | None:
        """Return the epoch of an order's newest dispatch, or None after its report."""
        held = self._dispatches.get(instance)
        return None if held is None else held.epoch

    def process_of(self, instance: str) -> str | None:
        held = self._dispatches.get(instance)
        return None if held is None else held.process

    def deaths_of(self, instance: str) -> int:
        held = self._dispatches.get(instance)
        return 0 if held is None else held.deaths

    def is_stopped(self, instance: str) -> bool:
        held = self._dispatches.get(instance)
        return held is not None and held.is_stopped

    def load(self, process: str) -> int:
        return len(self._busy.get(process, ()))

    def orders_of(self, process: str, *, most: int | None = None) -> list[str]:
        return list(islice(self._busy.get(process, ()), most))

    def stop(self, instances: Iterable[str]) -> dict[str, list[str]]:
        """Mark orders as to be ended; return the dispatched ones by process."""
        found: dict[str, list[str]] = {}
        for instance in instances:
            held = self._dispatches.get(instance)
            if held is not None:
                held.is_stopped = True
                found.setdefault(held.process, []).append(instance)
        return found

    def stuck(self, instances: Iterable[str] | None = None) -> list[str]:
        """Return the processes with orders (None: any) that were to end."""
        names = self._dispatches if instances is None else instances
        held = (self._dispatches[name] for name in names if self.is_stopped(name))
        return list(dict.fromkeys(dispatch.process for dispatch in held))

    def report(self, instance: str, epoch: int) -> bool:
        """Return whether a report counts; then the order is removed."""
        held = self._dispatches.get(instance)
        if held is None or held.epoch != epoch:
            return False  # another process has the order now
        self._busy.get(held.process, set()).discard(instance)
        del self._dispatches[instance]
        return True

    def mark_lost(self, process: str) -> RedispatchDecision:
        """Handle the death of a process. A second call for the same process finds no orders."""
        self._busy.pop(process, None)
        to_retry: list[str] = []
        hopeless: list[str] = []
        for instance, held in self._dispatches.items():
            if held.process != process or held.is_abandoned:
                continue
            held.deaths += 1
            if not self.is_recorded or held.deaths >= MOST_DEATHS or held.is_stopped:
                hopeless.append(instance)
            else:
                held.epoch += REDISPATCH_STEP
                to_retry.append(instance)
        return RedispatchDecision(to_retry, hopeless)

    def abandon(self, process: str, instances: Iterable[str]) -> list[str]:
        """Return the given-up orders of a process to report in its place; each order only once."""
        abandoned: list[str] = []
        for instance in instances:
            held = self._dispatches.get(instance)
            if held is not None and held.process == process and not held.is_abandoned:
                held.is_abandoned = True
                abandoned.append(instance)
        self._busy.get(process, set()).difference_update(abandoned)
        return abandoned

    def forget_process(self, process: str) -> None:
        self._busy.pop(process, None)


def shard_of(run_id: str, shards: int) -> int:
    """Return the number of the scheduler of a run, from 0; it is the same in every process."""
    return int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8]) % shards


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedProcess:
    """Properties of a process that several runs may share."""

    name: str
    #: ids of its runs
    runs: frozenset[str]
    #: its tasks, for all runs
    tasks: int

    @property
    def load(self) -> int:
        """Its load: a run without a task now will have one soon, so it counts too."""
        return len(self.runs) + self.tasks


def choose_shared(run_id: str, processes: Iterable[SharedProcess], *, most: int) -> str | None:
    """Return the process that a run joins, of candidates of its program and type; None: it gets a new one."""
    known = list(processes)
    if len(known) < most:
        return None
    open_ = [each for each in known if run_id not in each.runs and len(each.runs) < MOST_RUNS]
    return min(open_, key=lambda each: each.load).name if open_ else None


def _matches(labels: Mapping[str, str], name: str, selector: str) -> bool:
    """Return whether a node's labels fit a selector of Ray: `a`, `!a`, `in(a, b)` or `!in(a, b)`."""
    choice = _CHOICE.fullmatch(selector)
    is_not, values = (choice[1], choice[2].split(",")) if choice else (selector[:1], [selector.removeprefix("!")])
    is_in = labels.get(name) in {value.strip() for value in values}
    return is_in is not (is_not == "!")
