"""SchedulerActor: one per cluster; a run is an id in it. Journals the stimulus, asks the machine, carries out.

It makes every other actor of a run, passes bytes on without loading them, and runs no user code. The rules are in
`ensemble_ray.schedule` and `ensemble_ray.plan.housing`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import ray

from actors import spawn
from actors.processes import ProcessPool
from actors.quiet_gc import freeze_modules
from actors.run_houses import RunHouses
from actors.wire import RunPackage, WireReport
from ensemble_ray.config import package_version
from ensemble_ray.errors import RunExistsError
from ensemble_ray.execute.conductor import Conducted, RunConductor
from ensemble_ray.inline import GRACE_S, SystemClock
from ensemble_ray.outputs import RunState
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.journal_file import close_run, open_run

__all__ = ["SchedulerActor"]

_log = logging.getLogger(__name__)
#: Ended runs whose results nobody has fetched yet.
KEPT_RESULTS = 64


def default_max_actors() -> int:
    """How many agent processes a run may have of their own: max(4, 2 x CPUs), at most one per 200 MB of memory."""
    resources = cast("dict[str, float]", cast("Any", ray.cluster_resources)())
    cpus = int(resources.get("CPU", os.cpu_count() or 1))
    memory = int(resources.get("memory", 0))
    bound = max(1, memory // 200_000_000) if memory else cpus * 2
    return max(1, min(max(4, 2 * cpus), bound))


class SchedulerActor:
    """Holds the runs of a cluster."""

    def __init__(self) -> None:
        freeze_modules()
        self._pool = ProcessPool()
        self._runs: dict[str, ScheduledRun] = {}
        self._ended: dict[str, asyncio.Future[Conducted[bytes, bytes]]] = {}

    async def version(self) -> str:
        """Version of the package that this process runs."""
        return package_version()

    async def submit(self, package: RunPackage) -> Any:
        """Begin a run; gives the handle of the hub that has its events, None when nobody asked for any.

        Raises:
            RunExistsError: a run of that id is running.
        """
        if package.run_id in self._runs:
            raise RunExistsError(f"Run {package.run_id} is running already. Choose another run_id, or wait for it")
        hub = spawn.event_hub() if package.is_attended else None
        run = self._runs[package.run_id] = ScheduledRun(package, self._pool, hub)
        self._ended[package.run_id] = run.finished
        run.finished.add_done_callback(lambda _done: self._forget(package.run_id))
        if hub is not None:
            await hub.begin.remote(package.run_id)
        await run.begin()
        return hub

    async def report(self, run_id: str, house: str, reports: Sequence[WireReport]) -> None:  # noqa: ARG002  named in traces of calls
        """Results of tasks, in the batches in which a house sends them."""
        run = self._runs.get(run_id)
        if run is not None:
            await run.report(reports)

    async def wait(self, run_id: str) -> Conducted[bytes, bytes]:
        """How a run ended, when it has."""
        return await asyncio.shield(self._ended[run_id])

    async def cancel(self, run_id: str) -> None:
        """End a run soon."""
        run = self._runs.get(run_id)
        if run is not None:
            await run.cancel()

    async def forget(self, run_id: str) -> None:
        """The result was fetched."""
        self._ended.pop(run_id, None)

    async def states(self) -> dict[str, str]:
        """Runs that have not ended."""
        return dict.fromkeys(self._runs, RunState.RUNNING.value)

    async def cool(self) -> None:
        """End the processes that are kept for the next run."""
        self._pool.cool()

    def _forget(self, run_id: str) -> None:
        self._runs.pop(run_id, None)
        ended = [name for name in self._ended if name not in self._runs]
        for name in ended[: max(0, len(ended) - KEPT_RESULTS)]:
            del self._ended[name]


class ScheduledRun:
    """One run in the scheduler."""

    def __init__(self, package: RunPackage, pool: ProcessPool, hub: Any) -> None:
        self._package = package
        self._houses = RunHouses(package, pool, max_own=default_max_actors(), hub=hub, take=self.report)
        opened = None
        if package.home is not None:
            origin = package.header.get("origin")
            opened = open_run(Path(package.home), package.run_id, writer="scheduler", origin=str(origin or ""))
        self._directory = None if opened is None else opened.directory
        self._journal = MemoryJournal(package.run_id) if opened is None else opened.journal
        self._conductor: RunConductor[bytes, bytes] = RunConductor(
            run_id=package.run_id,
            plan=package.plan,
            header=package.header,
            journal=self._journal,
            clock=SystemClock(),
            houses=self._houses,
            earlier=package.earlier,
        )
        self._finishing: asyncio.Task[None] | None = None
        self.finished: asyncio.Future[Conducted[bytes, bytes]] = asyncio.get_running_loop().create_future()

    async def begin(self) -> None:
        """Start processes and the first tasks."""
        self._finishing = asyncio.get_running_loop().create_task(self._finish())
        with self._ending_with_what_fails():
            if self._directory is not None:
                self._directory.write_state(RunState.RUNNING)
            self._houses.open()
            await self._conductor.start()

    async def report(self, reports: Sequence[WireReport]) -> None:
        """Take results."""
        with self._ending_with_what_fails():
            await self._conductor.report(self._houses.reported(reports))

    async def cancel(self) -> None:
        """End the run; processes that hold on are ended after a grace."""
        with self._ending_with_what_fails():
            await self._conductor.cancel()
        asyncio.get_running_loop().call_later(GRACE_S + 1.0, self._houses.end_stuck)

    async def _finish(self) -> None:
        """When the run has ended: let the processes go, close the record, then tell the caller."""
        try:
            self.finished.set_result(await self._released())
        except Exception as error:  # noqa: BLE001  the waiting caller must hear of any failure
            self.finished.set_exception(error)

    async def _released(self) -> Conducted[bytes, bytes]:
        keeps_warm, state = False, RunState.FAILED
        try:
            ended = await asyncio.shield(self._conductor.ended)
            keeps_warm, state = self._package.keeps_warm, ended.state
        finally:
            # Where conducting itself broke, processes may still be at work: those are not used again.
            await self._houses.close(keep=keeps_warm)
            await close_run(self._journal, self._directory, state)
        return ended

    @contextmanager
    def _ending_with_what_fails(self) -> Generator[None]:
        """What goes wrong in conducting, such as a full disk, ends the run with its error; nobody else would hear."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever it is, the run must not wait for ever
            if not self._conductor.ended.done():
                self._conductor.ended.set_exception(error)
