"""Early ends of runs: which error stands for which reason, here and in the record. Package: execute. Pure.

In: what a task raised, or what is recorded of it. Out: why the run ends, or the error that says so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.errors import BudgetExhaustedError, ExitEarlyError, message_of
from ensemble_ray.values.outputs import ExitReason

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["describe_exhaustion", "describe_exit", "exit_of", "reason_of"]


def reason_of(error: BaseException | None) -> ExitReason:
    """Why a run ends with that error."""
    if isinstance(error, BudgetExhaustedError):
        return ExitReason.BUDGET_EXHAUSTED
    return ExitReason.TIMEOUT if isinstance(error, ExitEarlyError) and error.timed_out else ExitReason.USER_EXIT_EARLY


def exit_of(reason: ExitReason) -> ExitEarlyError:
    """Return the error that ends a run for that reason."""
    if reason is ExitReason.BUDGET_EXHAUSTED:
        return BudgetExhaustedError()
    return ExitEarlyError(timed_out=reason is ExitReason.TIMEOUT)


def describe_exit(said: str) -> str:
    """Return what a trace shows as the result of a tool that asked for the end of the run."""
    asked = "The tool asked for the end of the run"
    return f"{asked}: {said}" if said else asked


def describe_exhaustion(errors: Iterable[BaseException | None]) -> str:
    """Return what a run that spent its budget warns of: the limit, what was spent, what would have been needed (S-BUD-4).

    Args:
        errors: Those of the tasks that ended the run, in the order in which they did.
    """
    spent = (error for error in errors if isinstance(error, BudgetExhaustedError) and str(error))
    return next(map(message_of, spent), "Budget exhausted")
