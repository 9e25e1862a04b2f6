"""LocalRunReflections: one run's reflections, in the process that has the user's store and strategies. Package: execute.

In: keys, reflections. Out: what the store had before the run, and has now. Must never happen: a task that is shown what
its own run learned (S-REFL-2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.process.threads import call_user
from ensemble_ray.values.reflection import TaskReflection

if TYPE_CHECKING:
    from ensemble_ray.definition.reflection_input import ReflectionInput
    from ensemble_ray.ports.reflection import ReflectionStore

__all__ = ["LocalRunReflections"]


class LocalRunReflections:
    """The reflections of one run. Fulfils `RunReflections`."""

    def __init__(self, store: ReflectionStore) -> None:
        self._store = store
        #: key -> what the store had before this run stored anything under it
        self._before: dict[str, asyncio.Task[TaskReflection | None] | TaskReflection | None] = {}

    async def recall(self, key: str) -> TaskReflection | None:
        """Return the reflection that was there before the run stored one under that key."""
        if key not in self._before:
            self._before[key] = asyncio.get_running_loop().create_task(self.find_prior(key))
        found = self._before[key]
        if not isinstance(found, asyncio.Task):
            return found
        try:
            return await asyncio.shield(found)
        except Exception:
            self._before.pop(key, None)  # whoever asks next asks the store again
            raise

    async def find_prior(self, key: str) -> TaskReflection | None:
        """Return the reflection that is there now."""
        return await call_user(
            cast("Callable[[str], TaskReflection | Awaitable[TaskReflection | None] | None]", self._store.retrieve), key
        )

    async def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key."""
        await self.recall(key)
        await call_user(cast("Callable[..., object]", self._store.store), key, reflection)

    async def ask_strategy(self, asked: ReflectionInput) -> TaskReflection:
        """Return what the task's own strategy makes of its output.

        Raises:
            IllegalStateError: the strategy is not of this process, as in a run that was submitted by another one.
            TypeError: it made something else.
        """
        config = asked.task.reflection_config
        if config is None or config.strategy is None or not config.is_strategy_here:
            raise IllegalStateError("the strategy is not in this process")
        made: object = await call_user(cast("Callable[..., object]", config.strategy), asked)
        if not isinstance(made, TaskReflection):
            raise TypeError(f"the strategy returned {type(made).__name__} instead of a TaskReflection")
        return made

    def restore(self, key: str, reflection: TaskReflection | None) -> None:
        """Remember what an earlier process of the run was shown."""
        self._before.setdefault(key, reflection)
