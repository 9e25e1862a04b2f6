"""RateLimiter: the permits and the budgets of the whole cluster. Thin: their rules are in `limits`."""

from __future__ import annotations

from ensemble_ray.actors.shared.describing import describe_this_process
from ensemble_ray.limits.budget_service import BudgetMessage, BudgetReply, BudgetService
from ensemble_ray.limits.limiter_service import LimiterService, Message, Reply
from ensemble_ray.limits.steps import HolderGone
from ensemble_ray.values.descriptions import ActorDescription, dump_actor

__all__ = ["RateLimiter"]


class RateLimiter:
    """Holds all buckets of the cluster, and the accounts of its runs."""

    def __init__(self) -> None:
        self._permits = LimiterService()
        self._accounts = BudgetService()

    async def receive(self, message: Message) -> Reply:
        """Take a message of a process; see `limits.limiter_service`."""
        if isinstance(message, HolderGone):
            self._accounts.leave(message.holder)
        return await self._permits.receive(message)

    async def account(self, message: BudgetMessage) -> BudgetReply:
        """Take a message about a run's budget; see `limits.budget_service`."""
        return await self._accounts.receive(message)

    async def describe(self) -> bytes:
        """Return how the buckets stand, as `dump_actor` does (S-CLU-102)."""
        buckets, more = self._permits.describe()
        process = describe_this_process("limiter", "rate_limiter")
        return dump_actor(ActorDescription(process=process, buckets=tuple(buckets), more_buckets=more))
