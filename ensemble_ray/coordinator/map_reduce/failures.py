"""FailureLog: the failed tasks of a map-reduce, for its error and its trace. Pure; memory is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble_ray.coordinator.map_reduce.ports import MapReduceFailure
from ensemble_ray.values.ids import key_of

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskOrder, TaskResult

#: Failures of maps, and of reduces, that an error of the whole run shows, of the hundred thousand there may be.
_MOST_FAILURES = 100


def failure_of(level: int, order: TaskOrder, result: TaskResult, error: BaseException) -> MapReduceFailure:
    """Return how a task of that level failed."""
    return MapReduceFailure(
        key=key_of(order.instance),
        level=level,
        at=result.at,
        task_description=order.task.description,
        agent_role=order.agent_role,
        error=error,
        attempts=result.attempts,
    )


class FailureLog:
    """Keeps the first failures of a run and counts them all."""

    def __init__(self) -> None:
        self._first: list[MapReduceFailure] = []
        #: how many there were, of maps and of reduces
        self._counts = [0, 0]

    def add(self, failure: MapReduceFailure) -> None:
        """Count a failure, and keep it if it is among the first of its kind."""
        index = min(failure.level, 1)
        self._counts[index] += 1
        if self._counts[index] <= _MOST_FAILURES:
            self._first.append(failure)

    @property
    def first(self) -> Sequence[MapReduceFailure]:
        """The first failures, in the order in which they came."""
        return self._first

    @property
    def failed_maps(self) -> int:
        """How many maps failed."""
        return self._counts[0]
