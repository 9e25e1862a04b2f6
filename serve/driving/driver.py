"""The detached actor on the head node that drives the runs of an endpoint, and its client in replicas.

It outlives replicas and deployments. After a crash Ray restarts it, and it resumes all open runs. It returns a `Refusal` as a reply,
because an error of an actor means a failure of the cluster.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Self, TypeVar, cast

import msgspec
import ray
import ray.exceptions
from msgspec import Struct
from ray.util import metrics as ray_metrics

from ensemble_ray import IllegalStateError, RayRuntime, RunExistsError
from ensemble_ray.access.admission import Credentials
from ensemble_ray.access.key_store import open_keys
from ensemble_ray.access.quotas import Account, Standing
from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.reach import reach
from ensemble_ray.errors import EnsembleError
from ensemble_ray.errors.texts import describe
from ensemble_ray.process.concurrency import submit, threads
from ensemble_ray.process.context import bounded_logger, notify
from ensemble_ray.record.following import RunFollower
from ensemble_ray.serve.callers import Caller, CallerCache
from ensemble_ray.serve.catalog import load_catalog, load_datasets, load_models, load_teams, parse_schedules
from ensemble_ray.serve.driving.driven_runs import DrivenRuns, wire_event
from ensemble_ray.serve.driving.ledger import LedgerLostError, RunLedger, open_ledger, part_of_name
from ensemble_ray.serve.driving.requests import DriverConfig
from ensemble_ray.serve.driving.webhooks import driver_rules
from ensemble_ray.serve.run_service import METRICS, Metric, MetricKind, RunService, RunTally, Sample
from ensemble_ray.serve.schemas import (
    AcceptedRun,
    DrainInfo,
    EnsembleInfo,
    NewDrain,
    NewRun,
    Refusal,
    RunDetail,
    RunEvent,
)
from ensemble_ray.values.ids import new_run_id

_log = bounded_logger(__name__)
T = TypeVar("T")
M = TypeVar("M", bound=Callable[..., Awaitable[Any]])
#: A lost reader is created again from its cursor.
_KEPT_READERS = 2000
#: Time to send replies before this process exits, s.
_LEAVING_S = 1.0
_OPENING_S = 60.0
#: Interval of looks at a drain, s.
_DRAIN_LOOK_S = 0.5


class RayExporter:
    def __init__(self) -> None:
        made = cast("Any", ray_metrics)
        self._reported: dict[str, Any] = {
            metric.name: (made.Counter if metric.kind is MetricKind.COUNTER else made.Gauge)(
                metric.name.removesuffix("_total"), description=metric.description, tag_keys=metric.labels
            )
            for metric in METRICS
        }

    def add(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        self._reported[metric.name].inc(amount, tags=dict(labels))

    def put(self, metric: Metric, labels: Mapping[str, str], amount: float) -> None:
        self._reported[metric.name].set(amount, tags=dict(labels))


class RunEventPage(Struct, frozen=True, kw_only=True):
    events: Sequence[RunEvent] = msgspec.field(default_factory=tuple)
    is_over: bool = False


class RunDriver:
    """The actor of `RemoteRuns`. It loads the teams and resumes open runs in the background."""

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._readers: OrderedDict[str, RunFollower] = OrderedDict()
        self._callers = CallerCache(open_keys(), config.keys, find_standing=self._find_standing)
        self._tally = RunTally(RayExporter())
        self._is_leaving = False
        self._opening: concurrent.futures.Future[DrivenRuns] = submit(self._open())

    async def _open(self) -> DrivenRuns:
        config = self._config
        teams = await threads.run(load_teams, config.teams)
        runtime = await RayRuntime(namespace=config.namespace).__aenter__()
        tools = await threads.run(load_catalog, config.tools)
        models = await threads.run(load_models, config.models)
        datasets = await threads.run(load_datasets, config.datasets)
        ledger: RunLedger | None = None
        while ledger is None:  # an endpoint of the same name on another cluster may be ending (S-SRV-46)
            try:
                ledger = await threads.run(open_ledger, runtime.store_address, config.name, config.namespace)
            except RunExistsError as error:
                _log.warning("The endpoint '%s' cannot drive runs yet: %s", config.name, error)
        runs = DrivenRuns(
            *(teams, runtime, ledger, config.limits),
            tally=self._tally,
            tools=tools,
            models=models,
            datasets=datasets,
            webhooks=driver_rules(config.webhooks, config.webhook_hosts),
            on_lost=self._leave,
            deployed_at=config.deployed_at,
            watch=config.watch,
            endpoint=f"{config.namespace}/{config.name}",
            schedules=parse_schedules(config.schedules),
        )
        await runs.recover()
        return runs

    def _leave(self, error: RunExistsError) -> None:
        """Exit, because another process owns the ledger (S-SRV-46). The next process waits for it and refuses requests."""
        if not self._is_leaving:
            self._is_leaving = True
            _log.error("The driver of the endpoint '%s' exits: %s", self._config.name, error)
            asyncio.get_running_loop().call_later(_LEAVING_S, os._exit, 1)

    async def _runs(self) -> DrivenRuns:
        if self._is_leaving:
            raise _driven_elsewhere()
        opening = asyncio.shield(asyncio.wrap_future(self._opening))
        try:
            async with asyncio.timeout(_OPENING_S):
                return await opening
        except TimeoutError:
            text = "The endpoint is starting. Accepted runs are stored"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", text, retry_after_s=5) from None
        except (EnsembleError, IllegalStateError) as error:
            _log.error("The endpoint '%s' cannot drive runs: %s", self._config.name, describe(error))
            text = f"The endpoint could not start ({type(error).__name__}). See its log"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", text, retry_after_s=30) from None

    async def deployed_at(self) -> float:
        return self._config.deployed_at

    async def metrics(self) -> Sequence[Sample]:
        return self._tally.samples()

    async def admit(self, credentials: Credentials) -> Caller | Refusal:
        return await self._reply(self._callers.admit(credentials))

    async def standings(self, caller: Caller) -> Sequence[Standing] | Refusal:
        return await self._reply(self._callers.standings(caller))

    def _find_standing(self, account: Account) -> Standing | None:
        is_open = self._opening.done() and not self._opening.cancelled() and self._opening.exception() is None
        return self._opening.result().standing(account) if is_open else None

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of `DrivenRuns`."""

        async def call() -> Any:
            return await getattr(await self._runs(), method)(*args, **options)

        return await self._reply(call())

    async def read_events(
        self, reader: str, run_id: str, after: str | None, timeout_s: float, types: frozenset[str] | None = None
    ) -> RunEventPage | Refusal:
        """Return the next events of a reader. Without its stored position it continues behind `after`."""

        async def read() -> RunEventPage:
            follower = self._readers.pop(reader, None)
            runs = await self._runs()
            if follower is None:
                follower = await runs.follow(run_id, after, types)
            events = await runs.read(follower, timeout_s)
            if not follower.is_over:
                self._readers[reader] = follower
                if len(self._readers) > _KEPT_READERS:
                    self._readers.popitem(last=False)
            return RunEventPage(events=[wire_event(each) for each in events], is_over=follower.is_over)

        return await self._reply(read())

    async def forget_reader(self, reader: str) -> None:
        self._readers.pop(reader, None)

    async def _reply(self, work: Awaitable[T]) -> T | Refusal:
        try:
            return await work
        except LedgerLostError as error:
            self._leave(error)
            refusal = _driven_elsewhere()
        except Refusal as refused:
            refusal = refused
        self._tally.refuse(refusal.code)
        return refusal


