"""What a replayed task touches in place of its run's memory. Package: testing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.testing.replay_ports import Difference, ReplayJournal, cut_to_difference
from ensemble_ray.values.memory import RememberedNote

if TYPE_CHECKING:
    from ensemble_ray.values.memory import MemoryNote, MemoryQuery, RecalledMemory

__all__ = ["UnaskedMemory"]


class UnaskedMemory:
    """Stands for a run's memory: being asked means that what a task was reminded of is not recorded. Fulfils `RunMemory`."""

    def __init__(self, journal: ReplayJournal) -> None:
        self._journal = journal

    async def recall(self, query: MemoryQuery) -> RecalledMemory:
        """Tell that nothing is recorded.

        Raises:
            AgentExecutionError: always.
        """
        nothing, current = cut_to_difference("", query.text)
        what = "memory that was read and is not recorded"
        difference = Difference(where="its memory", what=what, recorded=nothing, current=current)
        self._journal.report(difference, is_at_end=True)

    async def remember(self, note: MemoryNote) -> RememberedNote:
        """Keep nothing."""
        del note
        return RememberedNote()
