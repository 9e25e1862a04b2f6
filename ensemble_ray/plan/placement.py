"""Which agent lives in which group of processes, and how large a group is. Package: plan. Pure.

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

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.requirements import NOTHING, ResourceRequirements
from ensemble_ray.plan.units import EdgeEntry, GraphUnit, LoopUnit, PhaseUnit

__all__ = [
    "GROWS_ABOVE",
    "Placement",
    "PlacementRequest",
    "find_beside_predicates",
    "max_own_processes",
    "most_replicas",
]

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
