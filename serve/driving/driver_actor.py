"""RunDriver: the detached actor on the head node that drives the runs of one endpoint.

It outlives replicas and deployments. If its process dies, Ray restarts it, and it resumes all open runs of its ledger. It
returns a `Refusal` as a reply, because an error that an actor raises means a failure of the cluster.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ray.util import metrics as ray_metrics

from ensemble_ray import IllegalStateError, RayRuntime, RunExistsError
from ensemble_ray.access.admission import Admission, Credentials, Denied, KeyPolicy
from ensemble_ray.access.key_store import open_keys
from ensemble_ray.errors import EnsembleError
from ensemble_ray.errors.texts import describe
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import SystemClock, submit, threads
from ensemble_ray.serve.callers import ANYBODY, Caller
from ensemble_ray.serve.catalog import load_catalog, load_datasets, load_models
from ensemble_ray.serve.driving.driven_runs import DrivenRuns, wire_event
from ensemble_ray.serve.driving.ledger import LedgerLostError, open_ledger
from ensemble_ray.serve.metrics import METRICS, Metric, MetricKind, RunTally, Sample
from ensemble_ray.serve.schemas import Refusal
from ensemble_ray.serve.team import load_teams

if TYPE_CHECKING:
    from ensemble_ray.access.key_store import KeyStamp, KeyStore
    from ensemble_ray.ports import Clock
    from ensemble_ray.record.following import RunFollower
    from ensemble_ray.record.stores import StoreAddress
    from ensemble_ray.serve.driving.ledger import RunLedger
    from ensemble_ray.serve.driving.requests import DriverConfig
    from ensemble_ray.serve.schemas import (
        AcceptedRun,
        Capabilities,
        DecidedReview,
        EnsembleInfo,
        NewDecision,
        NewDirective,
        NewModel,
        NewRun,
        ReviewConflict,
        ReviewOfEnsemble,
        RunDetail,
        RunEvent,
        RunFilter,
        RunPage,
        ToolCallBody,
        ToolReply,
    )


_log = bounded_logger(__name__)
_NONE_MADE = (
    "This endpoint has no keys yet, and without one it answers on loopback alone. What to do: the operator makes one with "
    "ensemble-ray keys add NAME"
)
_MISSING = "A key is needed. What to do: send it as 'Authorization: Bearer KEY'"
_UNKNOWN = "This key is unknown here, or was revoked"
_REALM = 'Bearer realm="ensemble-ray"'


T = TypeVar("T")
#: Cached readers of events. A lost one is created again from its cursor.
_KEPT_READERS = 2000
#: Time for replies to be sent before this process exits, s.
_LEAVING_S = 1.0
#: How long a request waits for the teams and the ledger, s.
_OPENING_S = 60.0


class CallerCache:
    """Identifies callers by the stored keys, which are read again after each change."""

    def __init__(self, keys: KeyStore, policy: KeyPolicy = KeyPolicy.AUTO, *, clock: Clock | None = None) -> None:
        self._keys = keys
        self._admission = Admission(policy)
        self._clock = clock or SystemClock()
        #: stamp of the keys that were read; False: none were read
        self._stamp: KeyStamp | bool | None = False
        self._reading = asyncio.Lock()
        #: number of failed reads, and the last error
        self._failures = 0
        self._failure: EnsembleError | OSError | None = None

    async def admit(self, credentials: Credentials) -> Caller:
        try:
            await self._refresh()
        except (EnsembleError, OSError) as error:
            _log.error("All requests are refused, because the keys cannot be read: %s", error)
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "NOT_READY",
                "The endpoint cannot read its keys. See its log",
                retry_after_s=30,
            ) from None
        decision = self._admission.decide(credentials, at=self._clock.now())
        if isinstance(decision, Denied):
            raise _refusal(decision)
        key = decision.key
        return ANYBODY if key is None else Caller(name=key.name, rights=key.rights, ensembles=key.teams)

    async def _refresh(self) -> None:
        """Read the keys if they have changed. Calls that wait for a failing read fail with it, not one after the other."""
        before = self._failures
        async with self._reading:
            if self._failure is not None and self._failures > before:
                raise self._failure.with_traceback(None)
            try:
                await self._look()
            except (EnsembleError, OSError) as error:
                self._failures, self._failure = self._failures + 1, error
                raise
            self._failure = None

    async def _look(self) -> None:
        stamp = await threads.run(self._keys.stamp)
        if self._stamp is not False and stamp == self._stamp:
            return
        self._stamp = False
        self._admission.use(await threads.run(self._keys.read))
        self._stamp = stamp


def _refusal(denied: Denied) -> Refusal:
    if denied.retry_after_s is not None:
        _log.warning("Key '%s' has used up its requests", denied.name)
        text = f"Key '{denied.name}' has used up its requests: ask again in {denied.retry_after_s} s"
        return Refusal(HTTPStatus.TOO_MANY_REQUESTS, "RATE_LIMITED", text, retry_after_s=denied.retry_after_s)
    text = _UNKNOWN if denied.has_key else _MISSING if denied.is_openable else _NONE_MADE
    challenge = f'{_REALM}, error="invalid_token"' if denied.has_key else _REALM
    return Refusal(HTTPStatus.UNAUTHORIZED, "UNAUTHENTICATED", text, headers=(("www-authenticate", challenge),))


class RayExporter:
    """Exports metrics to Ray, which adds the prefix `ray_` to their names."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEventPage:
    """Events of a run for one reader."""

    events: Sequence[RunEvent] = field(default_factory=tuple)
    is_over: bool = False


