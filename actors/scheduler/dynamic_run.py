"""A session with its coordinator in the driver, because its tasks are created there during the run.

The driver sends orders in batches and reads reports in pages, each kept until the driver acknowledges it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link import wire
from ensemble_ray.actors.link.events import EventHub, begin_events
from ensemble_ray.actors.link.limiter import close_account
from ensemble_ray.actors.scheduler.cluster_nodes import check_requirements
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.session import RunSession, SessionLimits
from ensemble_ray.errors import EnsembleError, RunExistsError, message_of
from ensemble_ray.execute.orders import RunContext
from ensemble_ray.process.context import bounded_logger

#: Then a silent driver counts as dead, s; a living driver asks every few seconds.
MOST_SILENT_S = 30.0
_PAGE_ENTRIES = 1000
_PAGE_BYTES = 1_000_000
_log = bounded_logger(__name__)


class DynamicRun:
    """It starts no process before the first order."""

    def __init__(
        self,
        opening: wire.SessionOpening,
        pool: ProcessPool,
        *,
        hub: Any,
        limits: SessionLimits,
        add_lines: Callable[[Sequence[wire.LogLine]], None],
    ) -> None:
        self._opening = opening
        self.hub = hub
        self._session = RunSession(
            opening,
            pool,
            self,
            hub=hub,
            limits=limits,
            check=check_requirements,
            warn=(lambda text: add_lines([wire.scheduler_line(text, wire.CLUSTER_LOGGER)]))
            if opening.context.forwards_logs
            else None,
        )
        #: batches that arrived before an earlier one
        self._early: set[int] = set()
        self._next_batch = 1
        #: reports, and instances of returned orders
        self._outbox: list[wire.WireResult | str] = []
        self._acknowledged = 0
        self._changed = asyncio.Event()
        self._heartbeat_at = asyncio.get_running_loop().time()

    @property
    def run_id(self) -> str:
        return self._opening.run_id

    @property
    def session(self) -> str:
        return self._opening.session

    @property
    def context(self) -> RunContext:
        return self._opening.context

    @property
    def waiting(self) -> int:
        return self._session.waiting

    def resize(self, limits: SessionLimits) -> None:
        self._session.resize(limits)

    def submit(self, batch: wire.OrderBatch) -> None:
        """A repeated batch has no effect."""
        if batch.number < self._next_batch or batch.number in self._early:
            return
        self._early.add(batch.number)
        while self._next_batch in self._early:
            self._early.discard(self._next_batch)
            self._next_batch += 1
        self._session.submit(batch.orders, callables=batch.callables, templates=batch.templates, bundles=batch.bundles)

    async def collect(self, cursor: int, wait_s: float) -> wire.ReportPage:
        """Return new reports after the driver's first `cursor` entries, which are dropped here. Wait up to `wait_s` for one."""
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
        return wire.ReportPage(
            cursor=cursor + len(entries),
            results=[entry for entry in entries if not isinstance(entry, str)],
            unknown=[entry for entry in entries if isinstance(entry, str)],
        )

    def stop(self, instances: Sequence[str]) -> None:
        self._session.stop(instances)

    async def report(self, reports: Sequence[wire.WireResult]) -> None:
        await self._session.report(reports)

    async def receive(self, reports: Sequence[wire.WireResult]) -> None:
        self._post(reports)

    def return_order(self, instance: str) -> None:
        self._post((instance,))

    async def close(self, *, keep: wire.Keep | None) -> None:
        self._changed.set()
        await self._session.close(keep=keep)

    async def until_driver_is_gone(self) -> None:
        left = MOST_SILENT_S
        while left > 0:
            await asyncio.sleep(left)
            left = self._heartbeat_at + MOST_SILENT_S - asyncio.get_running_loop().time()

    def _post(self, entries: Sequence[wire.WireResult | str]) -> None:
        self._outbox.extend(entries)
        self._changed.set()


