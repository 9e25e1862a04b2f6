"""A task's result as scheduling sees it. Room: execute. Pure.

In: a result, and how its output or failure is held where the run is conducted: as objects, as bytes, or as data of the
record. Out: the report. Never: a look into what is held.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from ensemble_ray.errors import StaleEpochError, message_of
from ensemble_ray.execute.conductor import Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.execute.orders import TaskResult

__all__ = ["report_of"]

Output = TypeVar("Output")
Failure = TypeVar("Failure")


def report_of(
    result: TaskResult,
    *,
    output: Output | None,
    failure: Failure | None,
    delegated: Sequence[tuple[str, Output]] = (),
) -> Report[Output, Failure]:
    """The report of a result.

    Args:
        result: What came of a task.
        output: Its output, as it is held there; None for a task that gave none.
        failure: The result of a task that gave no output, as it is held there.
        delegated: Roles and outputs of a manager's workers, as they are held there.
    """
    error = result.error
    return Report(
        key=result.key,
        status=result.status,
        at=result.at,
        epoch=result.epoch,
        instance=result.instance,
        newer_epoch=error.newest if isinstance(error, StaleEpochError) else 0,
        duration_s=result.duration_s,
        total_tokens=result.total_tokens,
        tool_call_count=result.tool_call_count,
        exit_reason=result.exit_reason,
        output=output,
        delegated=tuple(delegated),
        lost_work=tuple(result.lost_work),
        failure=failure,
        error_type="" if error is None else type(error).__name__,
        message="" if error is None else message_of(error),
    )