class RunDriver:
    """The actor that `RemoteRuns` calls. It loads the teams and resumes open runs in the background."""

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._readers: OrderedDict[str, RunFollower] = OrderedDict()
        self._callers = CallerCache(open_keys(), config.keys)
        self._tally = RunTally(RayExporter())
        self._is_leaving = False
        self._opening: concurrent.futures.Future[DrivenRuns] = submit(self._open())

    async def _open(self) -> DrivenRuns:
        config = self._config
        teams = await threads.run(load_teams, config.teams)
        runtime = await RayRuntime(namespace=config.namespace).__aenter__()  # open until this process exits
        tools = await threads.run(load_catalog, config.tools)
        models = await threads.run(load_models, config.models)
        datasets = await threads.run(load_datasets, config.datasets)
        ledger = await self._claim_ledger(runtime.store_address)
        runs = DrivenRuns(
            teams,
            runtime,
            ledger,
            config.limits,
            tally=self._tally,
            tools=tools,
            models=models,
            datasets=datasets,
            on_lost=self._leave,
        )
        await runs.recover()
        return runs

    async def _claim_ledger(self, address: StoreAddress) -> RunLedger:
        """Wait for the ledger. An endpoint of the same name on another cluster may be ending (S-SRV-46)."""
        while True:
            try:
                return await threads.run(open_ledger, address, self._config.name, self._config.namespace)
            except RunExistsError as error:
                _log.warning("The endpoint '%s' cannot drive runs yet: %s", self._config.name, error)

    def _leave(self, error: RunExistsError) -> None:
        """Exit, because another process owns the ledger and drives the runs (S-SRV-46).

        Ray starts a new process, which waits for the ledger and refuses requests until then.
        """
        if not self._is_leaving:
            self._is_leaving = True
            _log.error("The driver of the endpoint '%s' exits: %s", self._config.name, error)
            asyncio.get_running_loop().call_later(_LEAVING_S, os._exit, 1)

    async def _runs(self) -> DrivenRuns:
        """Return the runs when they are ready.

        Raises:
            Refusal: the ledger is not available yet, or a team cannot be loaded.
        """
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

    async def admit(self, credentials: Credentials) -> Caller | Refusal:
        try:
            return await self._callers.admit(credentials)
        except Refusal as refusal:
            self._tally.refuse(refusal.code)
            return refusal

    async def ensembles(self) -> Sequence[EnsembleInfo] | Refusal:
        return await self._reply(lambda runs: runs.ensembles())

    async def metrics(self) -> Sequence[Sample]:
        return self._tally.samples()

    async def start(self, asked: NewRun, idempotency_key: str | None) -> AcceptedRun | Refusal:
        return await self._reply(lambda runs: runs.start(asked, idempotency_key=idempotency_key))

    async def wait(self, run_id: str, timeout_s: float) -> RunDetail | Refusal:
        return await self._reply(lambda runs: runs.wait(run_id, timeout_s))

    async def get(self, run_id: str) -> RunDetail | Refusal:
        return await self._reply(lambda runs: runs.get(run_id))

    async def list(self, wanted: RunFilter, cursor: str | None, size: int) -> RunPage | Refusal:
        return await self._reply(lambda runs: runs.list(wanted, cursor=cursor, size=size))

    async def cancel(self, run_id: str) -> RunDetail | Refusal:
        return await self._reply(lambda runs: runs.cancel(run_id))

    async def inject(self, run_id: str, directive: NewDirective, by: str) -> RunDetail | Refusal:
        return await self._reply(lambda runs: runs.inject(run_id, directive, by=by))

    async def switch_model(self, run_id: str, model: NewModel, by: str) -> RunDetail | Refusal:
        return await self._reply(lambda runs: runs.switch_model(run_id, model, by=by))

    async def reviews(self, ensembles: frozenset[str] | None) -> Sequence[ReviewOfEnsemble] | Refusal:
        return await self._reply(lambda runs: runs.reviews(ensembles))

    async def decide(
        self, run_id: str, gate_id: str, decision: NewDecision, by: str
    ) -> DecidedReview | ReviewConflict | Refusal:
        return await self._reply(lambda runs: runs.decide(run_id, gate_id, decision, by=by))

    async def capabilities(self) -> Capabilities | Refusal:
        return await self._reply(lambda runs: runs.capabilities())

    async def invoke_tool(self, name: str, body: ToolCallBody) -> ToolReply | Refusal:
        return await self._reply(lambda runs: runs.invoke_tool(name, body))

    async def read_events(
        self, reader: str, run_id: str, after: str | None, timeout_s: float
    ) -> RunEventPage | Refusal:
        """Return the next events of a reader, within `timeout_s`.

        The position is stored under the name `reader`. If it is lost, the reader continues behind the cursor `after`.
        """
        follower = self._readers.pop(reader, None)
        try:
            runs = await self._runs()
            if follower is None:
                follower = await runs.follow(run_id, after)
            events = await runs.read(follower, timeout_s)
        except LedgerLostError as error:
            self._leave(error)
            return _driven_elsewhere()
        except Refusal as refusal:
            return refusal
        if not follower.is_over:
            self._readers[reader] = follower
            if len(self._readers) > _KEPT_READERS:
                self._readers.popitem(last=False)
        return RunEventPage(events=[wire_event(each) for each in events], is_over=follower.is_over)

    async def forget_reader(self, reader: str) -> None:
        """Close a reader whose client has disconnected."""
        self._readers.pop(reader, None)

    async def _reply(self, call: Callable[[DrivenRuns], Awaitable[T]]) -> T | Refusal:
        try:
            return await call(await self._runs())
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