def _driven_elsewhere() -> Refusal:
    text = "Another process drives the runs of this endpoint now. Accepted runs are stored"
    return Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", text, retry_after_s=5)


#: Limit of one call, s, after which a dead process is noticed.
_CALL_S = 10.0
_KNOWN_S = 1.0
_PAUSES_S = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 8.0)
_MOST_TAKEOVERS = 7


def driver_name(endpoint: str, namespace: str = "") -> str:
    own = f"endpoint-{part_of_name(endpoint)}"
    return f"{namespace}/{own}" if namespace else own


def drain_before_stop(driver: Any, limit_s: float, is_interrupted: threading.Event) -> None:
    """Let a driver refuse new runs until no run is active or queued, a limit of time, or an interruption. Blocks.

    Runs that wait for people resume at the next start.
    """
    get = cast("Any", ray.get)  # noqa: TID251  in no actor
    deadline, shown = time.monotonic() + limit_s, ""
    try:
        # The next start is a newer deployment, which ends the drain.
        found = get(driver.call.remote("drain", NewDrain(), by="ensemble-ray serve"), timeout=_OPENING_S)
        while isinstance(found, DrainInfo) and (left := found.open.accepted + found.open.running):
            text = f"Draining: {left} open run{'s' if left > 1 else ''}, {found.open.waiting} waiting for people (Ctrl-C stops)"
            if text != shown:
                notify(text)
                shown = text
            if time.monotonic() >= deadline or is_interrupted.wait(_DRAIN_LOOK_S):
                return
            found = get(driver.call.remote("drain_info"), timeout=_OPENING_S)
    except ray.exceptions.RayError as error:
        _log.warning("The endpoint cannot drain: %s", describe(error))


def _of_driver(method: M) -> M:
    async def call(self: RemoteRuns, *args: Any, **options: Any) -> Any:
        return await self.call(method.__name__, *args, **options)

    return cast("M", call)


