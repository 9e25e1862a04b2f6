"""SchedulerActor: one per cluster; a run is an id in it. Journals the stimulus, asks the machine, carries out.

It makes every other actor of a run, passes bytes on without loading them, and runs no user code. The rules are in
`ensemble_ray.schedule` and `ensemble_ray.plan.housing`. When its process dies, Ray starts it again; it then goes on
with the runs whose packages lie in the vault, from their records (S-DUR-32).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import cloudpickle
import ray

from actors import spawn
from actors.accounts import close_account
from actors.agent import refuse
from actors.fed_wire import FedBatch, FedPackage, FedPage
from actors.feeds import Feeds
from actors.handles import begin_events
from actors.loading import load_everywhere
from actors.log_lines import LineDesk
from actors.processes import ProcessPool
from actors.quiet_gc import freeze_modules
from actors.run_houses import RunHouses
from actors.vault import Vault
from actors.wire import RunPackage, WireReport, pack_recorded
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.config import package_version
from ensemble_ray.errors import RecordError, RunExistsError, StaleEpochError, message_of
from ensemble_ray.execute.conductor import Conducted, Resumed, RunConductor
from ensemble_ray.inline import GRACE_S, SystemClock, let_go, own_run, watch_for_cancel
from ensemble_ray.limits.endpoints import EndpointNews
from ensemble_ray.outputs import RunState
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.recovery import Recovered
from ensemble_ray.record.spent import with_account
from ensemble_ray.record.stores import OwnedRun, store_at

__all__ = ["SchedulerActor"]

_log = bounded_logger(__name__)
#: Ended runs whose results nobody has fetched yet.
KEPT_RESULTS = 64


def default_max_actors() -> int:
    """How many agent processes a run may have of their own: max(4, 2 x CPUs), at most one per 200 MB of memory."""
    resources = cast("dict[str, float]", cast("Any", ray.cluster_resources)())
    cpus = int(resources.get("CPU", os.cpu_count() or 1))
    memory = int(resources.get("memory", 0))
    bound = max(1, memory // 200_000_000) if memory else cpus * 2
    return max(1, min(max(4, 2 * cpus), bound))


class SchedulerActor(LineDesk):
    """Holds the runs of a cluster."""

    def __init__(self) -> None:
        super().__init__()
        freeze_modules()
        self._pool = ProcessPool()
        self._vault = Vault()
        #: runs whose tasks their drivers make while they go on
        self._feeds = Feeds(self._pool, default_max_actors)
        self._runs: dict[str, ScheduledRun] = {}
        self._ended: dict[str, asyncio.Future[Conducted[bytes, bytes]]] = {}
        self._recovering: asyncio.Task[None] | None = None
        # A constructor runs before the loop does; this call is the first that the loop gets.
        cast("Any", ray.get_runtime_context().current_actor).recovered.remote()

    async def version(self) -> str:
        """Version of the package that this process runs."""
        return package_version()

    async def recovered(self) -> None:
        """Return when the runs of an earlier process of this actor go on."""
        if self._recovering is None:
            self._recovering = asyncio.get_running_loop().create_task(self._recover())
        recovering = self._recovering
        try:
            await asyncio.shield(recovering)
        except Exception:
            if self._recovering is recovering:
                self._recovering = None  # the vault could not be reached: the next caller tries again
            raise

    async def submit(self, package: RunPackage) -> Any:
        """Begin a run, or go on with one; gives the handle of the hub that has its events, None when nobody asked for any.

        Raises:
            RunExistsError: a run of that id is running.
            RecordError: its record cannot be written, or is damaged.
        """
        await self.recovered()
        begun = self._ended.get(package.run_id)
        if (begun is not None and not begun.done()) or package.run_id in self._feeds:
            raise RunExistsError(f"Run '{package.run_id}' is running: wait for its end, or choose another run_id")
        hub = spawn.event_hub() if package.is_attended else None
        run = await self._begin(package, hub)
        if hub is not None:
            await begin_events(hub, package.run_id)
        await run.begin()
        return hub

    async def check_loading(self, bodies: Mapping[str, bytes]) -> None:
        """Have every node load these, but not this process (S-SET-56)."""
        await load_everywhere(bodies)

    async def attend(self, run_id: str) -> bool:
        """Whether a run is known here: it runs, or its result waits to be fetched."""
        await self.recovered()
        return run_id in self._ended

    async def report(self, run_id: str, house: str, reports: Sequence[WireReport]) -> None:  # noqa: ARG002  named in traces of calls
        """Results of tasks, in the batches in which a house sends them."""
        run = self._runs.get(run_id)
        if run is not None:
            await run.report(reports)
        else:
            await self._feeds.report(run_id, reports)

    async def locate(self, run_id: str, agent_key: str, lost: str | None = None) -> list[tuple[str, Any]]:
        """Where an agent of a run lives, for another one that hands work to it: names and handles of its processes.

        Args:
            run_id: The run's id.
            agent_key: Who is looked for.
            lost: Name of a process that failed a call; it is given up.
        """
        run = self._runs.get(run_id)
        return [] if run is None else run.locate(agent_key, lost)

    async def endpoint_news(self, house: str, news: EndpointNews) -> None:
        """What one process knows of an endpoint, for all others of the cluster (S-DUR-64, S-DUR-65)."""
        self._pool.tell(news, source=house)

    async def wait(self, run_id: str) -> Conducted[bytes, bytes] | None:
        """How a run ended, when it has; None where nothing is known of it, since this process was started anew."""
        await self.recovered()
        ended = self._ended.get(run_id)
        return None if ended is None else await asyncio.shield(ended)

    async def cancel(self, run_id: str) -> None:
        """End a run soon."""
        await self.recovered()
        run = self._runs.get(run_id)
        if run is not None:
            await run.cancel()

    async def forget(self, run_id: str) -> None:
        """The result was fetched; that of a later run of the same id was not."""
        if run_id in self._ended and self._ended[run_id].done():
            del self._ended[run_id]

    async def states(self) -> dict[str, str]:
        """Runs that have not ended."""
        return dict.fromkeys((*self._runs, *self._feeds.running), RunState.RUNNING.value)

    async def cool(self) -> None:
        """End the processes that are kept for the next run."""
        self._pool.cool()

    # Runs whose tasks their drivers make while they go on; nothing of them outlives this process.

    async def open_feed(self, package: FedPackage) -> Any:
        """Be ready for the tasks of a run; gives the handle of the hub that has its events, None when nobody asked for any.

        Raises:
            RunExistsError: a run of that id is running.
        """
        await self.recovered()
        if package.run_id in self._runs:
            raise RunExistsError(f"Run '{package.run_id}' is running: wait for its end, or choose another run_id")
        return await self._feeds.open(package)

    async def feed(self, run_id: str, session: str, batch: FedBatch) -> bool:
        """Take orders; False where that session is not known here, since this process was started anew."""
        return self._feeds.feed(run_id, session, batch)

    async def collect(self, run_id: str, session: str, cursor: int, wait_s: float) -> FedPage | None:
        """What came of orders; None where that session is not known here.

        Args:
            run_id: The run's id.
            session: The driver's opening of it.
            cursor: How many entries the driver has had; they are forgotten here.
            wait_s: Longest wait when there is nothing new.

        Raises:
            EnsembleError: another driver feeds the run now.
        """
        return await self._feeds.collect(run_id, session, cursor, wait_s)

    async def stop_fed(self, run_id: str, session: str, instances: Sequence[str]) -> None:
        """Stop tasks; each is still reported."""
        self._feeds.stop(run_id, session, instances)

    async def close_feed(self, run_id: str, session: str, *, keep: bool) -> None:
        """Let the processes of a run go, to be kept for the next run where wanted."""
        await self._feeds.close(run_id, session, keep=keep)

    async def _recover(self) -> None:
        for package in await self._vault.kept():
            if package.run_id in self._runs:
                continue  # it went on before the vault was out of reach
            again = replace(package, is_resumed=True, is_restart=True, takes_over=False)
            try:
                run = await self._begin(again, spawn.event_hub() if again.is_attended else None)
            except Exception as error:  # noqa: BLE001  one run that cannot go on must not keep the others from it
                _log.error("Run %s cannot go on after the scheduler's death: %s", again.run_id, message_of(error))
                # Its driver, if there is one, submits it again and hears why; no later scheduler is to begin it.
                await self._vault.drop(again.run_id)
                continue
            await run.begin()

    async def _begin(self, package: RunPackage, hub: Any) -> ScheduledRun:
        """Own the run's record and know the run from now on; `begin` of it starts its tasks."""
        run_id, before = package.run_id, self._ended.get(package.run_id)
        ended: asyncio.Future[Conducted[bytes, bytes]] = asyncio.get_running_loop().create_future()
        self._ended[run_id] = ended
        owned = None
        try:
            if package.store is not None:
                store = store_at(package.store)
                if package.is_again:  # it goes on where an earlier attempt came to record anything, else it begins
                    is_begun = bool(await store.facts(run_id))
                    package = replace(package, is_again=False, is_resumed=is_begun, is_restart=is_begun)
                owned = await own_run(
                    store,
                    run_id,
                    origin=package.header.origin,
                    durability=package.frame.durability,
                    is_resumed=package.is_resumed,
                    takes_over=package.takes_over,
                )
            run = ScheduledRun(package, self._pool, hub=hub, owned=owned, vault=self._vault, finished=ended)
        except BaseException as error:
            del self._ended[run_id]
            if before is not None:
                self._ended[run_id] = before  # nobody has fetched it yet
            refuse(ended, error)
            await let_go(owned)
            raise
        self._runs[run_id] = run
        ended.add_done_callback(lambda _done: self._forget(run_id))
        return run

    def _forget(self, run_id: str) -> None:
        self._runs.pop(run_id, None)
        ended = [name for name, end in self._ended.items() if end.done()]
        for name in ended[: max(0, len(ended) - KEPT_RESULTS)]:
            del self._ended[name]


