"""Clients of the cluster's rate limiter and of a run's driver, for agent processes."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any, cast

import ray.exceptions

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.packing import packed_evaluation
from ensemble_ray.actors.shared.journal import RateLimiter
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.execute.orders import EvaluationFailed, RunContext
from ensemble_ray.execute.scope import RunReflections, Spending
from ensemble_ray.llm.limits.accounts import (
    BudgetMessage,
    BudgetReply,
    CloseAccount,
    RemoteAccount,
    RemoteBudgetService,
)
from ensemble_ray.llm.limits.breaker import FAILURES_TO_OPEN, LONGEST_OPEN_S
from ensemble_ray.llm.limits.endpoints import EndpointUpdate
from ensemble_ray.llm.limits.limiter import Message, Reply
from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.ports import DriverServices, RunMemory
from ensemble_ray.process.config import dumps


class RemoteLimiter:
    """Implements `Remote` and `RemoteBudgetService`."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def __call__(self, message: Message) -> Reply:
        """The first message starts the limiter."""
        reply: Reply = await self._deliver("receive", message)
        return reply

    async def account(self, message: BudgetMessage) -> BudgetReply:
        reply: BudgetReply = await self._deliver("account", message)
        return reply

    async def _deliver(self, method: str, message: object) -> Any:
        try:
            if self._actor is None:
                self._actor = spawn.rate_limiter(RateLimiter)
            return await getattr(self._actor, method).remote(message)
        except ray.exceptions.RayActorError as error:
            raise ConnectionError(f"the cluster's rate limiter cannot be reached: {error}") from error
        except ray.exceptions.RayTaskError as error:
            raise getattr(error, "cause", None) or IllegalStateError(str(error)) from None


def shared_spending(context: RunContext, limiter: RemoteBudgetService, holder: str) -> Spending | None:
    """Return the budget of this process's requests, which is released when the process `holder` has died."""
    if context.budget is None:
        return None
    account, needs_prices = RemoteAccount(limiter, context.budget, holder=holder), context.budget.max_cost is not None
    return Spending(account, context.cost, needs_prices=needs_prices)


def close_account(context: RunContext) -> None:
    if context.budget is not None and (limiter := spawn.existing("rate_limiter")) is not None:
        limiter.account.remote(CloseAccount(account=context.budget.account))


class EndpointBoard:
    """Stores the failures of every endpoint since its last answer, for processes that start later."""

    def __init__(self) -> None:
        self._failures: dict[str, deque[tuple[float, EndpointUpdate]]] = {}

    def note(self, update: EndpointUpdate, at: float) -> None:
        """Store an update; `at` is in seconds from any origin."""
        if update.category == "answered":
            self._failures.pop(update.endpoint, None)
        elif update.category in {"failed", "probe_failed"}:
            self._failures.setdefault(update.endpoint, deque(maxlen=FAILURES_TO_OPEN)).append((at, update))

    def current(self, at: float) -> Iterator[EndpointUpdate]:
        for noted in self._failures.values():
            for noted_at, update in noted:
                if at - noted_at < LONGEST_OPEN_S:
                    yield update


MEMORY_SERVICE, REFLECTION_SERVICE = "memory", "reflections"


class DriverObject:
    """An object of the driver: each method is a request with positional arguments."""

    def __init__(self, driver: DriverServices, service: str) -> None:
        self._driver = driver
        self._service = service

    def __getattr__(self, method: str) -> Callable[..., Awaitable[object]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return partial(self.call, method)

    async def call(self, method: str, *arguments: object) -> object:
        # Bytes: the hub may not have the classes of users' outputs.
        return await self._driver.ask(self._service, {"method": method, "body": dumps(arguments)})


def remote_memory(driver: DriverServices) -> RunMemory:
    return cast("RunMemory", DriverObject(driver, MEMORY_SERVICE))


def remote_reflections(driver: DriverServices) -> RunReflections:
    return cast("RunReflections", DriverObject(driver, REFLECTION_SERVICE))


class RemoteMemoryResets:
    """Implements `MemoryResets`. Errors of a store stay bytes: this process loads no user code."""

    def __init__(self, driver: DriverServices) -> None:
        self._memory = DriverObject(driver, MEMORY_SERVICE)

    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        try:
            return cast("EvaluationFailed | None", await self._memory.call("reset", unit))
        except IllegalStateError as error:  # the driver is gone, which fails the loop
            return packed_evaluation(EvaluationFailed.of(error))
