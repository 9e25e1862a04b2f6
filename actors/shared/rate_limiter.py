"""RateLimiter: the permits and the budgets of the whole cluster. Thin: their rules are in `limits`."""

from __future__ import annotations

from ensemble_ray.limits.account_desk import AccountDesk, AccountMessage, AccountReply
from ensemble_ray.limits.desk import Leave, LimiterDesk, Message, Reply

__all__ = ["RateLimiter"]


class RateLimiter:
    """Holds all buckets of the cluster, and the accounts of its runs."""

    def __init__(self) -> None:
        self._permits = LimiterDesk()
        self._accounts = AccountDesk()

    async def receive(self, message: Message) -> Reply:
        """Take a message of a process; see `limits.desk`."""
        if isinstance(message, Leave):
            self._accounts.leave(message.holder)
        return await self._permits.receive(message)

    async def account(self, message: AccountMessage) -> AccountReply:
        """Take a message about a run's budget; see `limits.account_desk`."""
        return await self._accounts.receive(message)
