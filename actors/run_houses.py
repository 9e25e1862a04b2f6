"""Houses of one planned run on the cluster: who lives in which house, and what its processes are told.

The rule who lives where is `plan.housing`; here it is carried out. Fulfils the coordinator's `Executor`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray

from actors.process_houses import CALLABLES, Dispatch, ProcessHouses
from actors.processes import Kind, Process, ProcessPool
from actors.wire import RunPackage, RunPlace, WireOrder, WireReport, wire_order
from ensemble_ray.coordinator.planned import Assignment
from ensemble_ray.execute.orders import RunFrame
from ensemble_ray.plan.housing import Lodger, assign_houses
from ensemble_ray.plan.plan import MANAGER_KEY

__all__ = ["RunHouses"]


class RunHouses:
    """Processes of one run."""

    def __init__(
        self,
        package: RunPackage,
        pool: ProcessPool,
        *,
        max_own: int,
        hub: Any,
        take: Callable[[Sequence[WireReport]], Awaitable[None]],
    ) -> None:
        self._package = package
        self._hub = hub
        self._take = take
        node_id = str(ray.get_runtime_context().get_node_id())
        self._store = None if package.store is None else RunPlace(package.store, node_id)
        self._agents = {cargo.key: cargo for cargo in package.agents}
        lodgers = [
            Lodger(
                key=cargo.key,
                kind=cargo.kind,
                isolation=cargo.isolation,
                replicas=cargo.replicas,
                is_synthesized=cargo.is_synthesized,
            )
            for cargo in package.agents
        ]
        self._housing = assign_houses(lodgers, max_own=max_own)
        self._houses = ProcessHouses(self, pool, hub=hub)

    def open(self) -> None:
        """Start all processes of the run at the same time; nobody waits for one that is not its own."""
        if self._package.callables is not None:
            self._houses.host_callables()
        for house, replicas in self._housing.replicas.items():
            for _ in range(replicas):
                self._houses.settle(house)

    def start(self, assignments: Sequence[Assignment[bytes]]) -> None:
        """Send each task to the least busy process of its house."""
        self._houses.start(self._dispatch(assignment) for assignment in assignments)

    def _dispatch(self, assignment: Assignment[bytes]) -> Dispatch:
        key = assignment.node.agent_key
        house = CALLABLES if key is None else self._housing.house_of[key]
        return Dispatch(wire_order(assignment, self._package), house, assignment.node.description)

    def stop(self, instances: Sequence[str]) -> None:
        """Stop running tasks; processes that do not let them go are ended by `end_stuck`."""
        self._houses.stop(instances)

    def end_stuck(self) -> None:
        """End processes that still hold tasks which were stopped; those tasks are reported by their deaths."""
        self._houses.end_stuck()

    def reported(self, reports: Sequence[WireReport]) -> list[WireReport]:
        """Note which tasks are no longer running; reports of earlier dispatches of a task are left out."""
        return self._houses.reported(reports)

    def locate(self, agent_key: str, *, lost: str | None = None) -> list[tuple[str, Any]]:
        """Names and handles of the processes of an agent, for another agent that asks it; none when the run has ended.

        Args:
            agent_key: Whose.
            lost: Name of one that failed a call of the asker.
        """
        return [] if self._houses.is_closed else self._houses.locate(self._housing.house_of[agent_key], lost=lost)

    async def close(self, *, keep: bool) -> None:
        """Let all processes go. From here on nothing is started, whatever dies."""
        await self._houses.close(keep=keep)

    # What its processes ask of a run.

    @property
    def frame(self) -> RunFrame:
        """What all its tasks share."""
        return self._package.frame

    @property
    def is_recorded(self) -> bool:
        """Whether a task whose process died can go on elsewhere."""
        return self._package.store is not None

    async def take(self, reports: Sequence[WireReport]) -> None:
        """Take results."""
        await self._take(reports)

    def kinds_for(self, process: Process, orders: Sequence[WireOrder]) -> Mapping[str, bytes]:  # noqa: ARG002  as its processes ask
        """None: all agents of a house come with `bind`."""
        return {}

    def process_kind(self, house: str) -> Kind:
        """What a house's processes are for."""
        if house == CALLABLES:
            return "callables"
        is_managed = self._package.plan.hierarchy is not None
        return "manager" if is_managed and house == self._housing.house_of.get(MANAGER_KEY) else "agent"

    async def bind(self, house: str, process: Process, callables: Any) -> None:
        """Make a new process of a house ready for the run."""
        package = self._package
        agents: Mapping[str, bytes] = {}
        if house == CALLABLES:
            callables = None
            await process.handle.hold.remote(package.run_id, package.callables)
            if self._houses.is_closed:
                return  # it was released, and is not to have the run for ever
        else:
            agents = {key: self._agents[key].body for key, home in self._housing.house_of.items() if home == house}
        await process.handle.bind.remote(package.frame, agents, store=self._store, hub=self._hub, callables=callables)
