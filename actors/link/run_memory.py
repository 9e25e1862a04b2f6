"""A run's memory, for processes away from the driver, which has the user's objects (S-MEM-69).

Tasks use `RemoteRunMemory`, loops `RemoteMemoryResets`. What travels is bytes: the hub, which passes it on, need not have the classes of users' outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from ensemble_ray.actors.link.packing import packed_evaluation
from ensemble_ray.errors import IllegalStateError
from ensemble_ray.execute.questions import EvaluationFailed
from ensemble_ray.process.pickling import dumps

if TYPE_CHECKING:
    from ensemble_ray.plan.units import LoopUnit
    from ensemble_ray.ports import DriverServices
    from ensemble_ray.values.memory import MemoryNote, MemoryQuery, RecalledMemory, RememberedNote

__all__ = ["MEMORY_SERVICE", "RemoteMemoryResets", "RemoteRunMemory"]

#: Name of the driver's service.
MEMORY_SERVICE = "memory"


class RemoteRunMemory:
    """Asks the driver. Fulfils `RunMemory`."""

    def __init__(self, driver: DriverServices) -> None:
        self._driver = driver

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Return what a task is to be reminded of."""
        return cast("RecalledMemory", await self._ask("recall", query))

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Keep what a completed task leaves."""
        return cast("RememberedNote", await self._ask("remember", note))

    async def _ask(self, method: str, asked: object) -> object:
        return await self._driver.ask(MEMORY_SERVICE, {"method": method, "body": dumps(asked)})


class RemoteMemoryResets:
    """Asks the driver, and loads nothing of the user's: what a store raised comes as bytes. Fulfils `MemoryResets`."""

    def __init__(self, driver: DriverServices) -> None:
        self._driver = driver

    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        """Do to a loop's memory scopes what its mode says before an iteration; a driver that is gone fails the loop."""
        payload = {"method": "reset", "body": dumps(unit)}
        try:
            return cast("EvaluationFailed | None", await self._driver.ask(MEMORY_SERVICE, payload))
        except IllegalStateError as error:
            return packed_evaluation(EvaluationFailed.of(error))
