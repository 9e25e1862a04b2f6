"""The way to the cluster's rate limiter, which also has the accounts of its runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import ray.exceptions

from ensemble_ray.actors import spawn
from ensemble_ray.actors.shared.rate_limiter import RateLimiter
from ensemble_ray.errors import IllegalStateError

if TYPE_CHECKING:
    from ensemble_ray.limits.budget_service import BudgetMessage, BudgetReply
    from ensemble_ray.limits.limiter_service import Message, Reply

__all__ = ["RemoteLimiter"]


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
