"""A run's reflections, for processes away from the driver, which has the user's store and strategies (S-REFL-31)."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ensemble_ray.process.pickling import dumps

if TYPE_CHECKING:
    from ensemble_ray.definition.reflection_input import ReflectionInput
    from ensemble_ray.ports import DriverServices
    from ensemble_ray.values.reflection import TaskReflection

__all__ = ["REFLECTION_SERVICE", "RemoteRunReflections"]

#: Name of the driver's service.
REFLECTION_SERVICE = "reflections"


class RemoteRunReflections:
    """Asks the driver. Fulfils `RunReflections`."""

    def __init__(self, driver: DriverServices) -> None:
        self._driver = driver

    async def recall(self, key: str) -> TaskReflection | None:
        """Return the reflection that was there before the run stored one under that key."""
        return cast("TaskReflection | None", await self._ask("recall", key))

    async def find_prior(self, key: str) -> TaskReflection | None:
        """Return the reflection that is there now."""
        return cast("TaskReflection | None", await self._ask("find_prior", key))

    async def store(self, key: str, reflection: TaskReflection) -> None:
        """Keep a reflection, in place of the one that has that key."""
        await self._ask("store", key, reflection)

    async def ask_strategy(self, asked: ReflectionInput) -> TaskReflection:
        """Return what the task's own strategy makes of its output."""
        return cast("TaskReflection", await self._ask("ask_strategy", asked))

    async def _ask(self, method: str, *arguments: object) -> object:
        # Bytes: the hub, which passes them on, need not have the classes of users' outputs.
        return await self._driver.ask(REFLECTION_SERVICE, {"method": method, "body": dumps(arguments)})