class RemoteRuns:
    """The `RunService` and the `Callers` of a replica. On entry it finds or starts the driver.

    Calls can be repeated: a run gets its id before the call, and readers of events send their position.
    """

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._driver: Any = None
        #: with the time until which they are valid
        self._teams: tuple[Sequence[EnsembleInfo], float] = ((), 0.0)

    async def __aenter__(self) -> Self:
        self._driver = await threads.run(self._find)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._driver = None

    get = _of_driver(RunService.get)
    list = _of_driver(RunService.list)
    cancel = _of_driver(RunService.cancel)
    inject = _of_driver(RunService.inject)
    switch_model = _of_driver(RunService.switch_model)
    reviews = _of_driver(RunService.reviews)
    decide = _of_driver(RunService.decide)
    capabilities = _of_driver(RunService.capabilities)
    invoke_tool = _of_driver(RunService.invoke_tool)
    deliveries = _of_driver(RunService.deliveries)
    redeliver = _of_driver(RunService.redeliver)
    drain_info = _of_driver(RunService.drain_info)
    drain = _of_driver(RunService.drain)
    end_drain = _of_driver(RunService.end_drain)
    versions = _of_driver(RunService.versions)
    load_version = _of_driver(RunService.load_version)
    share_version = _of_driver(RunService.share_version)
    schedules = _of_driver(RunService.schedules)
    schedule = _of_driver(RunService.schedule)
    pause_schedule = _of_driver(RunService.pause_schedule)
    run_schedule = _of_driver(RunService.run_schedule)

    async def ensembles(self) -> Sequence[EnsembleInfo]:
        teams, until = self._teams
        now = asyncio.get_running_loop().time()
        if now >= until:
            teams = await self.call("ensembles")
            self._teams = teams, now + _KNOWN_S
        return teams

    async def metrics(self) -> Sequence[Sample]:
        return await self._ask(lambda driver: driver.metrics.remote())

    async def admit(self, credentials: Credentials) -> Caller:
        return await self._ask(lambda driver: driver.admit.remote(credentials))

    async def standings(self, caller: Caller) -> Sequence[Standing]:
        return await self._ask(lambda driver: driver.standings.remote(caller))

    async def start(
        self, asked: NewRun, *, idempotency_key: str | None = None, account: Account | None = None
    ) -> AcceptedRun:
        named = asked if asked.run_id else asked.model_copy(update={"run_id": new_run_id()})
        accepted: AcceptedRun = await self.call("start", named, idempotency_key=idempotency_key, account=account)
        return accepted

    async def wait(self, run_id: str, timeout_s: float) -> RunDetail:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            left = max(0.0, min(_CALL_S, deadline - loop.time()))
            found: RunDetail = await self.call("wait", run_id, left)
            if found.status.is_final or found.status == "waiting" or loop.time() >= deadline:
                return found

    async def events(
        self, run_id: str, after: str | None = None, *, types: frozenset[str] | None = None
    ) -> AsyncGenerator[RunEvent]:
        reader, cursor = uuid.uuid4().hex, after

        def read(driver: Any) -> Any:
            return driver.read_events.remote(reader, run_id, cursor, _CALL_S, types)

        try:
            while True:
                page: RunEventPage = await self._ask(read)
                for each in page.events:
                    cursor = each.cursor or cursor
                    yield each
                if page.is_over:
                    return
        finally:
            with contextlib.suppress(ray.exceptions.RayError):
                self._driver.forget_reader.remote(reader)

    async def call(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of `DrivenRuns` in the driver's process."""
        return await self._ask(lambda driver: driver.call.remote(method, *args, **options))

    async def _ask(self, call: Callable[[Any], Awaitable[T | Refusal]]) -> T:
        """Call the driver, and wait while it restarts."""

        async def find_again() -> None:
            _log.warning("Could not reach the driver of the runs, retrying")
            with contextlib.suppress(ray.exceptions.RayError):
                self._driver = await threads.run(self._find)

        lost = ray.exceptions.RayActorError
        try:
            reply = await reach(lambda: call(self._driver), _PAUSES_S, retry_on=lost, before_retry=find_again)
        except lost as error:
            text = "The driver of the runs cannot be reached. Accepted runs are stored"
            raise Refusal(HTTPStatus.SERVICE_UNAVAILABLE, "NOT_READY", text, retry_after_s=5) from error
        if isinstance(reply, Refusal):
            raise reply
        return reply

    def _find(self) -> Any:
        """Return the driver of this deployment or a newer one, and replace an older one. Blocks."""
        config = self._config
        find = partial(spawn.run_driver, RunDriver, driver_name(config.name, config.namespace), config)
        for _ in range(_MOST_TAKEOVERS):
            driver = find()
            try:
                deployed_at = cast("float", cast("Any", ray.get)(driver.deployed_at.remote()))  # noqa: TID251  in a thread
            except ray.exceptions.RayActorError:
                continue  # another replica is replacing it
            if deployed_at >= config.deployed_at:
                return driver
            _log.warning("A new deployment takes over the runs of '%s'", config.name)
            ray.kill(driver, no_restart=True)
        return find()
