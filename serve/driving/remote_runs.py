"""RemoteRuns: the `RunService` and the `Callers` of a replica, which call the endpoint's `RunDriver`.

Calls can be repeated safely: a run gets its id before the call, and readers of events send their position.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, Self, TypeVar, cast

import ray
import ray.exceptions

from ensemble_ray.access.admission import Credentials
from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.reach import reach
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import threads
from ensemble_ray.serve.callers import Caller
from ensemble_ray.serve.driving.driver_actor import RunDriver, RunEventPage
from ensemble_ray.serve.driving.ledger import part_of_name
from ensemble_ray.serve.driving.requests import DriverConfig
from ensemble_ray.serve.metrics import Sample
from ensemble_ray.serve.run_service import DEFAULT_PAGE
from ensemble_ray.serve.schemas import (
    AcceptedRun,
    Capabilities,
    DecidedReview,
    EnsembleInfo,
    NewDecision,
    NewDirective,
    NewModel,
    NewRun,
    Refusal,
    ReviewConflict,
    ReviewOfEnsemble,
    RunDetail,
    RunEvent,
    RunFilter,
    RunPage,
    ToolCallBody,
    ToolReply,
)
from ensemble_ray.values.ids import new_run_id

T = TypeVar("T")
_log = bounded_logger(__name__)
#: Limit of one call, s. Then it is repeated, so that a dead process is noticed.
_CALL_S = 10.0
#: How long the list of teams is cached, s.
_KNOWN_S = 1.0
#: Pauses between attempts while the driver restarts, s.
_PAUSES_S = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0, 8.0)
#: Limit of attempts to replace the driver of an older deployment.
_MOST_TAKEOVERS = 7


def driver_name(endpoint: str, namespace: str = "") -> str:
    """Return the name of the actor that drives the runs of an endpoint."""
    own = f"endpoint-{part_of_name(endpoint)}"
    return f"{namespace}/{own}" if namespace else own


class RemoteRuns:
    """The runs of an endpoint, from another process of the cluster. On entry it finds the driver, or starts one."""

    def __init__(self, config: DriverConfig) -> None:
        self._config = config
        self._driver: Any = None
        #: cached teams, and the time until which they are valid
        self._teams: tuple[Sequence[EnsembleInfo], float] = ((), 0.0)

    async def __aenter__(self) -> Self:
        self._driver = await threads.run(self._find)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._driver = None

    async def ensembles(self) -> Sequence[EnsembleInfo]:
        teams, until = self._teams
        now = asyncio.get_running_loop().time()
        if now >= until:
            teams = await self._ask(lambda driver: driver.ensembles.remote())
            self._teams = teams, now + _KNOWN_S
        return teams

    async def metrics(self) -> Sequence[Sample]:
        return await self._ask(lambda driver: driver.metrics.remote())

    async def start(self, asked: NewRun, *, idempotency_key: str | None = None) -> AcceptedRun:
        named = asked if asked.run_id else asked.model_copy(update={"run_id": new_run_id()})
        return await self._ask(lambda driver: driver.start.remote(named, idempotency_key))

    async def wait(self, run_id: str, timeout_s: float) -> RunDetail:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            left = max(0.0, min(_CALL_S, deadline - loop.time()))
            found: RunDetail = await self._ask(partial(_wait, run_id, left))
            if found.status.is_final or found.status == "waiting" or loop.time() >= deadline:
                return found

    async def get(self, run_id: str) -> RunDetail:
        return await self._ask(lambda driver: driver.get.remote(run_id))

    async def list(self, wanted: RunFilter, *, cursor: str | None = None, size: int = DEFAULT_PAGE) -> RunPage:
        return await self._ask(lambda driver: driver.list.remote(wanted, cursor, size))

    async def cancel(self, run_id: str) -> RunDetail:
        return await self._ask(lambda driver: driver.cancel.remote(run_id))

    async def inject(self, run_id: str, directive: NewDirective, *, by: str = "") -> RunDetail:
        return await self._ask(lambda driver: driver.inject.remote(run_id, directive, by))

    async def switch_model(self, run_id: str, model: NewModel, *, by: str = "") -> RunDetail:
        return await self._ask(lambda driver: driver.switch_model.remote(run_id, model, by))

    async def reviews(self, ensembles: frozenset[str] | None = None) -> Sequence[ReviewOfEnsemble]:
        return await self._ask(lambda driver: driver.reviews.remote(ensembles))

    async def decide(
        self, run_id: str, gate_id: str, decision: NewDecision, *, by: str = ""
    ) -> DecidedReview | ReviewConflict:
        return await self._ask(lambda driver: driver.decide.remote(run_id, gate_id, decision, by))

    async def capabilities(self) -> Capabilities:
        return await self._ask(lambda driver: driver.capabilities.remote())

    async def invoke_tool(self, name: str, body: ToolCallBody) -> ToolReply:
        return await self._ask(lambda driver: driver.invoke_tool.remote(name, body))

    async def admit(self, credentials: Credentials) -> Caller:
        return await self._ask(lambda driver: driver.admit.remote(credentials))

    async def events(self, run_id: str, after: str | None = None) -> AsyncGenerator[RunEvent]:
        reader, cursor = uuid.uuid4().hex, after
        try:
            while True:
                page: RunEventPage = await self._ask(partial(_read, reader, run_id, cursor))
                for each in page.events:
                    cursor = each.cursor or cursor
                    yield each
                if page.is_over:
                    return
        finally:
            with contextlib.suppress(ray.exceptions.RayError):
                self._driver.forget_reader.remote(reader)

    async def _ask(self, call: Callable[[Any], Awaitable[T | Refusal]]) -> T:
        """Call the driver, and wait while it restarts.

        Raises:
            Refusal: the driver refuses, or cannot be reached.
        """
        try:
            reply = await reach(
                lambda: call(self._driver),
                _PAUSES_S,
                retry_on=ray.exceptions.RayActorError,
                before_retry=self._find_again,
            )
        except ray.exceptions.RayActorError as error:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "NOT_READY",
                "The driver of the runs cannot be reached. Accepted runs are stored",
                retry_after_s=5,
            ) from error
        if isinstance(reply, Refusal):
            raise reply
        return reply

    async def _find_again(self) -> None:
        _log.warning("Could not reach the driver of the runs, retrying")
        with contextlib.suppress(ray.exceptions.RayError):
            self._driver = await threads.run(self._find)

    def _find(self) -> Any:
        """Return the driver of this deployment or a newer one, and replace an older driver. Blocks."""
        for _ in range(_MOST_TAKEOVERS):
            driver = spawn.run_driver(RunDriver, driver_name(self._config.name, self._config.namespace), self._config)
            try:
                deployed_at = cast("float", cast("Any", ray.get)(driver.deployed_at.remote()))  # noqa: TID251  in a thread
            except ray.exceptions.RayActorError:
                continue  # another replica is replacing it
            if deployed_at >= self._config.deployed_at:
                return driver
            _log.warning("A new deployment takes over the runs of '%s'", self._config.name)
            ray.kill(driver, no_restart=True)
        return spawn.run_driver(RunDriver, driver_name(self._config.name, self._config.namespace), self._config)


async def _wait(run_id: str, timeout_s: float, driver: Any) -> Any:
    return await driver.wait.remote(run_id, timeout_s)


async def _read(reader: str, run_id: str, cursor: str | None, driver: Any) -> Any:
    return await driver.read_events.remote(reader, run_id, cursor, _CALL_S)
