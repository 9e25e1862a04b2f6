"""Callables of a fed run on their way to the process that hosts them, as the scheduler sees them: bytes and names.

In: orders whose tasks have handlers or guardrails. Out: the same orders, as soon as the host has what they need. Must
never happen: an order that is handed out before the host has its callables, or callables that pile up there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

import ray.exceptions

from actors.link.fed_wire import FedOrder, MoreCallables, TaskCallables
from actors.scheduler.process_groups import ProcessHouses
from actors.scheduler.processes import Process
from ensemble_ray.execute.kinds import Shelf

__all__ = ["FedCallables"]


class FedCallables:
    """The callables of one run. One message is on its way to their host at a time, so none overtakes another."""

    def __init__(
        self,
        run_id: str,
        houses: ProcessHouses,
        *,
        ready: Callable[[Sequence[FedOrder]], None],
        lost: Callable[[Sequence[FedOrder], BaseException], None],
    ) -> None:
        """Make it; no process is started before the first order.

        Args:
            run_id: Whose.
            houses: Start the host.
            ready: Given orders whose callables are at the host.
            lost: Given orders whose callables cannot be hosted, and why.
        """
        self._run_id = run_id
        self._houses = houses
        self._ready = ready
        self._lost = lost
        self._bodies: Shelf[bytes] = Shelf(on_drop=self._dropped)
        #: of the tasks that are not reported yet
        self._tasks: dict[str, TaskCallables] = {}
        self._waiting: list[FedOrder] = []
        self._done_tasks: list[str] = []
        self._done_bodies: list[str] = []
        #: names that this host was sent
        self._sent: set[str] = set()
        self._host: Process | None = None
        self._sending: asyncio.Task[None] | None = None

    def put(self, bodies: Mapping[str, bytes]) -> None:
        """Keep callables at least until the next `trim`."""
        for name, body in bodies.items():
            self._bodies.put(name, body)

    def trim(self) -> None:
        """Drop what no order needs."""
        self._bodies.trim()

    def knows(self, callables: Iterable[str]) -> bool:
        """Whether all of them are here."""
        return all(name in self._bodies for name in callables)

    def send(self, orders: Sequence[FedOrder]) -> None:
        """Bring the callables of these orders to the host; never waits."""
        for order in orders:
            callables = order.callables or TaskCallables()
            self._tasks[order.order.key] = callables
            for name in callables:
                self._bodies.use(name)
        self._waiting.extend(orders)
        if self._sending is None and self._waiting:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    def withdraw(self, instance: str) -> FedOrder | None:
        """An order that still waits, which is handed out no more; None when it does not."""
        for position, order in enumerate(self._waiting):
            if order.order.instance == instance:
                return self._waiting.pop(position)
        return None

    def done(self, key: str) -> None:
        """A task was reported."""
        callables = self._tasks.pop(key, None)
        if callables is not None:
            self._done_tasks.append(key)
            for name in callables:
                self._bodies.done(name)

    def whole(self) -> MoreCallables:
        """All that a new host needs."""
        names = {name for callables in self._tasks.values() for name in callables}
        return MoreCallables(bodies={name: self._bodies.get(name) or b"" for name in names}, tasks=dict(self._tasks))

    def _dropped(self, name: str, _: bytes) -> None:
        if name in self._sent:
            self._sent.discard(name)
            self._done_bodies.append(name)

    async def _send(self) -> None:
        try:
            while self._waiting:
                orders, self._waiting = self._waiting, []
                await self._bring(orders)
        finally:
            self._sending = None

    async def _bring(self, orders: Sequence[FedOrder]) -> None:
        while True:
            host = self._houses.host_callables()
            try:
                await host.handle.hold_more.remote(self._run_id, self._news(host, orders))
            except ray.exceptions.RayError as error:
                self._houses.lose(host, error)
                if self._houses.callables is host:  # it was replaced too often
                    self._lost(orders, error)
                    return
            else:
                self._ready(orders)
                return

    def _news(self, host: Process, orders: Sequence[FedOrder]) -> MoreCallables:
        if host is not self._host:
            self._host = host
            self._sent.clear()
            self._done_tasks.clear()
            self._done_bodies.clear()
            self._sent.update(name for callables in self._tasks.values() for name in callables)
            return self.whole()
        tasks = {order.order.key: order.callables or TaskCallables() for order in orders}
        names = {name for callables in tasks.values() for name in callables} - self._sent
        self._sent |= names
        done_tasks, self._done_tasks = self._done_tasks, []
        done_bodies, self._done_bodies = self._done_bodies, []
        bodies = {name: self._bodies.get(name) or b"" for name in names}
        return MoreCallables(bodies=bodies, tasks=tasks, done_tasks=done_tasks, done_bodies=done_bodies)
