"""RateLimiter: the permits and the budgets of the whole cluster. Thin: their rules are in `limits`."""

from __future__ import annotations

from ensemble_ray.limits.budget_service import BudgetMessage, BudgetReply, BudgetService
from ensemble_ray.limits.limiter_service import LimiterService, Message, Reply
from ensemble_ray.limits.steps import HolderGone

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
