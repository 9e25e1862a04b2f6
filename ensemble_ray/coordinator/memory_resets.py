"""LocalMemoryResets: a run's loops reset the memory that the user passed, in the process that has it.

In: a loop, before an iteration. Out: that it is done, or what the store raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.execute.orders import EvaluationFailed
from ensemble_ray.process.forks import USER_ERRORS
from ensemble_ray.values.memory import ScopeReset

if TYPE_CHECKING:
    from ensemble_ray.memory.tools import LocalRunMemory
    from ensemble_ray.plan.plan import LoopUnit


class LocalMemoryResets:
    """The memory of one run, as its loops reset it. Fulfils `MemoryResets`."""

    def __init__(self, memory: LocalRunMemory) -> None:
        self._memory = memory

    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        """Do to a loop's memory scopes what its mode says before an iteration (S-LOOP-91, S-LOOP-93)."""
        if unit.memory_mode == "accumulate":
            return None
        reset = ScopeReset(
            loop=unit.name, mode=unit.memory_mode, scopes=unit.memory_scopes, window_size=unit.memory_window_size
        )
        try:
            await self._memory.reset(reset)
        except USER_ERRORS as error:
            return EvaluationFailed.of(error)
        return None
