"""GroupOwner: what the processes of a run ask of the session that has them. A port; fulfilled by shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from ensemble_ray.actors.link.wire import WireOrder, WireResult
from ensemble_ray.actors.scheduler.processes import Lease, ProcessType
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.plan.requirements import ResourceRequirements

__all__ = ["GroupOwner"]


class GroupOwner(Protocol):
    """The session whose processes these are."""

    @property
    def context(self) -> RunContext:
        """What all its tasks share."""
        ...

    def group_of(self, order: WireOrder) -> str:
        """Return which group does that order."""
        ...

    def roles_of(self, group: str) -> Sequence[str]:
        """Return the roles of the agents of a group, in the order in which they came."""
        ...

    def process_type(self, group: str) -> ProcessType:
        """Return what a group's processes are for."""
        ...

    def requirements_of(self, group: str) -> ResourceRequirements:
        """Return what a group's processes ask of their nodes."""
        ...

    def may_share(self, group: str) -> bool:
        """Return whether processes of a group may have other runs, too."""
        ...

    def on_ready(self, group: str) -> None:
        """Start the next process of a group, since one has started that had to wait for a node."""
        ...

    def on_wait(self, group: str, waited_s: float) -> None:
        """Tell people that a process waits for a node, and for how long it has."""
        ...

    async def bind(self, group: str, lease: Lease, callables: Any) -> None:
        """Make a new process of a group ready for the run, which asks that handle for its callables."""
        ...

    def templates_for(self, lease: Lease, orders: Sequence[WireOrder]) -> Mapping[str, bytes]:
        """Return the templates of agents that these orders need and that process was not sent."""
        ...

    async def report(self, reports: Sequence[WireResult]) -> None:
        """Take results."""
        ...
