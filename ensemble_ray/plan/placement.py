"""Placement of agents in groups of processes, and of orders on processes.

A process needs up to a second to start, and 30 to 60 MB. Rules:
1. An agent with `isolation="process"` gets its own group.
2. All others are placed by category: agents without tools, or with the same tools and model, share a group.
3. Each category gets one of `max_own` groups. After that it joins the group with the fewest categories, so that no task
   waits for a process.
4. A group has as many processes as any of its agents requires. If one of them has no requirement, the group grows under
   load to the limit of the cluster, as long as the whole run has fewer than `max_own` processes.
5. Agents with requirements for their node share processes only with agents of equal requirements. A group starts such
   processes one after the other, since each may wait for its node.
6. An agent with tasks only before predicates is placed in the process of the predicates, if possible: a step of a loop or
   a graph then needs one round trip instead of two (S-LOOP-189).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

import msgspec
from msgspec import Struct

from ensemble_ray.plan.plan import EdgeEntry, GraphUnit, LoopUnit, PhaseUnit, Plan
from ensemble_ray.values.ids import REDISPATCH_STEP

#: A group without a required number of processes grows when it has had more than `GROWS_ABOVE` tasks in flight for
#: `GROWS_AFTER_S` seconds (S-MR-141), since such work is expected to last as long again. Measured for 2,000 items of 200 ms
#: on two processors: a second process costs 0.2 to 0.3 s of processor time, and the wall time does not differ.
GROWS_ABOVE = 64
GROWS_AFTER_S = 2.0
MOST_DEATHS = 3
MOST_RUNS = 64
#: of a group without a required number
_MOST_REPLICAS = 8
#: of cluster memory per process of a run
_PROCESS_BYTES = 200_000_000
_OWN = "own:"
#: Ray counts four decimal places.
_ROUNDING = 1e-6
_SHOWN = 5
_CHOICE = re.compile(r"(!?)in\((.*)\)")


class ResourceRequirements(Struct, frozen=True, kw_only=True):
    num_cpus: float = 0
    num_gpus: float = 0
    #: sorted by name
    resources: tuple[tuple[str, float], ...] = ()
    #: sorted by name; as Ray's label selectors
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
        """By Ray's names."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **dict(self.resources)}
        return {name: amount for name, amount in amounts.items() if amount}


NOTHING = ResourceRequirements()


class ClusterNode(Struct, frozen=True, kw_only=True):
    """Total resources of a node, in use or not."""

    #: empty for a node that does not exist yet
    node_id: str = ""
    resources: Mapping[str, float]
    #: None: unknown, for a node that an autoscaler may add
    labels: Mapping[str, str] | None = msgspec.field(default_factory=dict[str, str])
    count: float = 1

    def has(self, wanted: ResourceRequirements) -> bool:
        """Whether a process with these requirements fits on the node if the node is otherwise empty."""
        if any(self.resources.get(name, 0) + _ROUNDING < amount for name, amount in wanted.amounts.items()):
            return False
        if self.labels is None:
            return True
        for name, selector in wanted.labels:
            # As Ray's selectors: `a`, `!a`, `in(a, b)` or `!in(a, b)`.
            choice = _CHOICE.fullmatch(selector)
            is_not, values = (
                (choice[1], choice[2].split(",")) if choice else (selector[:1], [selector.removeprefix("!")])
            )
            is_in = self.labels.get(name) in {value.strip() for value in values}
            if is_in is (is_not == "!"):
                return False
        return True

    def __str__(self) -> str:
        amounts = {name: self.resources.get(name, 0) for name in ("CPU", "GPU")}
        # Ray adds resources for the node's name, its accelerators and its memory, which agents rarely require.
        hidden = ("node:", "accelerator_type:", "memory", "object_store_memory")
        amounts.update((name, amount) for name, amount in self.resources.items() if not name.startswith(hidden))
        shown = ", ".join(f"{name} {amount:g}" for name, amount in amounts.items())
        labels = ", ".join(f"{n}={v}" for n, v in sorted((self.labels or {}).items()) if not n.startswith("ray.io/"))
        return f"{shown}; {labels}" if labels else shown


class ProcessDemand(Struct, frozen=True, kw_only=True):
    """Processes that exist at the same time."""

    who: str
    requirements: ResourceRequirements
    count: int = 1


def find_obstacle(demands: Iterable[ProcessDemand], nodes: Sequence[ClusterNode]) -> str | None:
    """Return why these processes do not fit into an empty cluster together. Resources of all nodes are added up."""
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
    """Return how many such processes fit on otherwise empty nodes; may be infinite."""
    amounts = requirements.amounts
    fitting = [node for node in nodes if node.has(requirements)]
    if not amounts:
        return float("inf") if fitting else 0
    return sum(
        min(int((node.resources[name] + _ROUNDING) / amount) for name, amount in amounts.items()) for node in fitting
    )


def least_used(nodes: Sequence[ClusterNode], processes: Mapping[str, int]) -> str:
    """Return the node with the fewest processes per processor."""
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
    return max(1, min(_MOST_REPLICAS, int(cluster.get("CPU", 1))))


