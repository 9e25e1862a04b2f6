"""Which agent lives in which group of processes, and how large a group is. Pure.

An agent is an id; a process costs about a second of start-up and 60 MB. Rules:
1. A declared agent gets a group of its own while fewer than `max_own` exist; `isolation="process"` gets its own beyond
   that. Agents with `"shared"`, and those that are made for a task or while the run goes on, get none without asking.
2. All others live by category: agents with the same tools and model share a group, role and prompts travel with the task.
3. Categories take one of `max_own` shared groups each, beyond that the one with the fewest, so no task waits for a process.
4. A group has as many processes as any of its agents asks for. Where one of them says nothing, it has as many as the cluster
   allows while much is in flight, as long as the whole run has fewer than `max_own`.
5. Agents that ask something of their node share processes only with those that ask for the same. Such a process may wait for
   its node, so a group begins the next one when the last has started, and what a group has to do goes to those that have.
6. An agent that does nothing but tasks after which predicates are asked lives in the process that has those, where nothing
   speaks against it: so a step of a loop or a graph is one message to and fro, and not two (S-LOOP-189).
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

#: An amount that is compared with another may differ from it by rounding; Ray knows four places.
_ROUNDING = 1e-6
#: Kinds of nodes that a message tells of.
_SHOWN = 5
_CHOICE = re.compile(r"(!?)in\((.*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceRequirements:
    """What one process asks of its node."""

    num_cpus: float = 0
    num_gpus: float = 0
    #: name -> amount, sorted
    resources: tuple[tuple[str, float], ...] = ()
    #: name -> value, sorted; in the form of Ray's label selectors
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
        """What is asked for by Ray's names."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **dict(self.resources)}
        return {name: amount for name, amount in amounts.items() if amount}


#: Of a process that only waits for its models.
NOTHING = ResourceRequirements()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """What a node has, in use or not."""

    #: Ray's; empty for one that is not there
    node_id: str = ""
    resources: Mapping[str, float]
    #: None: not known, as of a node that an autoscaler may add
    labels: Mapping[str, str] | None = field(default_factory=dict[str, str])
    #: how many of them there may be
    count: float = 1

    def has(self, asked: ResourceRequirements) -> bool:
        """Return whether a process that asks for that can be there when nothing else is."""
        has_amounts = all(self.resources.get(name, 0) + _ROUNDING >= amount for name, amount in asked.amounts.items())
        return has_amounts and (self.labels is None or all(_matches(self.labels, *label) for label in asked.labels))

    def __str__(self) -> str:
        amounts = {name: self.resources.get(name, 0) for name in ("CPU", "GPU")}
        # Ray gives each node resources of its own name, and its accelerators and its memory ones that few ask for.
        hidden = ("node:", "accelerator_type:", "memory", "object_store_memory")
        amounts.update((name, amount) for name, amount in self.resources.items() if not name.startswith(hidden))
        shown = ", ".join(f"{name} {amount:g}" for name, amount in amounts.items())
        labels = ", ".join(f"{n}={v}" for n, v in sorted((self.labels or {}).items()) if not n.startswith("ray.io/"))
        return f"{shown}; {labels}" if labels else shown


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessDemand:
    """Processes that are there at the same time."""

    #: who asks, as users call it: `Agent 'Coder'`
    who: str
    requirements: ResourceRequirements
    count: int = 1


def find_obstacle(demands: Iterable[ProcessDemand], nodes: Sequence[ClusterNode]) -> str | None:
    """Return why these processes cannot all be there, and what the cluster has; None where they can, if nothing else is.

    Whether what is left over lies on the right nodes is not looked at.
    """
    asking = [demand for demand in demands if demand.requirements]
    for demand in asking:
        if not any(node.has(demand.requirements) for node in nodes):
            return f"{demand.who} asks for {demand.requirements}, which no node has. {show_nodes(nodes)}"
    total: Counter[str] = Counter()
    for demand in asking:
        for name, amount in demand.requirements.amounts.items():
            total[name] += amount * demand.count  # type: ignore[assignment]  # a Counter adds fractions as well
    for name, amount in total.items():
        there = sum(node.resources.get(name, 0) * node.count for node in nodes)
        if amount > there + _ROUNDING:
            who = ", ".join(dict.fromkeys(each.who for each in asking if name in each.requirements.amounts))
            return f"{who}: the processes ask for {amount:g} {name} together, and the nodes have {there:g}. {show_nodes(nodes)}"
    return None


