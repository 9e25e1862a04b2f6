"""RemoteRunMemory: a run's memory, for processes away from the driver, which has the user's objects (S-MEM-69).

What travels is bytes: the hub, which passes it on, need not have the classes of users' outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import cloudpickle

if TYPE_CHECKING:
    from ensemble_ray.ports import DriverServices
    from ensemble_ray.values.memory import MemoryNote, MemoryQuery, RecalledMemory, RememberedNote, ScopeReset

__all__ = ["MEMORY_SERVICE", "RemoteRunMemory"]

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

    async def reset(self, reset: ScopeReset) -> None:
        """Clear or cut scopes before an iteration of a loop."""
        await self._ask("reset", reset)

    async def _ask(self, method: str, asked: object) -> object:
        return await self._driver.ask(MEMORY_SERVICE, {"method": method, "body": cloudpickle.dumps(asked)})
