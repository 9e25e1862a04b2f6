"""Callables of a run on their way to the process that hosts them, as the scheduler sees them: bytes and names.

In: callables that are known from the beginning, and orders whose tasks have others. Out: the same orders, as soon as the
host has what they need. Must never happen: an order that is handed out before the host has its callables, or callables that
pile up there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import ray.exceptions

from ensemble_ray.actors.link.packing import pack_update
from ensemble_ray.actors.link.wire import CallablesUpdate, TaskCallables, WireOrder
from ensemble_ray.actors.scheduler.callables_host import ask_host
from ensemble_ray.actors.scheduler.process_groups import ProcessGroups
from ensemble_ray.actors.scheduler.processes import Lease
from ensemble_ray.execute.agent_templates import RefCountedCache

__all__ = ["CallablesDelivery"]

_NONE = CallablesUpdate(bundles={}, tasks={})


class CallablesDelivery:
    """The callables of one run. One message is on its way to their host at a time, so none overtakes another."""

    def __init__(
        self,
        run_id: str,
        groups: ProcessGroups,
        declared: CallablesUpdate | None,
        *,
        ready: Callable[[Sequence[WireOrder]], None],
        lost: Callable[[Sequence[WireOrder], BaseException], None],
    ) -> None:
        """Make it; no process is started before the first order.

        Args:
            run_id: Whose.
            groups: Start the host.
            declared: Those that are known from the beginning; every host has them.
            ready: Given orders whose callables are at the host.
            lost: Given orders whose callables cannot be hosted, and why.
        """
        self._run_id = run_id
        self._groups = groups
        self._declared = declared or _NONE
        self._ready = ready
        self._lost = lost
        self._bundles: RefCountedCache[bytes] = RefCountedCache(on_drop=self._on_drop)
        #: of the tasks that are not reported yet
        self._tasks: dict[str, TaskCallables] = {}
        self._waiting: list[WireOrder] = []
        self._done_tasks: list[str] = []
        self._done_bundles: list[str] = []
        #: bundles that this host was sent
        self._sent: set[str] = set()
        self._host: Lease | None = None
        self._sending: asyncio.Task[None] | None = None

    def put(self, bundles: Mapping[str, bytes]) -> None:
        """Keep callables at least until the next `trim`."""
        for name, body in bundles.items():
            self._bundles.put(name, body)

    def trim(self) -> None:
        """Drop what no order needs."""
        self._bundles.trim()

    def knows(self, callables: TaskCallables | None) -> bool:
        """Return whether all of them are here."""
        return callables is None or all(name in self._bundles for name in callables.bundles)

    def send(self, orders: Iterable[tuple[WireOrder, TaskCallables]]) -> None:
        """Bring the callables of these orders to the host; never waits."""
        for order, callables in orders:
            self._tasks[order.key] = callables
            for name in callables.bundles:
                self._bundles.use(name)
            self._waiting.append(order)
        if self._sending is None and self._waiting:
            self._sending = asyncio.get_running_loop().create_task(self._send())

    @property
    def waiting(self) -> int:
        """How many orders wait for their callables to arrive at the host."""
        return len(self._waiting)

    def withdraw(self, instance: str) -> WireOrder | None:
        """Return an order that still waits, which is handed out no more; None when it does not."""
        for position, order in enumerate(self._waiting):
            if order.instance == instance:
                return self._waiting.pop(position)
        return None

    def release(self, key: str) -> None:
        """Forget the callables of a task that was reported."""
        callables = self._tasks.pop(key, None)
        if callables is not None:
            self._done_tasks.append(key)
            for name in callables.bundles:
                self._bundles.release(name)

    def whole(self) -> CallablesUpdate:
        """Return all that a new host needs."""
        tasks = self._tasks
        return replace(
            self._declared,
            bundles={**self._declared.bundles, **self._load_bundles(_bundles_of(tasks))},
            tasks={**self._declared.tasks, **tasks},
        )

    def _load_bundles(self, names: Iterable[str]) -> dict[str, bytes]:
        return {name: self._bundles.get(name) or b"" for name in names}

    def _on_drop(self, name: str, _: bytes) -> None:
        if name in self._sent:
            self._sent.discard(name)
            self._done_bundles.append(name)

    async def _send(self) -> None:
        try:
            while self._waiting:
                orders, self._waiting = self._waiting, []
                await self._bring(orders)
        finally:
            self._sending = None

    async def _bring(self, orders: Sequence[WireOrder]) -> None:
        try:
            await ask_host(self._groups, partial(self._hand_over, orders))
        except ray.exceptions.RayError as error:
            self._lost(orders, error)
        else:
            self._ready(orders)

    async def _hand_over(self, orders: Sequence[WireOrder], host: Lease) -> None:
        await host.handle.hold.remote(pack_update(self._run_id, self._update(host, orders)))

    def _update(self, host: Lease, orders: Sequence[WireOrder]) -> CallablesUpdate:
        if host is not self._host:
            self._host = host
            self._done_tasks.clear()
            self._done_bundles.clear()
            self._sent = _bundles_of(self._tasks)
            return self.whole()
        tasks = {order.key: self._tasks[order.key] for order in orders if order.key in self._tasks}
        names = _bundles_of(tasks) - self._sent
        self._sent |= names
        done_tasks, self._done_tasks = self._done_tasks, []
        done_bundles, self._done_bundles = self._done_bundles, []
        return CallablesUpdate(
            bundles=self._load_bundles(names), tasks=tasks, done_tasks=done_tasks, done_bundles=done_bundles
        )


def _bundles_of(tasks: Mapping[str, TaskCallables]) -> set[str]:
    return {name for callables in tasks.values() for name in callables.bundles}