def room_for(requirements: ResourceRequirements, nodes: Sequence[ClusterNode]) -> float:
    """Return how many processes that ask for that the nodes have room for when nothing else is there; there may be no end."""
    amounts = requirements.amounts
    fitting = [node for node in nodes if node.has(requirements)]
    if not amounts:
        return float("inf") if fitting else 0
    return sum(
        min(int((node.resources[name] + _ROUNDING) / amount) for name, amount in amounts.items()) for node in fitting
    )


def least_used(nodes: Sequence[ClusterNode], processes: Mapping[str, int]) -> str:
    """Return the id of the node that the next process belongs on: with the fewest for each of its processors.

    Nodes without processors, as heads often are, get none while there are others.

    Args:
        nodes: The cluster's; at least one.
        processes: How many are on each node, by its id.
    """
    working = [node for node in nodes if node.resources.get("CPU", 0)] or nodes
    return min(
        working, key=lambda each: (processes.get(each.node_id, 0) + 1) / max(each.resources.get("CPU", 0), 1)
    ).node_id


def show_nodes(nodes: Sequence[ClusterNode]) -> str:
    """Return what a cluster has, for a message."""
    kinds = Counter(str(node) for node in nodes)
    shown = "; ".join(f"{count} x [{kind}]" for kind, count in kinds.most_common(_SHOWN))
    more = f" and {len(kinds) - _SHOWN} other kinds of nodes" if len(kinds) > _SHOWN else ""
    return f"The cluster has {shown or 'no node'}{more}"


def _matches(labels: Mapping[str, str], name: str, selector: str) -> bool:
    """Return whether a node's labels fit a selector of Ray's: `a`, `!a`, `in(a, b)` or `!in(a, b)`."""
    choice = _CHOICE.fullmatch(selector)
    is_not, values = (choice[1], choice[2].split(",")) if choice else (selector[:1], [selector.removeprefix("!")])
    is_in = labels.get(name) in {value.strip() for value in values}
    return is_in is not (is_not == "!")


#: Tasks in flight above which a group whose agents say nothing of replicas gets as many as it may (S-MR-141).
GROWS_ABOVE = 64
#: Processes that a group whose agents say nothing gets at most.
_MOST_REPLICAS = 8
#: Memory of the cluster that each process of a run takes at most, bytes.
_PROCESS_BYTES = 200_000_000
_OWN = "own:"


