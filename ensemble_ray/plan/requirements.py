"""What an agent's process asks of the node it is on, and whether a cluster has that. Package: plan. Pure.

In: what processes ask for; the nodes of a cluster. Out: what to ask of Ray; a text that says what the cluster lacks. Rules:
1. A process is on one node, which must have all that the process asks for, and the labels.
2. The processes that a run begins with are there at the same time: together they fit the cluster.
3. What is in use by others now is no obstacle: processes wait for it. What no node will ever have is one.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "NOTHING",
    "ClusterNode",
    "ProcessDemand",
    "ResourceRequirements",
    "find_obstacle",
    "least_used",
    "room_for",
    "show_nodes",
]

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
