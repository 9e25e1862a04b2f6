"""Who does what a task delegates. Contract only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskOrder, TaskResult

__all__ = ["Peers"]


class Peers(Protocol):
    """Where delegated work is done: by agents of the same run, wherever they live."""

    async def perform(self, order: TaskOrder) -> TaskResult:
        """Run that task to its end; a cancelled caller stops it. A process that died is a failed result."""
        ...

    def stop(self, instances: Sequence[str]) -> None:
        """Stop these; `perform` still gives what came of each, within the processes' grace, if its process can be reached."""
        ...
