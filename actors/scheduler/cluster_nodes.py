"""Compares the resources that agents require with the cluster's nodes, and watches the nodes (S-CLU-43)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import ray

from ensemble_ray.actors.link.reach import BackgroundTasks, living_nodes
from ensemble_ray.actors.scheduler.session import SessionLimits
from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.plan.placement import (
    ClusterNode,
    Placement,
    ProcessDemand,
    find_obstacle,
    max_own_processes,
    most_replicas,
)
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.context import bounded_logger

if TYPE_CHECKING:
    from ensemble_ray.actors.link.wire import AgentTemplate


_log = bounded_logger(__name__)
#: Interval of reads, s. Ray itself needs longer to notice a lost node.
_LOOK_S = 2.0
_FRESH_S = 0.5


class ClusterNodes:
    def __init__(self, on_change: Callable[[SessionLimits], None], is_needed: Callable[[], bool]) -> None:
        self._on_change = on_change
        self._is_needed = is_needed
        self._background = BackgroundTasks()
        self._limits = SessionLimits(max_own=1, most_replicas=1)
        #: starting runs share a read: each blocks this process's loop
        self._fresh_until = 0.0

    def limits(self) -> SessionLimits:
        now = asyncio.get_running_loop().time()
        if now >= self._fresh_until:
            self._limits = limits_of(_living())
            self._fresh_until = now + _FRESH_S
        if not self._background:
            self._background.start(self._watch())
        return self._limits

    async def _watch(self) -> None:
        """Read the nodes until no run is active. A new node counts from the second time it is seen.

        Ray moves a process to another node if its node has just registered (measured: 0.7 s after that).
        """
        known = {node.node_id for node in self._limits.nodes}
        await asyncio.sleep(_LOOK_S)
        while self._is_needed():
            try:
                living = await threads.run(_living)
            except Exception as error:  # noqa: BLE001  the cluster may be unreachable for a moment: try again
                _log.warning("The cluster's nodes cannot be read: %s", message_of(error))
            else:
                limits = limits_of([node for node in living if node.node_id in known])
                known = {node.node_id for node in living}
                if limits != self._limits:
                    self._limits = limits
                    self._on_change(limits)
            await asyncio.sleep(_LOOK_S)


def limits_of(nodes: Sequence[ClusterNode]) -> SessionLimits:
    names = ("CPU", "memory") if nodes else ()
    total = {name: sum(node.resources.get(name, 0) for node in nodes) for name in names}
    return SessionLimits(
        max_own=max_own_processes(total, cpus_here=os.cpu_count() or 1),
        most_replicas=most_replicas(total),
        nodes=tuple(nodes),
    )


def _living() -> list[ClusterNode]:
    return [
        ClusterNode(node_id=node["NodeID"], resources=node["Resources"], labels=node["Labels"])
        for node in living_nodes()
    ]


def check_requirements(templates: Sequence[AgentTemplate], limits: SessionLimits) -> None:
    """Check that the cluster can provide all processes of these agents at the same time."""
    placement = Placement(max_own=limits.max_own, most_replicas=limits.most_replicas)
    placement.place(template.placement for template in templates)
    roles = {template.key: template.role for template in templates}
    demands = [
        ProcessDemand(
            who=", ".join(f"Agent '{roles[key]}'" for key in placement.members(group)),
            requirements=placement.requirements_of(group),
            count=placement.begins_with(group),
        )
        for group in placement.groups
    ]
    obstacle = find_obstacle(demands, (*limits.nodes, *_nodes_to_come()))
    if obstacle is not None:
        raise ValidationError(
            f"{obstacle}. Ask for less, add a node that has it (a local Ray takes RayRuntime(init_options={{'num_gpus': 1}}) "
            "and the like), or use runtime='inline', where nothing is reserved"
        )


def _nodes_to_come() -> list[ClusterNode]:
    """Return the kinds of nodes that the cluster's autoscaler may add."""
    config = cast("Any", ray)._private.state.state.get_cluster_config()  # noqa: SLF001  there is no public function
    groups: Iterable[Any] = () if config is None else config.node_group_configs
    return [
        ClusterNode(
            resources={str(name): float(amount) for name, amount in group.resources.items()},
            labels=None,
            count=float("inf") if group.max_count < 0 else float(group.max_count),
        )
        for group in groups
        if group.max_count
    ]
