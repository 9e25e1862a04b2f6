"""What the record of a planned run that goes on gives of its tasks.

In: the results of tasks that ended, and what is known of others. Out: each result once, when its task is told or started; what
tasks did that were stopped for good.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeVar

from ensemble_ray.execute.orders import FailureSummary

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import Resumed, TaskResult

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

    def find_stopped(self, instance: str) -> TaskResult[Output, Failure] | None:
        """Return what a task did that was stopped and does not run again (S-DUR-135); None where nothing is known."""
        return None if self._resumed is None else self._resumed.stopped.get(instance)

    def most_of(self, result: TaskResult[Output, Failure]) -> TaskResult[Output, Failure]:
        """Return the result of a task that was stopped; if it had come farther before a crash, what it did then."""
        before = self.find_stopped(result.instance)
        if before is None or result.status != "cancelled":
            return result
        done, now = ((each.total_tokens, each.tool_call_count) for each in (before, result))
        return before if done > now else result
