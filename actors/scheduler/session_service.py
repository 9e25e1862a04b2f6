"""SessionService: the sessions of dynamic runs, by run. Opened by their drivers, closed by them, or when they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.accounts import close_account
from ensemble_ray.actors.link.events import begin_events
from ensemble_ray.actors.link.log_lines import LogLine
from ensemble_ray.actors.link.wire import Keep, OrderBatch, ReportPage, SessionOpening, driver_of
from ensemble_ray.actors.scheduler.dynamic_run import DynamicRun
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.session import SessionLimits
from ensemble_ray.actors.shared.event_hub import EventHub
from ensemble_ray.errors import EnsembleError, RunExistsError, message_of
from ensemble_ray.process.bounded_log import bounded_logger

__all__ = ["SessionService"]

_log = bounded_logger(__name__)


class SessionService:
    """Sessions of dynamic runs, whose drivers coordinate them; a part of the scheduler. Nothing of them outlives its process."""

    def __init__(
        self,
        pool: ProcessPool,
        limits: Callable[[], SessionLimits],
        say: Callable[[str, Sequence[LogLine]], None],
    ) -> None:
        """Make it.

        Args:
            pool: Where processes come from.
            limits: Return what the processes of a run that begins now are held to.
            say: Takes lines for the log of a run's driver, by the run's id.
        """
        self._pool = pool
        self._limits = limits
        self._say = say
        self._dynamic: dict[str, DynamicRun] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    async def open_session(self, opening: SessionOpening) -> Any:
        """Be ready for a run's tasks; return the handle of the hub that has its events, None when nobody listens.

        What a driver opens that took the run over, or lost its session, takes the place of what was open.

        Raises:
            RunExistsError: another driver coordinates a run of that id, and no record says whose it is.
        """
        while (held := self._dynamic.get(opening.run_id)) is not None:
            if held.session == opening.session:
                return held.hub
            if driver_of(held.session) != driver_of(opening.session) and opening.location is None:
                raise RunExistsError(f"Run '{opening.run_id}' is running: wait for its end, or choose another run_id")
            await self._end(held, keep=None)
        hub = spawn.event_hub(EventHub) if opening.is_connected else None
        say = partial(self._say, opening.run_id)
        run = DynamicRun(opening, self._pool, hub=hub, limits=self._limits(), say=say)
        self._dynamic[opening.run_id] = run
        watch = self._watches[run.session] = asyncio.get_running_loop().create_task(self._watch(run))
        watch.add_done_callback(lambda _: self._watches.pop(run.session, None))
        if hub is not None and not opening.is_resubmission:
            await begin_events(hub, opening.run_id)
        return hub

    async def submit_orders(self, run_id: str, session: str, batch: OrderBatch) -> bool:
        """Take orders; return False where that session is not known here, since this process was started anew."""
        run = self._find(run_id, session)
        if run is not None:
            run.submit(batch)
        return run is not None

    async def collect(self, run_id: str, session: str, cursor: int, wait_s: float) -> ReportPage | None:
        """Return what came of orders; None where that session is not known here.

        Args:
            run_id: The run's id.
            session: The driver's opening of it.
            cursor: How many entries the driver has had; they are forgotten here.
            wait_s: Longest wait when there is nothing new.

        Raises:
            EnsembleError: another driver coordinates the run now.
        """
        run = self._find(run_id, session)
        page = None if run is None else await run.collect(cursor, wait_s)
        now = self._dynamic.get(run_id)
        if now is not None and driver_of(now.session) != driver_of(session):
            raise EnsembleError(f"Run {run_id} was taken over: another process goes on with it, this one must stop")
        return page if now is run else None

    async def stop_orders(self, run_id: str, session: str, instances: Sequence[str]) -> None:
        """Stop tasks; each is still reported."""
        run = self._find(run_id, session)
        if run is not None:
            run.stop(instances)

    async def close_session(self, run_id: str, session: str, *, keep: Keep | None) -> None:
        """End a run that its driver is done with; its processes are kept for the next run where wanted."""
        run = self._find(run_id, session)
        if run is not None:
            await self._end(run, keep=keep)
            close_account(run.context)

    def _find(self, run_id: str, session: str) -> DynamicRun | None:
        run = self._dynamic.get(run_id)
        return run if run is not None and run.session == session else None

    async def _watch(self, run: DynamicRun) -> None:
        """End a run that its driver left without a word (S-MR-164)."""
        await run.until_driver_is_gone()
        _log.warning("Run %s: its driver is gone; its processes are ended", run.run_id)
        await self._end(run, keep=None)
        close_account(run.context)

    async def _end(self, run: DynamicRun, *, keep: Keep | None) -> None:
        if self._dynamic.get(run.run_id) is run:
            del self._dynamic[run.run_id]
        watch = self._watches.get(run.session)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        try:
            await run.close(keep=keep)
        except Exception as error:  # noqa: BLE001  whatever it is, the run is over here
            _log.warning("Run %s: its processes could not be let go: %s", run.run_id, message_of(error))
