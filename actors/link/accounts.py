"""Accounts of runs with a budget, as processes of a cluster reach them: they are kept by the rate limiter (S-BUD-8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.actors import spawn
from ensemble_ray.execute.spending import Spending
from ensemble_ray.limits.account_desk import CloseAccount
from ensemble_ray.limits.remote_account import RemoteAccount

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunContext
    from ensemble_ray.limits.remote_account import RemoteDesk

__all__ = ["close_account", "shared_spending"]


def shared_spending(context: RunContext, limiter: RemoteDesk, holder: str) -> Spending | None:
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