def max_own_processes(cluster: Mapping[str, float], *, cpus_here: int) -> int:
    """Return how many processes a run may have of its own: max(4, 2 x CPUs), at most one per 200 MB of memory.

    Args:
        cluster: The cluster's resources by Ray's names; memory in bytes.
        cpus_here: Processors of this machine, for a cluster that does not say how many it has.
    """
    cpus = int(cluster.get("CPU", cpus_here))
    memory_bytes = int(cluster.get("memory", 0))
    bound = max(1, memory_bytes // _PROCESS_BYTES) if memory_bytes else cpus * 2
    return max(1, min(max(4, 2 * cpus), bound))


def most_replicas(cluster: Mapping[str, float]) -> int:
    """Return how many processes a group whose agents say nothing may get on a cluster of those resources (S-MR-141)."""
    return max(1, min(_MOST_REPLICAS, int(cluster.get("CPU", 1))))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What placement needs to know of an agent."""

    key: str
    #: the same for agents that may share a process
    category: str
    isolation: str | None = None
    #: how many processes it asks for; None: it says nothing
    replicas: int | None = 1
    #: whether the user declared it, so that it gets a group of its own while there is room
    is_declared: bool = True
    #: what each of its processes asks of its node
    requirements: ResourceRequirements = NOTHING


def find_beside_predicates(plan: Plan, requests: Iterable[PlacementRequest]) -> frozenset[str]:
    """Return the agents that live in the process of their run's predicates.

    One does whose tasks are all in loops and graphs, and one of them last before a question is asked, where one task runs after
    the other and nobody delegates. Not one that has tools, which may take their process with them or keep it busy, and not one
    that asks for a process, for several, or for something of its node.
    """
    is_side_by_side = plan.workflow != "sequential" or plan.depends_on_order
    for unit in plan.units:
        is_side_by_side = is_side_by_side or (isinstance(unit, PhaseUnit) and unit.workflow != "sequential")
    if is_side_by_side or any(each.allow_delegation for each in plan.agents):
        return frozenset()
    asked_after: set[str] = set()
    repeated: set[str] = set()
    for unit in plan.units:
        if isinstance(unit, LoopUnit):
            repeated.update(unit.body)
            asked_after.update(unit.body[-1:] if unit.has_until else ())
        elif isinstance(unit, GraphUnit):
            asking = {entry.from_state for entry in unit.edges if isinstance(entry, EdgeEntry) and entry.has_condition}
            repeated.update(state.member for state in unit.states)
            asked_after.update(state.member for state in unit.states if state.name in asking)
    candidates = {node.agent_key for node in plan.nodes if node.key in asked_after}
    elsewhere = {node.agent_key for node in plan.nodes if node.key not in repeated}
    with_tools = {each.key for each in plan.agents if each.tool_names}
    modest = {
        each.key for each in requests if each.isolation is None and each.replicas in {None, 1} and not each.requirements
    }
    return frozenset(key for key in candidates - elsewhere - with_tools if key in modest)


@dataclass(slots=True)
class _Group:
    #: what its processes ask of their nodes
    requirements: ResourceRequirements
    #: agent key -> what it asks for
    members: dict[str, PlacementRequest] = field(default_factory=dict[str, PlacementRequest])

    @property
    def categories(self) -> set[str]:
        return {request.category for request in self.members.values()}

    @property
    def begins_with(self) -> int:
        """How many processes its agents ask for."""
        return max((request.replicas or 1 for request in self.members.values()), default=1)


class Placement:
    """The groups of a run's processes, and who lives where. Agents come and go while the run goes on."""

    def __init__(self, *, max_own: int, most_replicas: int) -> None:
        """Make one without groups.

        Args:
            max_own: How many groups there are for agents that do not ask for isolation; also how many processes a run
                may grow to.
            most_replicas: How many processes a group may get whose agents say nothing.
        """
        self._max_own = max_own
        self._most_replicas = most_replicas
        self._groups: dict[str, _Group] = {}
        self._group_of: dict[str, str] = {}
        #: category, and what it asks of nodes -> its shared group
        self._shared: dict[tuple[str, ResourceRequirements], str] = {}
        #: groups that belong to one agent
        self._own = 0

    @property
    def groups(self) -> tuple[str, ...]:
        """All groups, in the order in which they were begun."""
        return tuple(self._groups)

    def __contains__(self, key: str) -> bool:
        return key in self._group_of

    def group_of(self, key: str) -> str:
        """Return where an agent lives.

        Raises:
            KeyError: it was not placed.
        """
        return self._group_of[key]

    def members(self, group: str) -> tuple[str, ...]:
        """Return the keys of the agents of a group."""
        return tuple(self._groups[group].members)

    def requirements_of(self, group: str) -> ResourceRequirements:
        """Return what the processes of a group ask of their nodes."""
        return self._groups[group].requirements

    def is_isolated(self, group: str) -> bool:
        """Return whether an agent of a group asks for processes that nobody else has."""
        return any(request.isolation == "process" for request in self._groups[group].members.values())

    def begins_with(self, group: str) -> int:
        """Return how many processes the agents of a group ask for."""
        return self._groups[group].begins_with

    def resize(self, *, max_own: int, most_replicas: int) -> None:
        """Allow as many groups and processes as the cluster has room for by now; who lives somewhere stays there."""
        self._max_own, self._most_replicas = max_own, most_replicas

    def place(self, requests: Iterable[PlacementRequest]) -> None:
        """Give agents that are known at the same time a group each; one that has a group keeps it."""
        new = [request for request in requests if request.key not in self._group_of]
        self._own += sum(request.isolation == "process" for request in new)
        for request in new:
            group = f"{_OWN}{request.key}" if self._gets_own(request) else self._share(request)
            self._group_of[request.key] = group
            self._groups.setdefault(group, _Group(request.requirements)).members[request.key] = request

    def release(self, key: str) -> str | None:
        """Forget an agent that nobody needs any more; return its group where that was its own and is gone now."""
        group = self._group_of.pop(key, None)
        if group is None:
            return None  # no task of it ever came
        request = self._groups[group].members.pop(key)
        if group.startswith(_OWN):
            self._own -= 1
            del self._groups[group]
            return group
        if request.category not in self._groups[group].categories:
            del self._shared[request.category, request.requirements]
        return None  # its processes serve the next agent

    def missing(
        self, group: str, *, alive: int, in_flight: int, in_run: int, starting: int = 0, room: float = math.inf
    ) -> int:
        """Return how many processes a group should get now.

        Args:
            group: Which.
            alive: Its processes.
            in_flight: Tasks that they have or are about to get.
            in_run: Processes of all groups of the run.
            starting: Those of its processes that have not started yet, or wait for a node.
            room: How many of its processes the nodes have room for.
        """
        found = self._groups[group]
        needed = max(0, found.begins_with - alive)
        is_open = any(request.replicas is None for request in found.members.values())
        if is_open and in_flight > GROWS_ABOVE:
            free_slots = max(0, self._max_own - in_run - needed)
            needed += min(free_slots, max(0, int(min(self._most_replicas, room)) - alive - needed))
        return needed if not found.requirements else min(needed, 0 if starting else 1)

    def _gets_own(self, request: PlacementRequest) -> bool:
        if request.isolation == "process":
            return True
        gets_own = request.is_declared and request.isolation != "shared" and self._own < self._max_own
        self._own += gets_own
        return gets_own

    def _share(self, request: PlacementRequest) -> str:
        """Return the group of a category: the one with the fewest, or a new one while none is empty and there may be more."""
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


#: An order whose process died so often is not handed out again.
MOST_DEATHS = 3


@dataclass(frozen=True, slots=True)
class AfterDeath:
    """What follows from the death of a process."""

    #: orders to hand out again, under the epoch that the table has for them now
    to_retry: Sequence[str]
    #: orders that are given up; `abandon` says which of them to report
    hopeless: Sequence[str]


@dataclass(slots=True)
class _Dispatch:
    process: str
    epoch: int
    #: how many processes died with it
    deaths: int = 0
    #: whether somebody wants it to end
    is_stopped: bool = False
    #: whether it is about to be reported in place of its process
    is_abandoned: bool = False


@dataclass(slots=True)
class DispatchTable:
    """Orders that were handed out and are not reported, by instance; processes are names."""

    #: whether an order whose process died can go on elsewhere
    is_recorded: bool
    _dispatches: dict[str, _Dispatch] = field(default_factory=dict[str, _Dispatch])
    #: process -> what it is at work on
    _busy: dict[str, set[str]] = field(default_factory=dict[str, set[str]])

    def __len__(self) -> int:
        return len(self._dispatches)

    def hand_out(self, instance: str, epoch: int, process: str) -> None:
        """Note that a process has that order now; it may have been with another before."""
        held = self._dispatches.get(instance)
        if held is None:
            self._dispatches[instance] = _Dispatch(process, epoch)
        else:
            self._busy.get(held.process, set()).discard(instance)
            held.process, held.epoch = process, epoch
        self._busy.setdefault(process, set()).add(instance)

    def epoch_of(self, instance: str) -> int | None:
        """Return the epoch of an order's newest dispatch; None where it was reported."""
        held = self._dispatches.get(instance)
        return None if held is None else held.epoch

    def process_of(self, instance: str) -> str | None:
        """Return which process has an order; None where it was reported."""
        held = self._dispatches.get(instance)
        return None if held is None else held.process

    def deaths_of(self, instance: str) -> int:
        """Return how many processes died with an order."""
        held = self._dispatches.get(instance)
        return 0 if held is None else held.deaths

    def is_stopped(self, instance: str) -> bool:
        """Return whether somebody wants that order to end."""
        held = self._dispatches.get(instance)
        return held is not None and held.is_stopped

    def load(self, process: str) -> int:
        """Return how many orders a process is at work on."""
        return len(self._busy.get(process, ()))

    def orders_of(self, process: str, *, most: int | None = None) -> list[str]:
        """Return the orders that a process is at work on; where `most` is given, so many of them."""
        return list(islice(self._busy.get(process, ()), most))

    def stop(self, instances: Iterable[str]) -> dict[str, list[str]]:
        """Note that these orders are to end; return those that are at work, by process."""
        found: dict[str, list[str]] = {}
        for instance in instances:
            held = self._dispatches.get(instance)
            if held is not None:
                held.is_stopped = True
                found.setdefault(held.process, []).append(instance)
        return found

    def stuck(self, instances: Iterable[str] | None = None) -> list[str]:
        """Return the processes that still hold orders which were to end.

        Args:
            instances: Which orders; None: all that were to end.
        """
        names = self._dispatches if instances is None else instances
        held = (self._dispatches[name] for name in names if self.is_stopped(name))
        return list(dict.fromkeys(dispatch.process for dispatch in held))

    def report(self, instance: str, epoch: int) -> bool:
        """Return whether a report counts; then the order is forgotten."""
        held = self._dispatches.get(instance)
        if held is None or held.epoch != epoch:
            return False  # of a process that lost the order to another
        self._busy.get(held.process, set()).discard(instance)
        del self._dispatches[instance]
        return True

    def lose(self, process: str) -> AfterDeath:
        """Return what follows from the death of a process. Deaths that are heard of again find nothing."""
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
        return AfterDeath(to_retry, hopeless)

    def abandon(self, process: str, instances: Iterable[str]) -> list[str]:
        """Return those orders of a process that are to be reported in its place; each is returned once."""
        abandoned: list[str] = []
        for instance in instances:
            held = self._dispatches.get(instance)
            if held is not None and held.process == process and not held.is_abandoned:
                held.is_abandoned = True
                abandoned.append(instance)
        self._busy.get(process, set()).difference_update(abandoned)
        return abandoned

    def forget_process(self, process: str) -> None:
        """Forget a process that has no orders any more."""
        self._busy.pop(process, None)


def shard_of(run_id: str, shards: int) -> int:
    """Return the number of the scheduler that a run of that id belongs to, from 0; the same in every process."""
    return int.from_bytes(hashlib.sha256(run_id.encode()).digest()[:8]) % shards


#: How many runs a process has at most.
MOST_RUNS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedProcess:
    """What the choice needs to know of a process."""

    name: str
    #: ids of the runs that have it
    runs: frozenset[str]
    #: tasks that it is at work on, of all of them
    tasks: int

    @property
    def load(self) -> int:
        """What it has to do: a run that has no task now is about to have one."""
        return len(self.runs) + self.tasks


def choose_shared(run_id: str, processes: Iterable[SharedProcess], *, most: int) -> str | None:
    """Return the name of the process that a run joins; None: it gets a new one.

    Args:
        run_id: The run.
        processes: Those that it may share: of its program, of the type it needs.
        most: How many of them there are before the run joins one.
    """
    known = list(processes)
    if len(known) < most:
        return None
    open_ = [each for each in known if run_id not in each.runs and len(each.runs) < MOST_RUNS]
    return min(open_, key=lambda each: each.load).name if open_ else None