class ScheduledRun:
    """One run in the scheduler."""

    def __init__(
        self,
        package: RunPackage,
        pool: ProcessPool,
        *,
        hub: Any,
        owned: OwnedRun | None,
        vault: Vault,
        finished: asyncio.Future[Conducted[bytes, bytes]],
    ) -> None:
        recorded = () if owned is None else owned.earlier
        package = replace(package, frame=with_account(package.frame, (*recorded, *package.earlier)))
        self._package = package
        self._owned = owned
        self._vault = vault
        self._houses = RunHouses(package, pool, max_own=default_max_actors(), hub=hub, take=self.report)
        self._conductor: RunConductor[bytes, bytes] = RunConductor(
            run_id=package.run_id,
            plan=package.plan,
            header=package.header,
            journal=MemoryJournal(package.run_id) if owned is None else owned.journal,
            clock=SystemClock(),
            houses=self._houses,
            earlier=package.earlier,
            epoch=0 if owned is None else owned.epoch,
            resumed=None if owned is None or not owned.earlier else self._resumed(owned),
        )
        self._jobs: set[asyncio.Task[None]] = set()
        self._keeping: asyncio.Task[None] | None = None
        self.finished = finished

    def _resumed(self, owned: OwnedRun) -> Resumed[bytes, bytes]:
        """What the record knows of the run; outputs stay data, since their types are the user's."""
        package = self._package
        recovered = Recovered(owned.earlier, is_resumed=not package.is_restart)
        resumed: Resumed[bytes, bytes] = recovered.resumed(
            lambda key, data: pack_recorded(data, package.tasks.get(key, b"")), cloudpickle.dumps
        )
        return replace(resumed, is_restart=package.is_restart)

    async def begin(self) -> None:
        """Start processes and the first tasks."""
        self._in_background(self._finish())
        if self._owned is not None:
            self._keeping = self._in_background(self._keep())
        with self._ending_with_what_fails():
            self._houses.open()
            await self._conductor.start()

    async def report(self, reports: Sequence[WireReport]) -> None:
        """Take results."""
        with self._ending_with_what_fails():
            await self._conductor.report(self._houses.reported(reports))

    def locate(self, agent_key: str, lost: str | None) -> list[tuple[str, Any]]:
        """Processes of an agent."""
        return self._houses.locate(agent_key, lost=lost)

    async def cancel(self) -> None:
        """End the run; processes that hold on are ended after a grace."""
        with self._ending_with_what_fails():
            await self._conductor.cancel()
        asyncio.get_running_loop().call_later(GRACE_S + 1.0, self._houses.end_stuck)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        job = asyncio.get_running_loop().create_task(work)
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        return job

    async def _finish(self) -> None:
        """When the run has ended: let the processes go, close the record, then tell the caller."""
        try:
            self.finished.set_result(await self._released())
        except Exception as error:  # noqa: BLE001  the waiting caller must hear of any failure
            self.finished.set_exception(error)
            self.finished.exception()  # a run that went on without its driver has no caller

    async def _keep(self) -> None:
        """Keep the package; without it the run outlives this process only while its driver is there."""
        try:
            await self._vault.keep(self._package)
        except Exception as error:  # noqa: BLE001  whatever it is, the run itself is not concerned
            _log.warning(
                "Run %s cannot be kept for another scheduler, and is interrupted if this one dies: %s",
                self.run_id,
                message_of(error),
            )

    async def _drop(self, keeping: asyncio.Task[None]) -> None:
        await asyncio.wait([keeping])
        try:
            await self._vault.drop(self.run_id)
        except Exception as error:  # noqa: BLE001  whatever it is, the run has ended
            _log.warning("Run %s cannot be forgotten: %s", self.run_id, message_of(error))

    async def _released(self) -> Conducted[bytes, bytes]:
        keeps_warm, state = False, RunState.FAILED
        watching = None
        if self._owned is not None:
            watching = self._in_background(watch_for_cancel(self._owned, self.run_id, self.cancel))
        try:
            ended = await asyncio.shield(self._conductor.ended)
            keeps_warm, state = self._package.keeps_warm, ended.state
        except (RecordError, StaleEpochError):
            state = RunState.INTERRUPTED  # what was recorded can be gone on with
            raise
        finally:
            if watching is not None:
                watching.cancel()
            # Before anybody hears of the end: then a run of that id may begin, or go on.
            dropping = None if self._keeping is None else self._in_background(self._drop(self._keeping))
            try:
                # Where conducting itself broke, processes may still be at work: those are not used again.
                await self._houses.close(keep=keeps_warm)
                if dropping is not None:
                    await asyncio.wait([dropping])
            finally:
                close_account(self._package.frame)
                if self._owned is not None:
                    await self._owned.close(state)
        return ended

    @property
    def run_id(self) -> str:
        """The run's id."""
        return self._package.run_id

    @contextmanager
    def _ending_with_what_fails(self) -> Generator[None]:
        """What goes wrong in conducting, such as a full disk, ends the run with its error; nobody else would hear."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  whatever it is, the run must not wait for ever
            if not self._conductor.ended.done():
                self._conductor.ended.set_exception(error)
