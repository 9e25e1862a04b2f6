"""What a task at work needs of the run's processes. Contracts only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ensemble_ray.definition.reflection_input import ReflectionInput
    from ensemble_ray.values.reflection import TaskReflection

__all__ = ["Callables", "RunReflections"]


class Callables(Protocol):
    """Asks a callable of the run."""

    async def evaluate(self, path: str, argument: object) -> object:
        """Call it with that argument; what it raises is raised here."""
        ...


class RunReflections(Protocol):
    """The reflections of one run's tasks, as these reach them wherever they are; what user code raises is raised here."""

    async def recall(self, key: str) -> TaskReflection | None:
        """Return the reflection that was there before the run stored one under that key (S-REFL-2)."""
        ...

    async def find_prior(self, key: str) -> TaskReflection | None:
        """Return the reflection that is there now."""
        ...

    async def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key."""
        ...

    async def ask_strategy(self, asked: ReflectionInput) -> TaskReflection:
        """Return what the task's own strategy makes of its output.

        Raises:
            TypeError: it made something else.
        """
        ...
