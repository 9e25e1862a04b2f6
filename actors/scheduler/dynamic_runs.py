"""Feeds: the fed runs of a scheduler, by id. Opened by their drivers, closed by them, or when they are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import ray

from actors import spawn
from actors.link.accounts import close_account
from actors.link.fed_wire import FedBatch, FedPackage, FedPage, driver_of
from actors.link.handles import begin_events
from actors.link.wire import WireReport
from actors.scheduler.dynamic_run import FedRun
from actors.scheduler.kind_houses import most_replicas
from actors.scheduler.processes import ProcessPool
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.errors import EnsembleError, RunExistsError, message_of

__all__ = ["Feeds"]

_log = bounded_logger(__name__)


class Feeds:
    """The fed runs of one scheduler."""

    def __init__(self, pool: ProcessPool, max_own: Callable[[], int]) -> None:
        """Make it.

        Args:
            pool: Where processes come from.
            max_own: How many processes a run may have that nobody asked for.
        """
        self._pool = pool
        self._max_own = max_own
        self._runs: dict[str, FedRun] = {}
        self._watches: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    @property
    def running(self) -> Sequence[str]:
        """Ids of runs that are open."""
        return tuple(self._runs)

    async def open(self, package: FedPackage) -> Any:
        """Be ready for a run's tasks; gives the handle of the hub that has its events, None when nobody asked for any.

        What a driver opens that took the run over, or lost its session, takes the place of what was open.

        Raises:
            RunExistsError: another driver feeds a run of that id, and no record says whose it is.
        """
        while (held := self._runs.get(package.run_id)) is not None:
            if held.session == package.session:
                return held.hub
            if driver_of(held.session) != driver_of(package.session) and package.place is None:
                raise RunExistsError(f"Run '{package.run_id}' is running: wait for its end, or choose another run_id")
            await self._end(held, keep=False)
        hub = spawn.event_hub() if package.is_attended else None
        run = FedRun(
            package,
            self._pool,
            hub=hub,
            max_own=self._max_own(),
            most_replicas=most_replicas(cast("dict[str, float]", cast("Any", ray.cluster_resources)())),
            is_spread=sum(bool(node["Alive"]) for node in cast("list[dict[str, object]]", cast("Any", ray.nodes)()))
            > 1,
        )
        self._runs[package.run_id] = run
        watch = self._watches[run.session] = asyncio.get_running_loop().create_task(self._watch(run))
        watch.add_done_callback(lambda _: self._watches.pop(run.session, None))
        if hub is not None and not package.is_again:
            await begin_events(hub, package.run_id)
        return hub

    def feed(self, run_id: str, session: str, batch: FedBatch) -> bool:
        """Take orders; False where that session is not known here."""
        run = self._runs.get(run_id)
        if run is None or run.session != session:
            return False
        run.feed(batch)
        return True

    async def collect(self, run_id: str, session: str, cursor: int, wait_s: float) -> FedPage | None:
        """What a run has for its driver; None where that session is not known here.

        Raises:
            EnsembleError: another driver feeds the run now.
        """
        run, page = self._runs.get(run_id), None
        if run is not None and run.session == session:
            page = await run.collect(cursor, wait_s)
        now = self._runs.get(run_id)
        if now is not None and driver_of(now.session) != driver_of(session):
            raise EnsembleError(f"Run {run_id} was taken over: another process goes on with it, this one must stop")
        return page if now is run else None

    def stop(self, run_id: str, session: str, instances: Sequence[str]) -> None:
        """Stop tasks."""
        run = self._runs.get(run_id)
        if run is not None and run.session == session:
            run.stop(instances)

    async def report(self, run_id: str, reports: Sequence[WireReport]) -> None:
        """Results of tasks."""
        run = self._runs.get(run_id)
        if run is not None:
            await run.take(reports)

    async def close(self, run_id: str, session: str, *, keep: bool) -> None:
        """The driver is done with a run."""
        run = self._runs.get(run_id)
        if run is not None and run.session == session:
            await self._end(run, keep=keep)
            close_account(run.frame)

    async def _watch(self, run: FedRun) -> None:
        """End a run that its driver left without a word (S-MR-164)."""
        await run.deserted()
        _log.warning("Run %s: its driver is gone; its processes are ended", run.run_id)
        await self._end(run, keep=False)
        close_account(run.frame)

    async def _end(self, run: FedRun, *, keep: bool) -> None:
        if self._runs.get(run.run_id) is run:
            del self._runs[run.run_id]
        watch = self._watches.get(run.session)
        if watch is not None and watch is not asyncio.current_task():
            watch.cancel()
        try:
            await run.close(keep=keep)
        except Exception as error:  # noqa: BLE001  whatever it is, the run is over here
            _log.warning("Run %s: its processes could not be let go: %s", run.run_id, message_of(error))
