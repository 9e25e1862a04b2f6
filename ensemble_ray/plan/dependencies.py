"""Which task waits for which: a graph made from `context`. Package: plan. Pure; nodes are task identities (S-PAR-1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TypeVar, cast

from ensemble_ray.definition.task import Task

__all__ = ["TaskDependencyGraph"]

T = TypeVar("T")


class TaskDependencyGraph:
    """Tasks and their context tasks, as far as those are in the same list.

    Args:
        tasks: In any order; a task that stands in the list twice is one node.

    Raises:
        ValueError: `tasks` or one of them is None.
    """

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._tasks: dict[str, Task] = {}
        for task in _require(tasks, "tasks"):
            self._tasks.setdefault(_require(task, "task").object_id, task)
        self._dependencies: dict[str, list[str]] = {}
        self._dependents: dict[str, list[str]] = {object_id: [] for object_id in self._tasks}
        for object_id, task in self._tasks.items():
            # dict: each dependency once, in context order
            inside = list(dict.fromkeys(entry.object_id for entry in task.context if entry.object_id in self._tasks))
            self._dependencies[object_id] = inside
            for dependency in inside:
                self._dependents[dependency].append(object_id)

    @property
    def all_tasks(self) -> list[Task]:
        """Every task, in list order."""
        return list(self._tasks.values())

    @property
    def size(self) -> int:
        """How many tasks there are."""
        return len(self._tasks)

    @property
    def roots(self) -> list[Task]:
        """Tasks that wait for none of the others, in list order."""
        return [task for object_id, task in self._tasks.items() if not self._dependencies[object_id]]

    def get_ready_tasks(self, completed: Iterable[Task]) -> list[Task]:
        """Return the tasks that are not completed and whose dependencies all are, in list order.

        Raises:
            ValueError: `completed` is None.
        """
        done = {_require(task, "completed task").object_id for task in _require(completed, "completed")}
        return [
            task
            for object_id, task in self._tasks.items()
            if object_id not in done and done.issuperset(self._dependencies[object_id])
        ]

    def get_dependents(self, task: Task) -> list[Task]:
        """Return the tasks that have this one as context, in list order; none for a task that is not in the graph.

        Raises:
            ValueError: `task` is None.
        """
        return [self._tasks[object_id] for object_id in self._dependents.get(_require(task, "task").object_id, ())]

    def is_in_graph(self, task: Task) -> bool:
        """Whether it is one of the tasks.

        Raises:
            ValueError: `task` is None.
        """
        return _require(task, "task").object_id in self._tasks

    def in_dependency_order(self) -> list[Task]:
        """Return every task behind its dependencies, else in list order; tasks of a cycle are left out."""
        waits = {object_id: len(inside) for object_id, inside in self._dependencies.items()}
        ready = deque(object_id for object_id, count in waits.items() if count == 0)
        ordered: list[Task] = []
        while ready:
            object_id = ready.popleft()
            ordered.append(self._tasks[object_id])
            for dependent in self._dependents[object_id]:
                waits[dependent] -= 1
                if waits[dependent] == 0:
                    ready.append(dependent)
        return ordered


def _require(value: T, name: str) -> T:
    """Return the argument itself, unless it is None."""
    if cast("object", value) is None:
        raise ValueError(f"{name} must not be None")
    return value
