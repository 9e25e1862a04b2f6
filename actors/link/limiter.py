"""The way to the cluster's rate limiter, which also has the accounts of its runs."""

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
    """The way to the cluster's rate limiter; a `Remote` for `LeasingLimiter`, a `RemoteBudgetService` for `RemoteAccount`."""

    def __init__(self) -> None:
        self._actor: Any = None

    async def __call__(self, message: Message) -> Reply:
        """Deliver a message and return the reply; the limiter is started by the first one who needs it.

        Raises:
            ConnectionError: the limiter cannot be reached now.
        """
        reply: Reply = await self._deliver("receive", message)
        return reply

    async def account(self, message: BudgetMessage) -> BudgetReply:
        """Deliver a message about a budget and return the reply."""
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
    """Return what the requests that this process makes for a run may spend; None without a budget.

    Args:
        context: The run's.
        limiter: The way to the accounts.
        holder: This process's name, by which it is known when it is gone.
    """
    if context.budget is None:
        return None
    return Spending(RemoteAccount(limiter, context.budget, holder=holder), context.cost)


def close_account(context: RunContext) -> None:
    """Close the account of a run that has ended."""
    if context.budget is not None and (limiter := spawn.existing("rate_limiter")) is not None:
        limiter.account.remote(CloseAccount(account=context.budget.account))


class EndpointUpdateSender:
    """A process's way to tell others."""

    def __init__(self, scheduler: Any, source: str) -> None:
        self._scheduler = scheduler
        self._source = source

    def send(self, update: EndpointUpdate) -> None:
        """Send an update."""
        self._scheduler.update_endpoint.remote(self._source, update)


class EndpointBoard:
    """What processes that start later must be sent: the failures of each endpoint since its last answer."""

    def __init__(self) -> None:
        self._failures: dict[str, deque[tuple[float, EndpointUpdate]]] = {}

    def note(self, update: EndpointUpdate, at: float) -> None:
        """Take note of an update; `at` in seconds of any origin."""
        if update.category == "answered":
            self._failures.pop(update.endpoint, None)
        elif update.category in {"failed", "probe_failed"}:
            self._failures.setdefault(update.endpoint, deque(maxlen=FAILURES_TO_OPEN)).append((at, update))

    def current(self, at: float) -> Iterator[EndpointUpdate]:
        """Yield those that still count."""
        for noted in self._failures.values():
            for noted_at, update in noted:
                if at - noted_at < LONGEST_OPEN_S:
                    yield update


#: Name of the driver's service.
MEMORY_SERVICE = "memory"


class RemoteRunMemory:
    """Asks the driver. Fulfils `RunMemory`."""

    def __init__(self, driver: DriverServices) -> None:
        self._driver = driver

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Return what a task is to be reminded of."""
        return cast("RecalledMemory", await self._ask("recall", query))

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Keep what a completed task leaves."""
        return cast("RememberedNote", await self._ask("remember", note))

    async def _ask(self, method: str, asked: object) -> object:
        return await self._driver.ask(MEMORY_SERVICE, {"method": method, "body": dumps(asked)})


class RemoteMemoryResets:
    """Asks the driver, and loads nothing of the user's: what a store raised comes as bytes. Fulfils `MemoryResets`."""

    def __init__(self, driver: DriverServices) -> None:
        self._driver = driver

    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        """Do to a loop's memory scopes what its mode says before an iteration; a driver that is gone fails the loop."""
        payload = {"method": "reset", "body": dumps(unit)}
        try:
            return cast("EvaluationFailed | None", await self._driver.ask(MEMORY_SERVICE, payload))
        except IllegalStateError as error:
            return packed_evaluation(EvaluationFailed.of(error))


#: Name of the driver's service.
REFLECTION_SERVICE = "reflections"


class RemoteRunReflections:
    """Asks the driver. Fulfils `RunReflections`."""

    def __init__(self, driver: DriverServices) -> None:
        self._driver = driver

    async def recall(self, key: str) -> TaskReflection | None:
        """Return the reflection that was there before the run stored one under that key."""
        return cast("TaskReflection | None", await self._ask("recall", key))

    async def find_prior(self, key: str) -> TaskReflection | None:
        """Return the reflection that is there now."""
        return cast("TaskReflection | None", await self._ask("find_prior", key))

    async def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key."""
        await self._ask("store", key, reflection)

    async def ask_strategy(self, asked: ReflectionInput) -> TaskReflection:
        """Return what the task's own strategy makes of its output."""
        return cast("TaskReflection", await self._ask("ask_strategy", asked))

    async def _ask(self, method: str, *arguments: object) -> object:
        # Bytes: the hub, which passes them on, need not have the classes of users' outputs.
        return await self._driver.ask(REFLECTION_SERVICE, {"method": method, "body": dumps(arguments)})
