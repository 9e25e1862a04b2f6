"""The port of agents that are not made of a model and tools: the user's own object does their tasks. Package: ports."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from typing import TYPE_CHECKING, Protocol, TypeAlias, runtime_checkable

if TYPE_CHECKING:
    from ensemble_ray.values.task_request import TaskAnswer, TaskRequest

    #: What a runner may give: the whole answer, or pieces of text as they come, with a `TaskAnswer` behind them or without.
    RunnerOutput: TypeAlias = str | TaskAnswer | AsyncIterator[str | TaskAnswer]

__all__ = ["RunsTask"]


@runtime_checkable
class RunsTask(Protocol):
    """Does the tasks of an agent, such as an agent of another framework; a synchronous `run` is accepted too.

    An attribute `effect` says what doing a task does to the world, as that of a tool; without one it is `once`.
    """

    def run(self, request: TaskRequest) -> RunnerOutput | Awaitable[RunnerOutput]:
        """Do the task. What it raises fails the task; when the run is cancelled, so is this call."""
        ...
