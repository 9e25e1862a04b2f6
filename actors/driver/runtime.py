"""RayRuntime: implements the `Runtime` port on a cluster.

It creates only the detached schedulers, which start all other actors.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import ray
import ray.exceptions
from msgspec.structs import replace

from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.cluster import (
    LOCAL,
    PROGRAM,
    ClusterHeartbeat,
    check_fork,
    check_version,
    connection_id,
    join_or_start,
)
from ensemble_ray.actors.driver.driver_connection import DriverConnection
from ensemble_ray.actors.driver.node_check import ask_nodes, check_loading, question_about
from ensemble_ray.actors.driver.packing import list_payloads, pack_submission
from ensemble_ray.actors.driver.remote_executor import RemoteExecutor
from ensemble_ray.actors.link.packing import pack, unpack, unpack_failure, unpack_output
from ensemble_ray.actors.link.reach import RESTART_PAUSES_S, last_line, ours, reach, run_error
from ensemble_ray.actors.link.wire import EndPage, Keep, Submission
from ensemble_ray.actors.scheduler.scheduler import SchedulerActor
from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.errors import RunExistsError, ValidationError, message_of
from ensemble_ray.execute.orders import RunOutcome
from ensemble_ray.plan.placement import most_replicas, shard_of
from ensemble_ray.ports import Journal
from ensemble_ray.process.concurrency import abandon, bridge, run_blocking, threads, track
from ensemble_ray.process.config import Settings
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.ports import Deliver, PlannedWork, RunRequest, SubmissionReason
from ensemble_ray.values.metrics import NodesReport
from ensemble_ray.values.reviews import RunDirective

if TYPE_CHECKING:
    from ensemble_ray.actors.driver.jobs import JobServer

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_log = bounded_logger(__name__)
#: Together with joining the cluster below 30 s (S-CLU-2).
CHECK_S = 25.0


class RayRuntime:
    """Runs on Ray: on an existing cluster, or on a local one that lives until this process ends. It starts no process before the first run."""

    name = "ray"

    def __init__(
        self,
        address: str | None = None,
        *,
        home: str | Path | None = None,
        store: str | None = None,
        init_options: Mapping[str, object] | None = None,
        log_to_driver: bool = True,
        shards: int = 1,
        namespace: str | None = None,
    ) -> None:
        """Configure the runtime.

        Args:
            address: Cluster to join; default `RAY_ADDRESS`, else a local instance is started.
            home: Directory of the records on the cluster's head node; default: this process's.
            store: URL of a database for the records, for clusters that may lose their head node; default: `ENSEMBLE_RAY_STORE`.
            init_options: More arguments for `ray.init`.
            log_to_driver: Whether warnings and printed lines of agent processes are logged here too.
            shards: How many schedulers share the runs, by their ids; > 0.
            namespace: Separates schedulers and processes from programs of other namespaces; default: `ENSEMBLE_RAY_NAMESPACE`,
                else the unnamed namespace.

        Raises:
            ValidationError: `shards` is not a number above 0, or the namespace's name is invalid.
        """
        if not isinstance(shards, int) or isinstance(shards, bool) or shards < 1:
            raise ValidationError(f"RayRuntime shards must be > 0, got: {shards}")
        self._joined_at = address
        self._home = home
        self._store = store
        self._init_options = dict(init_options or {})
        self._log_to_driver = log_to_driver
        self._shards = shards
        self._namespace = check_namespace(Settings.from_environment().namespace if namespace is None else namespace)
        self._schedulers: Schedulers | None = None
        self._connected_as = ""
        self._connecting: asyncio.Task[None] | None = None
        self._keeps_warm = False
        track(self)

    def after_fork(self) -> None:
        """Drop the connections in a forked child: they belong to the parent."""
        abandon(self._schedulers, self._connecting)
        self._schedulers = self._connecting = None

    @property
    def store_address(self) -> StoreAddress:
        """Where its runs are recorded."""
        return StoreAddress.of(self._home, self._store)

    async def submit(self, request: RunRequest, work: PlannedWork) -> RayRun:
        """Start a planned run on the cluster."""
        request = self._with_logs(request)
        # Calls of scripted models return to this process.
        scripted = sys.modules.get("ensemble_ray.testing.scripted")
        has_doubles = scripted is not None and bool(work.planned.agents) and scripted.has_live_doubles()
        submission = pack_submission(
            request,
            work,
            keep=self._keep(),
            is_connected=_needs_driver(request, has_doubles=has_doubles),
            goes_on_alone=request.context.is_detached and not _asks_driver(request, has_doubles=has_doubles),
            program=PROGRAM,
        )
        try:
            scheduler = await self._find_scheduler(request)
            await check_loading(scheduler, list_payloads(submission))
            run = RayRun(request, submission, scheduler)
            await run.begin()
        except ray.exceptions.RayError as error:
            self._schedulers = None  # the next run connects again
            raise ours(error, request.run_id, request.origin) from None
        return run

    async def open_session(self, request: RunRequest, *, journal: Journal, deliver: Deliver) -> RemoteExecutor:
        """Open an executor on the cluster for tasks that are created during their run."""
        request = self._with_logs(request)
        del journal  # each process of the cluster opens its own
        try:
            scheduler = await self._find_scheduler(request)
            cluster = await threads.run(cast("Any", ray.cluster_resources))
            executor = RemoteExecutor(
                request,
                scheduler,
                is_connected=_needs_driver(request, has_doubles="ensemble_ray.testing.scripted" in sys.modules),
                keep=self._keep(),
                most_processes=most_replicas(cluster),
            )
            await executor.open(deliver)
        except ray.exceptions.RayError as error:
            self._schedulers = None  # the next run connects again
            raise ours(error, request.run_id, request.origin) from None
        return executor

    async def check_nodes(self, definition: object | None = None, *, timeout_s: float = CHECK_S) -> NodesReport:
        """Ask every node of the cluster whether a team can run there. No model is called.

        Args:
            definition: The team; None: the requirements of any team.
            timeout_s: How long the nodes may take; the report names those that have not answered.

        Raises:
            ValidationError: something that must be sent cannot be pickled.
            EnsembleError: the cluster cannot be joined.
        """
        question = await threads.run(question_about, definition)
        await threads.run(join_or_start, self._address, self._init_options)
        return await ask_nodes(question, timeout_s=timeout_s)

    @staticmethod
    def job_server(address: str | None = None) -> JobServer:
        """Return a cluster's job server.

        Args:
            address: As for `JobServer`.

        Raises:
            EnsembleError: it cannot be reached, or refuses.
        """
        # Importing Ray's job client takes 0.2 s, and no run needs it.
        from ensemble_ray.actors.driver.jobs import JobServer

        return JobServer(address)

    async def close(self) -> None:
        """End the idle agent processes that wait for the next run. The cluster keeps running."""
        self._keeps_warm = False
        if self._schedulers is not None and ray.is_initialized():
            try:
                await self._schedulers.evict_idle()
            except ray.exceptions.RayError as error:
                _log.warning("The scheduler cannot be reached; its processes end with it: %s", last_line(error))

    async def __aenter__(self) -> Self:
        self._keeps_warm = True
        return self

    async def __aexit__(self, *_: object) -> None:
        await bridge(self.close())

    def __enter__(self) -> Self:
        self._keeps_warm = True
        return self

    def __exit__(self, *_: object) -> None:
        run_blocking(self.close())

    async def _find_scheduler(self, request: RunRequest) -> Any:
        schedulers = await self._connect(request.cancelled)
        if request.store is None:
            await schedulers.check_unrecorded(request.run_id)
        return schedulers.of(request.run_id)

    async def _connect(self, cancelled: asyncio.Event) -> Schedulers:
        check_fork()
        # A handle is valid for one connection: until `ray.shutdown`.
        if self._connecting is None and (self._schedulers is None or connection_id() != self._connected_as):
            self._connecting = asyncio.get_running_loop().create_task(self._reconnect())
            self._connecting.add_done_callback(self._on_connected)
        if self._connecting is not None:
            connecting = self._connecting
            giving_up = asyncio.ensure_future(cancelled.wait())
            await asyncio.wait([connecting, giving_up], return_when=asyncio.FIRST_COMPLETED)
            giving_up.cancel()
            if not connecting.done():
                raise asyncio.CancelledError
            connecting.result()
        assert self._schedulers is not None, "connected, as just seen"  # noqa: S101  for the type
        return self._schedulers

    async def _reconnect(self) -> None:
        await threads.run(self._join)
        self._schedulers, self._connected_as = await Schedulers.connect(self._shards, self._namespace), connection_id()

    def _on_connected(self, connecting: asyncio.Task[None]) -> None:
        self._connecting = None
        if not connecting.cancelled():
            connecting.exception()  # marks it as retrieved: every waiting run may have been cancelled

    def _join(self) -> None:
        address = self._address
        if join_or_start(address, self._init_options) and address == LOCAL:
            # No other program uses it, and a new process costs a second.
            self._keeps_warm = True

    @property
    def _address(self) -> str:
        return self._joined_at or os.environ.get("RAY_ADDRESS", "").strip() or LOCAL

    def _with_logs(self, request: RunRequest) -> RunRequest:
        return replace(request, context=replace(request.context, forwards_logs=self._log_to_driver))

    def _keep(self) -> Keep:
        starts_local = self._schedulers is None and not ray.is_initialized() and self._address == LOCAL
        return "warm" if self._keeps_warm or starts_local else "briefly"


class RayRun:
    def __init__(self, request: RunRequest, submission: Submission, scheduler: Any) -> None:
        self.run_id, self._origin = request.run_id, request.origin
        self._submission = submission
        self._scheduler = scheduler
        self._is_cancelled = False
        self._heartbeat = ClusterHeartbeat(request.run_id, request.origin)
        self._connection = DriverConnection(request, self._heartbeat, scheduler)

    async def begin(self) -> None:
        self._connection.begin(await self._submit(self._submission))

    async def _submit(self, submission: Submission) -> Any:
        """A scheduler that restarted during the first attempt may have received the run."""
        tries = itertools.count()

        async def submit() -> Any:
            is_first = next(tries) == 0
            if not is_first and await self._scheduler.knows.remote(self.run_id):
                return spawn.existing("event_hub") if submission.is_connected else None
            reason = submission.reason if is_first else submission.reason.without_answer()
            return await self._scheduler.submit.remote(pack(replace(submission, reason=reason)))

        return await reach(submit, RESTART_PAUSES_S)

    async def wait(self) -> RunOutcome:
        try:
            return await self._fetch_end()
        except ray.exceptions.RayError as error:
            raise ours(error, self.run_id, self._origin) from None
        finally:
            await self._connection.detach()

    async def _fetch_end(self) -> RunOutcome:
        """The scheduler keeps the pages until all have arrived."""
        page = await self._wait_for_end()
        parts = [self._read(page)]
        while not page.is_last:
            following = await self._heartbeat.reach(partial(self._ask_for_end, page.cursor, page.end_id))
            if following is None:  # the scheduler restarted and lost the end
                following = await self._wait_for_end()
                parts = []
            page = following
            parts.append(self._read(page))
        self._connection.keep_last_lines(page.lines)
        self._scheduler.drop.remote(self.run_id, page.end_id)
        return _join(parts)

    def _read(self, page: EndPage) -> RunOutcome:
        try:
            return page.end.convert(unpack_output, unpack_failure)
        except Exception as error:
            self._scheduler.drop.remote(self.run_id, page.end_id)
            raise run_error(
                self.run_id,
                f"its results cannot be loaded in this process: {message_of(error)}. "
                "Install the module they come from here too, or use runtime='inline'",
            ) from error

    async def _wait_for_end(self) -> EndPage:
        """A restarted scheduler receives the run again (S-DUR-32)."""
        while True:
            ended = await self._heartbeat.reach(self._ask_for_end)
            if ended is not None:
                return ended
            if self._submission.store is None:
                raise run_error(
                    self.run_id,
                    "the scheduler's process died, and the run is not recorded (durability 'off'), so that it cannot go on. "
                    "Run it again, or use durability='effects'",
                )
            # The scheduler resumes from the record, which contains a cancellation.
            await self._submit(replace(self._submission, reason=SubmissionReason.RESUBMITTED))
            if self._is_cancelled:
                await self.cancel()

    async def _ask_for_end(self, cursor: int = 0, end_id: str = "") -> EndPage | None:
        if self._is_cancelled:  # `cancel` may have given up before the scheduler was back
            await self._scheduler.cancel.remote(self.run_id)
        body: bytes | None = await self._scheduler.wait.remote(self.run_id, cursor, end_id)
        return None if body is None else unpack(body, EndPage)

    async def cancel(self) -> None:
        """Wait for a restarting scheduler. If it is gone, `wait` reports that."""
        self._is_cancelled = True
        try:
            await reach(lambda: self._scheduler.cancel.remote(self.run_id), RESTART_PAUSES_S)
        except ray.exceptions.RayError as error:
            _log.warning("Run %s: the scheduler cannot be reached: %s", self.run_id, last_line(error))

    async def inject(self, directive: RunDirective) -> bool:
        try:
            is_accepted: bool = await reach(
                lambda: self._scheduler.inject.remote(self.run_id, directive), RESTART_PAUSES_S
            )
        except ray.exceptions.RayError as error:
            raise ours(error, self.run_id, self._origin) from None
        return is_accepted


def _join(parts: Sequence[RunOutcome]) -> RunOutcome:
    return replace(
        parts[0],
        completed=[each for part in parts for each in part.completed],
        delegated=[each for part in parts for each in part.delegated],
        failures=[each for part in parts for each in part.failures],
        unfinished=[each for part in parts for each in part.unfinished],
        raised=[each for part in parts for each in part.raised],
    )


class Schedulers:
    def __init__(self, handles: Sequence[Any], namespace: str = "") -> None:
        self._handles = handles
        self._namespace = namespace

    @classmethod
    async def connect(cls, shards: int, namespace: str) -> Schedulers:
        handles = [await threads.run(spawn.scheduler, SchedulerActor, number, namespace) for number in range(shards)]
        await asyncio.gather(*map(check_version, handles))
        return cls(handles, namespace)

    def of(self, run_id: str) -> Any:
        return self._handles[shard_of(run_id, len(self._handles))]

    async def check_unrecorded(self, run_id: str) -> None:
        """A program with another number of shards may have started the run elsewhere."""
        own = spawn.scheduler_name(shard_of(run_id, len(self._handles)), self._namespace)
        known = await threads.run(spawn.existing_schedulers, self._namespace)
        others = [each for name, each in known.items() if name != own]
        if any(await asyncio.gather(*(each.is_running.remote(run_id) for each in others))):
            raise RunExistsError(f"Run '{run_id}' is running: wait for its end, or choose another run_id")

    async def evict_idle(self) -> None:
        await asyncio.gather(*(each.evict_idle.remote() for each in self._handles))


def check_namespace(name: str) -> str:
    if name and not _NAMESPACE.fullmatch(name):
        raise ValidationError(
            f"A namespace has up to 64 letters, digits and '.', '_', '-', and begins with a letter or digit; got: {name[:80]!r}"
        )
    return name


def _needs_driver(request: RunRequest, *, has_doubles: bool) -> bool:
    """Whether this process must receive events, or answer requests."""
    context = request.context
    has_listeners = bool(context.interest) or context.has_tool_metrics
    is_reviewer = context.review_policy is not None and not context.is_detached
    return has_listeners or is_reviewer or _asks_driver(request, has_doubles=has_doubles)


def _asks_driver(request: RunRequest, *, has_doubles: bool) -> bool:
    """Whether tasks may send requests that only this process can answer, apart from reviews."""
    context, tools = request.context, sys.modules.get("ensemble_ray.memory.tools")
    has_held_objects = tools is not None and tools.has_held_objects()
    has_deps_here = context.deps is not None and context.deps.place == "driver"
    has_stores = context.memory is not None or context.has_reflections or has_held_objects or has_deps_here
    return context.on_unknown == OnUnknown.ASK or has_doubles or has_stores
