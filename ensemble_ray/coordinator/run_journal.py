"""The journal of one run as its owner writes it: under its epoch, with the run's id. Package: coordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.ports import Persistence

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock, Journal

__all__ = ["RunJournal"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJournal:
    """What all orders of a run say, and what its facts are written under."""

    run_id: str
    epoch: int
    journal: Journal
    clock: Clock

    def now(self) -> float:
        """Return the time, Unix time, s."""
        return self.clock.now()

    def fact(self, name: str, data: FactData, at: float | None = None) -> Fact:
        """Return a fact of this run."""
        moment = self.clock.now() if at is None else at
        return Fact(run=self.run_id, name=name, at=moment, data=data, epoch=self.epoch)

    async def append(self, *facts: Fact, until: Persistence = Persistence.QUEUED) -> None:
        """Put facts on record.

        Raises:
            RecordError, StaleEpochError: it cannot be, or is not ours any more.
        """
        await self.journal.append(facts, epoch=self.epoch, until=until)
