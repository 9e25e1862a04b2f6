"""ClusterNodes: what the cluster has, looked at when a run begins and while runs go on. Used by the scheduler.

Out: what the processes of a run are held to; who asks for what no node has hears of it before anything is asked of a model.
Nodes that come while runs go on are used by these runs (S-CLU-51). Must never happen: a run that waits for its cluster's
state with the scheduler's loop.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import ray

from ensemble_ray.actors.link.background_tasks import BackgroundTasks
from ensemble_ray.actors.scheduler.session import SessionLimits
from ensemble_ray.errors import message_of
from ensemble_ray.plan.placement import max_own_processes, most_replicas
from ensemble_ray.plan.requirements import ClusterNode
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.process.threads import threads

__all__ = ["ClusterNodes", "limits_of"]

_log = bounded_logger(__name__)
#: How often the nodes are looked at while runs go on, s: Ray itself needs longer to notice that one is lost.
_LOOK_S = 2.0
#: For how long a look is good for other runs that begin, s.
_FRESH_S = 0.5


class ClusterNodes:
    """The nodes of the cluster."""

    def __init__(self, on_change: Callable[[SessionLimits], None], is_needed: Callable[[], bool]) -> None:
        """Make it; nothing is looked at yet.

        Args:
            on_change: Given what runs are held to from now on, since nodes came or went.
            is_needed: Return whether any run goes on.
        """
        self._on_change = on_change
        self._is_needed = is_needed
        self._background = BackgroundTasks()
        self._limits = SessionLimits(max_own=1, most_replicas=1)
        #: until when runs that begin need no other look: of many at once, each would hold this process's loop for one
        self._fresh_until = 0.0

    def limits(self) -> SessionLimits:
        """Return what the processes of a run that begins now are held to; from now on nodes are watched."""
        now = asyncio.get_running_loop().time()
        if now >= self._fresh_until:
            self._limits = limits_of(_living())
            self._fresh_until = now + _FRESH_S
        if not self._background:
            self._background.start(self._watch())
        return self._limits

    async def _watch(self) -> None:
        """Look at the nodes until no run goes on. One that is there for the first time counts at the next look.

        A process that is sent to a node which has registered a moment ago ends up on another one (measured: after 0.7 s).
        """
        known = {node.node_id for node in self._limits.nodes}
        await asyncio.sleep(_LOOK_S)
        while self._is_needed():
            try:
                living = await threads.run(_living)
            except Exception as error:  # noqa: BLE001  the cluster may be out of reach for a moment: look again
                _log.warning("The cluster's nodes cannot be looked at: %s", message_of(error))
            else:
                limits = limits_of([node for node in living if node.node_id in known])
                known = {node.node_id for node in living}
                if limits != self._limits:
                    self._limits = limits
                    self._on_change(limits)
            await asyncio.sleep(_LOOK_S)


def limits_of(nodes: Sequence[ClusterNode]) -> SessionLimits:
    """Return what the processes of a run are held to on a cluster of these nodes."""
    total: Counter[str] = Counter()
    for node in nodes:
        for name in ("CPU", "memory"):
            total[name] += node.resources.get(name, 0)  # type: ignore[assignment]  # a Counter adds fractions as well
    return SessionLimits(
        max_own=max_own_processes(total, cpus_here=os.cpu_count() or 1),
        most_replicas=most_replicas(total),
        nodes=tuple(nodes),
    )


def _living() -> list[ClusterNode]:
    nodes = cast("list[dict[str, Any]]", cast("Any", ray.nodes)())
    return [
        ClusterNode(node_id=node["NodeID"], resources=node["Resources"], labels=node["Labels"])
        for node in nodes
        if node["Alive"]
    ]
