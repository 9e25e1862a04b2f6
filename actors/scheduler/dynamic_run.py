"""DynamicRun: a session whose coordinator lives in its driver, since its tasks are made there while the run goes on.

In: orders in batches. Out: their reports, a page at a time, each until the driver says that it has it. The driver owns
the run: it coordinates and records it, and sends what is in flight again to another scheduler. Must never happen: processes
that outlive their driver by more than a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from ensemble_ray.actors.link.log_lines import CLUSTER_LOGGER, LogLine, scheduler_line
from ensemble_ray.actors.link.wire import Keep, OrderBatch, ReportPage, SessionOpening, WireResult
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.requirements import check_comer
from ensemble_ray.actors.scheduler.session import RunSession, SessionLimits
from ensemble_ray.execute.orders import RunContext

__all__ = ["DynamicRun"]

#: How long a driver may be silent before it counts as dead, s; a living one asks every few seconds.
MOST_SILENT_S = 30.0
#: A page holds at most so many entries, and not many more bytes than that.
_PAGE_ENTRIES = 1000
_PAGE_BYTES = 1_000_000


class DynamicRun:
    """One dynamic run in the scheduler."""

    def __init__(
        self,
        opening: SessionOpening,
        pool: ProcessPool,
        *,
        hub: Any,
        limits: SessionLimits,
        say: Callable[[Sequence[LogLine]], None],
    ) -> None:
        """Make it; nothing is started before the first order.

        Args:
            opening: The run.
            pool: Where processes come from.
            hub: Has its events; None: nobody listens.
            limits: What its processes are held to.
            say: Takes lines for the log of the run's driver.
        """
        self._opening = opening
        self.hub = hub
        self._session = RunSession(
            opening,
            pool,
            self,
            hub=hub,
            limits=limits,
            check=check_comer,
            warn=(lambda text: say([scheduler_line(text, CLUSTER_LOGGER)])) if opening.context.forwards_logs else None,
        )
        #: numbers of batches that came, as far as one before them has not; the lowest that has not come
        self._early: set[int] = set()
        self._next_batch = 1
        #: reports and instances that could not be begun, until the driver has them
        self._outbox: list[WireResult | str] = []
        #: how many entries the driver has
        self._acknowledged = 0
        self._changed = asyncio.Event()
        self._heartbeat_at = asyncio.get_running_loop().time()

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._opening.run_id

    @property
    def session(self) -> str:
        """Which opening this is."""
        return self._opening.session

    @property
    def context(self) -> RunContext:
        """What all its tasks share."""
        return self._opening.context

    @property
    def waiting(self) -> int:
        """How many tasks wait here before they are handed to a process."""
        return self._session.waiting

    def resize(self, limits: SessionLimits) -> None:
        """Use the cluster as it is now: nodes came or went."""
        self._session.resize(limits)

    def submit(self, batch: OrderBatch) -> None:
        """Do these tasks; never waits. A batch that came before is nothing new."""
        if batch.number < self._next_batch or batch.number in self._early:
            return
        self._early.add(batch.number)
        while self._next_batch in self._early:
            self._early.discard(self._next_batch)
            self._next_batch += 1
        self._session.submit(batch.orders, callables=batch.callables, templates=batch.templates, bundles=batch.bundles)

    async def collect(self, cursor: int, wait_s: float) -> ReportPage:
        """Return what came since; waits up to that long for something to come.

        Args:
            cursor: How many entries the driver has; they are forgotten here.
            wait_s: Longest wait when there is nothing new.
        """
        loop = asyncio.get_running_loop()
        self._heartbeat_at = loop.time()
        if cursor > self._acknowledged:
            del self._outbox[: cursor - self._acknowledged]
            self._acknowledged = cursor
        if not self._outbox:
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), wait_s)
            self._heartbeat_at = loop.time()
        entries = list(_page_of(self._outbox))
        return ReportPage(
            cursor=cursor + len(entries),
            results=[entry for entry in entries if not isinstance(entry, str)],
            unknown=[entry for entry in entries if isinstance(entry, str)],
        )

    def stop(self, instances: Sequence[str]) -> None:
        """Stop these tasks; each is still reported."""
        self._session.stop(instances)

    async def report(self, reports: Sequence[WireResult]) -> None:
        """Take what processes report."""
        await self._session.report(reports)

    async def receive(self, reports: Sequence[WireResult]) -> None:
        """Keep results for the driver."""
        self._post(reports)

    def return_order(self, instance: str) -> None:
        """Keep for the driver that an order was not begun."""
        self._post((instance,))

    async def close(self, *, keep: Keep | None) -> None:
        """Let all processes go; who waits for results is told that there are none."""
        self._changed.set()
        await self._session.close(keep=keep)

    async def until_driver_is_gone(self) -> None:
        """Return when the driver has not been heard for so long that it must be dead."""
        left = MOST_SILENT_S
        while left > 0:
            await asyncio.sleep(left)
            left = self._heartbeat_at + MOST_SILENT_S - asyncio.get_running_loop().time()

    def _post(self, entries: Sequence[WireResult | str]) -> None:
        self._outbox.extend(entries)
        self._changed.set()


def _page_of(outbox: Sequence[WireResult | str]) -> Sequence[WireResult | str]:
    """Return the first entries that make a page."""
    size = 0
    for count, entry in enumerate(outbox[:_PAGE_ENTRIES]):
        if size > _PAGE_BYTES:
            return outbox[:count]
        if not isinstance(entry, str):
            size += len(entry.output or b"") + (0 if entry.failure is None else len(entry.failure.body))
    return outbox[:_PAGE_ENTRIES]
