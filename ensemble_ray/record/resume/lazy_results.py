"""Recorded results by instance, each made when it is asked for. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, TypeVar

from ensemble_ray.execute.orders import FailureSummary

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskResult

Output = TypeVar("Output")
Failure = TypeVar("Failure", bound=FailureSummary)


class LazyResults(Mapping[str, "TaskResult[Output, Failure]"]):
    """The results of a run's tasks."""

    def __init__(
        self, instances: Iterable[str], result_of: Callable[[str], TaskResult[Output, Failure] | None]
    ) -> None:
        """Make them of the tasks that have one, and of what returns it."""
        self._instances = frozenset(instances)
        self._result_of = result_of

    def __getitem__(self, instance: str) -> TaskResult[Output, Failure]:
        found = self._result_of(instance)
        if found is None:
            raise KeyError(instance)
        return found

    def __contains__(self, instance: object) -> bool:
        return instance in self._instances

    def __iter__(self) -> Iterator[str]:
        return iter(self._instances)

    def __len__(self) -> int:
        return len(self._instances)
