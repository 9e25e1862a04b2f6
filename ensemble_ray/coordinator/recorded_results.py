"""What the record of a planned run that goes on gives of its tasks. Package: coordinator.

In: the results of tasks that ended, and what is known of others. Out: each result once, when its task is told or started; what
tasks did that were stopped for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from ensemble_ray.execute.orders import FailureSummary

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskResult
    from ensemble_ray.execute.outcomes import Resumed

__all__ = ["RecordedResults"]

Output = TypeVar("Output")
Failure = TypeVar("Failure", bound=FailureSummary)


class RecordedResults(Generic[Output, Failure]):
    """The recorded results of one run."""

    def __init__(self, resumed: Resumed[Output, Failure] | None) -> None:
        """Make them of what is recorded; None: nothing is, since the run begins."""
        self._resumed = resumed
        #: tasks of which the record gives the result when they are started
        self._left: set[str] = set() if resumed is None else set(resumed.results)

    def pop(self, instance: str, *, wants_text: bool = False) -> TaskResult[Output, Failure] | None:
        """Return the recorded result of a task, once; None where there is none."""
        if self._resumed is None or instance not in self._left:
            return None
        self._left.remove(instance)
        result = self._resumed.results[instance]
        return result if wants_text else replace(result, text=None)

    def list_stopped(self, instance: str) -> Sequence[tuple[str, Failure]]:
        """Return what a task did that was stopped and does not run again (S-DUR-135); nothing where nothing is known."""
        before = None if self._resumed is None else self._resumed.stopped.get(instance)
        return [] if before is None or before.failure is None else [(instance, before.failure)]

    def most_of(self, result: TaskResult[Output, Failure]) -> Failure | None:
        """Return what a task did that was stopped; where it had not come so far again as before a crash: what it did then."""
        before = None if self._resumed is None else self._resumed.stopped.get(result.instance)
        if before is None or result.status != "cancelled":
            return result.failure
        done, now = ((each.total_tokens, each.tool_call_count) for each in (before, result))
        return before.failure if done > now else result.failure
