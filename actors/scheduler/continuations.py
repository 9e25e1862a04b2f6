"""Tasks of a run that a process starts by itself, each when the one before it has completed (S-DUR-156).

The run's source starts the same tasks in the same order when it handles the reports. Until then they are pending here.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import Any

import msgspec
import ray.exceptions
from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.actors.link.reach import BackgroundTasks
from ensemble_ray.actors.link.wire import WireOrder, WireResult
from ensemble_ray.actors.scheduler.process_groups import ProcessGroups
from ensemble_ray.actors.scheduler.processes import Lease
from ensemble_ray.execute.orders import Continuation
from ensemble_ray.values.ids import REDISPATCH_STEP


class _Pending(Struct):
    number: int
    #: the last task before the pending ones
    head: str
    epochs: dict[str, int]
    lease: Lease | None = None
    #: reports of pending tasks
    early: dict[str, WireResult] = msgspec.field(default_factory=dict[str, WireResult])
    drained: asyncio.Event = msgspec.field(default_factory=asyncio.Event)


class Continuations:
    """Only one continuation at a time has pending tasks. `report` accepts the reports of tasks that the source has started."""

    def __init__(
        self, run_id: str, groups: ProcessGroups, report: Callable[[Sequence[WireResult]], Coroutine[Any, Any, None]]
    ) -> None:
        self._run_id = run_id
        self._groups = groups
        self._report = report
        self._number = 0
        self._pending: _Pending | None = None
        self._suspensions = 0
        #: After a death, tasks are dispatched one by one, so that a death counts for the right task.
        self._has_lost = False
        #: tasks that a lost process may have begun
        self._lost: set[str] = set()
        self._lost_at = 0.0
        #: of the last reported task, Unix time, s
        self._ended_at = 0.0
        self._background = BackgroundTasks()

    def may_begin(self, group: str) -> bool:
        if self._pending is not None or self._suspensions or self._has_lost:
            return False
        return bool(self._groups.alive(group)) and not self._groups.starting(group)

    def begin(self, order: WireOrder, following: Sequence[WireOrder]) -> WireOrder:
        """Return an order with its continuation. It is dispatched next."""
        if not following:
            return order
        self._number += 1
        self._pending = _Pending(self._number, order.instance, {each.instance: each.epoch for each in following})
        return replace(order, continuation=Continuation(self._number, tuple(following)))

    def dispatch(self, orders: Iterable[WireOrder], dispatch: Callable[[Sequence[WireOrder]], None]) -> None:
        """Dispatch orders that no process has started by itself."""
        lost: list[str] = []
        fresh: list[WireOrder] = []
        for order in orders:
            if self._adopt(order):
                continue
            if order.instance in self._lost:
                lost.append(order.instance)
                order = replace(order, epoch=order.epoch + REDISPATCH_STEP)  # noqa: PLW2901  the same order
            fresh.append(order)
        dispatch(fresh)
        for instance in lost:
            self._lost.remove(instance)
            if self._ended_at <= self._lost_at:  # the task before it had ended: the process died with this one
                self._groups.count_death(instance)
        pending = self._pending
        if pending is not None and pending.lease is None:
            pending.lease = self._groups.lease_of(pending.head)
            if pending.lease is None:
                self.drop()

    def _adopt(self, order: WireOrder) -> bool:
        pending, instance = self._pending, order.instance
        if pending is None or pending.lease is None or instance not in pending.epochs:
            return False
        self._groups.adopt(replace(order, epoch=pending.epochs.pop(instance)), pending.lease)
        pending.head = instance
        if (early := pending.early.pop(instance, None)) is not None:
            self._background.start(self._report([early]))
        self._retain(pending, pending.epochs)
        return True

    def accept_reports(self, reports: Iterable[WireResult]) -> list[WireResult]:
        """Return the reports of tasks that the source has started, and store the others."""
        passed: list[WireResult] = []
        for report in reports:
            pending, instance = self._pending, report.instance
            if pending is None or instance not in pending.epochs:
                passed.append(report)
                self._ended_at = max(self._ended_at, report.at)
                if pending is not None and instance == pending.head and report.status != "completed":
                    self.drop()  # its process starts no further task
            elif report.epoch == pending.epochs[instance]:
                pending.early[instance] = report
                if report.status != "completed":
                    self._retain(pending, pending.early)
        return passed

    def drop(self) -> None:
        if self._pending is not None:
            self._retain(self._pending, ())

    def on_death(self, lease: Lease) -> None:
        self._has_lost = True
        pending = self._pending
        if pending is not None and pending.lease is lease:
            self._lost.update(pending.epochs.keys() - pending.early.keys())
            self._lost_at = time.time()
            self._retain(pending, pending.early)

    @contextlib.asynccontextmanager
    async def suspended(self, patience_s: float | None = None) -> AsyncGenerator[None]:
        """Let no process start a task by itself, after the source has started all tasks that were started so.

        A process that does not answer is waited for at most this long; None: until it dies.
        """
        self._suspensions += 1
        try:
            if (pending := self._pending) is not None:
                assert pending.lease is not None, "it was dispatched"  # noqa: S101  for the type
                try:
                    async with asyncio.timeout(patience_s):
                        begun = await pending.lease.handle.revoke.remote(self._run_id, pending.number)
                        self._retain(pending, {*begun, *pending.early})
                        await pending.drained.wait()
                except TimeoutError:
                    self._retain(pending, ())
                except ray.exceptions.RayError as error:
                    self._groups.mark_lost(pending.lease, error)
            yield
        finally:
            self._suspensions -= 1

    def _retain(self, pending: _Pending, instances: Iterable[str]) -> None:
        pending.epochs = {each: epoch for each, epoch in pending.epochs.items() if each in instances}
        if not pending.epochs:
            pending.drained.set()
            if self._pending is pending:
                self._pending = None