class PlacementRequest(Struct, frozen=True, kw_only=True):
    key: str
    #: agents of one category may share a process
    category: str
    isolation: str | None = None
    #: None: no requirement
    replicas: int | None = 1
    requirements: ResourceRequirements = NOTHING


def find_beside_predicates(plan: Plan, requests: Iterable[PlacementRequest]) -> frozenset[str]:
    """Return the agents that live in the process of their run's predicates.

    All their tasks are in loops and graphs, and one of them is the last before a predicate. Tasks run one after the other,
    and no agent may delegate. Tools may block the process, so these agents have none, nor isolation, replicas or resources.
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
    """Groups of processes of a run. Agents may be added and removed during the run."""

    def __init__(self, *, max_own: int, most_replicas: int) -> None:
        self._max_own = max_own
        self._most_replicas = most_replicas
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}
        self._shared: dict[tuple[str, ResourceRequirements], str] = {}

    @property
    def groups(self) -> tuple[str, ...]:
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
        """Whether an agent of the group shares its process with no other agent."""
        return any(request.isolation == "process" for request in self._groups[group].members.values())

    def begins_with(self, group: str) -> int:
        return self._groups[group].required

    def resize(self, *, max_own: int, most_replicas: int) -> None:
        self._max_own, self._most_replicas = max_own, most_replicas

    def place(self, requests: Iterable[PlacementRequest]) -> None:
        """Place agents that became known at the same time; an agent with a group keeps it."""
        new = [request for request in requests if request.key not in self._group_of]
        for request in new:
            group = f"{_OWN}{request.key}" if request.isolation == "process" else self._share(request)
            self._group_of[request.key] = group
            self._groups.setdefault(group, _Group(request.requirements)).members[request.key] = request

    def release(self, key: str) -> str | None:
        """Remove an agent. Return its group if the group ends with it."""
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

        `in_flight` tasks, the next ones included, have been more than `GROWS_ABOVE` for `busy_s`; `in_run` counts the processes of
        all groups. The nodes have `room` for so many of its processes.
        """
        found = self._groups[group]
        needed = max(0, found.required - alive)
        is_open = any(request.replicas is None for request in found.members.values())
        if is_open and in_flight > GROWS_ABOVE and busy_s >= GROWS_AFTER_S:
            free_slots = max(0, self._max_own - in_run - needed)
            needed += min(free_slots, max(0, int(min(self._most_replicas, room)) - alive - needed))
        return needed if not found.requirements else min(needed, 0 if starting else 1)

    def _share(self, request: PlacementRequest) -> str:
        """Return an empty group, else a new one within the limit, else the one with the fewest categories."""
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


class _Group(Struct):
    requirements: ResourceRequirements
    members: dict[str, PlacementRequest] = msgspec.field(default_factory=dict[str, PlacementRequest])

    @property
    def categories(self) -> set[str]:
        return {request.category for request in self.members.values()}

    @property
    def required(self) -> int:
        return max((request.replicas or 1 for request in self.members.values()), default=1)


class RedispatchDecision(Struct, frozen=True):
    #: with their new epoch from the table
    to_retry: Sequence[str]
    #: these fail; `abandon` selects the ones to report
    hopeless: Sequence[str]


class _Dispatch(Struct):
    process: str
    epoch: int
    deaths: int = 0
    is_stopped: bool = False
    is_abandoned: bool = False


class DispatchTable(Struct):
    """Dispatched orders without a report."""

    is_recorded: bool
    _dispatches: dict[str, _Dispatch] = msgspec.field(default_factory=dict[str, _Dispatch])
    _busy: dict[str, set[str]] = msgspec.field(default_factory=dict[str, set[str]])

    def __len__(self) -> int:
        return len(self._dispatches)

    def record_dispatch(self, instance: str, epoch: int, process: str) -> None:
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
        """Whether a report counts; then the order is removed."""
        held = self._dispatches.get(instance)
        if held is None or held.epoch != epoch:
            return False  # another process has the order now
        self._busy.get(held.process, set()).discard(instance)
        del self._dispatches[instance]
        return True

    def mark_lost(self, process: str) -> RedispatchDecision:
        """Handle the death of a process. A second call finds no orders."""
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
        """Return orders to report in place of their process; each order only once."""
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


class SharedProcess(Struct, frozen=True, kw_only=True):
    name: str
    runs: frozenset[str]
    tasks: int

    @property
    def load(self) -> int:
        """A run without a task now will have one soon, so it counts too."""
        return len(self.runs) + self.tasks


def choose_shared(run_id: str, processes: Iterable[SharedProcess], *, most: int) -> str | None:
    """Return the process that a run joins, of candidates of its program and type."""
    known = list(processes)
    if len(known) < most:
        return None
    open_ = [each for each in known if run_id not in each.runs and len(each.runs) < MOST_RUNS]
    return min(open_, key=lambda each: each.load).name if open_ else None
