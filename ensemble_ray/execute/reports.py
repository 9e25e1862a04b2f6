"""What came of tasks, as far as scheduling needs it, and what is known of a run that goes on. Package: execute. Values only.

In: a result, and how its output or failure is held where the run is coordinated: as objects, as bytes, or as data of the
record. Out: the report. Never: a look into what is held.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from ensemble_ray.errors import StaleEpochError, message_of
from ensemble_ray.values.outputs import ExitReason

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskResult
    from ensemble_ray.schedule.stimuli import Stimulus
    from ensemble_ray.values.trace import TaskTrace

__all__ = ["Report", "Resumed", "report_of"]

#: How an output is held: the object itself inline, its bytes in a scheduler actor.
Output = TypeVar("Output")
#: How a failure is held: the task's result inline, its bytes in a scheduler actor.
Failure = TypeVar("Failure")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report(Generic[Output, Failure]):
    """What came of a task, as far as scheduling needs it."""

    key: str
    status: str
    at: float
    duration_s: float = 0.0
    total_tokens: int = -1
    tool_call_count: int = 0
    exit_reason: ExitReason = ExitReason.USER_EXIT_EARLY
    output: Output | None = None
    #: of a manager: what its workers gave, in completion order: (role, output)
    delegated: Sequence[tuple[str, Output]] = ()
    #: of a manager: what its workers did that gave nothing
    failed_delegations: Sequence[TaskTrace] = ()
    #: error and trace of a task that gave no output, as its executor gave them
    failure: Failure | None = None
    error_type: str = ""
    message: str = ""
    #: of the dispatch that it is the report of
    epoch: int = 0
    #: path of the execution that it is the report of
    instance: str = ""
    #: the epoch that took the task's place, where that is why it failed
    newer_epoch: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Generic[Output, Failure]):
    """What the record knows of a run that goes on."""

    #: when it began first
    started_at: float
    #: what its source was told, in the groups in which it was; what a cancellation did is left out
    stimuli: Sequence[Sequence[Stimulus]]
    #: by instance: tasks whose output or failure is recorded, whether or not the source was told; a report is made when it
    #: is asked for, and has no output where the run's outputs have a recorded one to be recalled
    reports: Mapping[str, Report[Output, Failure]]
    #: whether only its owner's process was replaced; else somebody wants it to go on, also after a cancellation
    is_restart: bool = False


def report_of(
    result: TaskResult,
    *,
    output: Output | None,
    failure: Failure | None,
    delegated: Sequence[tuple[str, Output]] = (),
) -> Report[Output, Failure]:
    """Return the report of a result.

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
        failed_delegations=tuple(result.failed_delegations),
        failure=failure,
        error_type="" if error is None else type(error).__name__,
        message="" if error is None else message_of(error),
    )