def _page_of(outbox: Sequence[wire.WireResult | str]) -> Sequence[wire.WireResult | str]:
    size = 0
    for count, entry in enumerate(outbox[:_PAGE_ENTRIES]):
        if size > _PAGE_BYTES:
            return outbox[:count]
        if not isinstance(entry, str):
            size += len(entry.output or b"") + (0 if entry.failure is None else len(entry.failure.body))
    return outbox[:_PAGE_ENTRIES]


class SessionService:
    """The part of the scheduler for sessions of dynamic runs. They end with the scheduler's process."""

    def __init__(
        self,
        pool: ProcessPool,
        limits: Callable[[], SessionLimits],
        add_lines: Callable[[str, Sequence[wire.LogLine]], None],
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._add_lines = add_lines
        self._dynamic: dict[str, DynamicRun] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def open_session(self, opening: wire.SessionOpening) -> Any:
        """Return the handle of the run's event hub, or None when it has no listener.

        A driver that claimed the run, or lost its session, replaces the open session. A RunExistsError: another driver coordinates
        a run with this id, and no record decides who owns it.
        """
        while (held := self._dynamic.get(opening.run_id)) is not None:
            if held.session == opening.session:
                return held.hub
            if wire.driver_of(held.session) != wire.driver_of(opening.session) and opening.location is None:
                raise RunExistsError(f"Run '{opening.run_id}' is running: wait for its end, or choose another run_id")
            await self._end(held, keep=None)
        hub = spawn.event_hub(EventHub) if opening.is_connected else None
        add_lines = partial(self._add_lines, opening.run_id)
        run = DynamicRun(opening, self._pool, hub=hub, limits=self._limits(), add_lines=add_lines)
        self._dynamic[opening.run_id] = run
        watch = self._watches[run.session] = asyncio.get_running_loop().create_task(self._watch(run))
        watch.add_done_callback(lambda _: self._watches.pop(run.session, None))
        if hub is not None and not opening.is_resubmission:
            await begin_events(hub, opening.run_id)
        return hub

    async def submit_orders(self, run_id: str, session: str, batch: wire.OrderBatch) -> bool:
        """Return False if the session is unknown because this process was restarted."""
        run = self._find(run_id, session)
        if run is not None:
            run.submit(batch)
        return run is not None

    async def collect(self, run_id: str, session: str, cursor: int, wait_s: float) -> wire.ReportPage | None:
        """Return None if the session is unknown here. Raise if another driver coordinates the run now."""
        run = self._find(run_id, session)
        page = None if run is None else await run.collect(cursor, wait_s)
        now = self._dynamic.get(run_id)
        if now is not None and wire.driver_of(now.session) != wire.driver_of(session):
            raise EnsembleError(f"Run {run_id} was taken over: another process runs it now, and this one must stop")
        return page if now is run else None

    async def stop_orders(self, run_id: str, session: str, instances: Sequence[str]) -> None:
        run = self._find(run_id, session)
        if run is not None:
            run.stop(instances)

    async def close_session(self, run_id: str, session: str, *, keep: wire.Keep | None) -> None:
        run = self._find(run_id, session)
        if run is not None:
            await self._end(run, keep=keep)
            close_account(run.context)

    def _find(self, run_id: str, session: str) -> DynamicRun | None:
        run = self._dynamic.get(run_id)
        return run if run is not None and run.session == session else None

    async def _watch(self, run: DynamicRun) -> None:
        await run.until_driver_is_gone()
        _log.warning("Run %s: its driver is gone; its processes are ended", run.run_id)
        await self._end(run, keep=None)
        close_account(run.context)

    async def _end(self, run: DynamicRun, *, keep: wire.Keep | None) -> None:
        if self._dynamic.get(run.run_id) is run:
            del self._dynamic[run.run_id]
        watch = self._watches.get(run.session)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        try:
            await run.close(keep=keep)
        except Exception as error:  # noqa: BLE001  the run is over here
            _log.warning("Run %s: its processes could not be released: %s", run.run_id, message_of(error))
