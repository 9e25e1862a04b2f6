"""Clients of the cluster's rate limiter and of a run's driver, for agent processes."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, cast

import ray.exceptions

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.packing import packed_evaluation
from ensemble_ray.actors.shared.journal import RateLimiter
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.execute.orders import EvaluationFailed
from ensemble_ray.execute.scope import Spending
from ensemble_ray.llm.limits.accounts import CloseAccount, RemoteAccount
from ensemble_ray.llm.limits.breaker import FAILURES_TO_OPEN, LONGEST_OPEN_S
from ensemble_ray.process.config import dumps

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ensemble_ray.definition.task import ReflectionInput
    from ensemble_ray.execute.orders import RunContext
    from ensemble_ray.llm.limits.accounts import BudgetMessage, BudgetReply, RemoteBudgetService
    from ensemble_ray.llm.limits.endpoints import EndpointUpdate
    from ensemble_ray.llm.limits.limiter import Message, Reply
    from ensemble_ray.plan.plan import LoopUnit
    from ensemble_ray.ports import DriverServices
    from ensemble_ray.values.memory import MemoryNote, MemoryQuery, RecalledMemory, RememberedNote, TaskReflection


class RemoteLimiter:
    """Client of the cluster's rate limiter and its accounts. Implements `Remote` and `RemoteBudgetService`."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def __call__(self, message: Message) -> Reply:
        """Send a message and return the reply. The first message starts the limiter.

        Raises:
            ConnectionError: the limiter cannot be reached now.
        """
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
    """Return the budget of this process's requests for a run; None: the run has none.

    The accounts release the reservations of `holder`, this process's name, when the process has died.
    """
    if context.budget is None:
        return None
    return Spending(RemoteAccount(limiter, context.budget, holder=holder), context.cost)


def close_account(context: RunContext) -> None:
    if context.budget is not None and (limiter := spawn.existing("rate_limiter")) is not None:
        limiter.account.remote(CloseAccount(account=context.budget.account))


class EndpointUpdateSender:
    """Sends updates about endpoints to the scheduler."""

    def __init__(self, scheduler: Any, source: str) -> None:
        self._scheduler = scheduler
        self._source = source

    def send(self, update: EndpointUpdate) -> None:
        self._scheduler.update_endpoint.remote(self._source, update)


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
        """Yield the failures that still count."""
        for noted in self._failures.values():
            for noted_at, update in noted:
                if at - noted_at < LONGEST_OPEN_S:
                    yield update


#: name of the driver's service
MEMORY_SERVICE = "memory"


class RemoteRunMemory:
    """The run's memory, through the driver. Implements `RunMemory`."""

    def __init__(self, driver: DriverServices) -> None:
        self._driver = driver

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        return cast("RecalledMemory", await self._ask("recall", query))

    async def remember(self, note: MemoryNote) -> RememberedNote:
        return cast("RememberedNote", await self._ask("remember", note))

    async def _ask(self, method: str, asked: object) -> object:
        return await self._driver.ask(MEMORY_SERVICE, {"method": method, "body": dumps(asked)})


class RemoteMemoryResets:
    """Resets of memory scopes, through the driver. Implements `MemoryResets`. Errors of a store stay bytes: this process loads no user code."""

    def __init__(self, driver: DriverServices) -> None:
        self._driver = driver

    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        payload = {"method": "reset", "body": dumps(unit)}
        try:
            return cast("EvaluationFailed | None", await self._driver.ask(MEMORY_SERVICE, payload))
        except IllegalStateError as error:  # the driver is gone, which fails the loop
            return packed_evaluation(EvaluationFailed.of(error))


#: name of the driver's service
REFLECTION_SERVICE = "reflections"


class RemoteRunReflections:
    """The run's reflections, through the driver. Implements `RunReflections`."""

    def __init__(self, driver: DriverServices) -> None:
        self._driver = driver

    async def recall(self, key: str) -> TaskReflection | None:
        return cast("TaskReflection | None", await self._ask("recall", key))

    async def find_prior(self, key: str) -> TaskReflection | None:
        return cast("TaskReflection | None", await self._ask("find_prior", key))

    async def store(self, key: str, reflection: TaskReflection) -> None:
        await self._ask("store", key, reflection)

    async def ask_strategy(self, asked: ReflectionInput) -> TaskReflection:
        return cast("TaskReflection", await self._ask("ask_strategy", asked))

    async def _ask(self, method: str, *arguments: object) -> object:
        # Bytes: the hub may not have the classes of users' outputs.
        return await self._driver.ask(REFLECTION_SERVICE, {"method": method, "body": dumps(arguments)})
