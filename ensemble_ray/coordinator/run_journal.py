"""The journal of one run as its owner writes it: under its epoch, with the run's id."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError, StaleEpochError
from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.facts.runs import RecordedError, RunInterrupted
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import RUN

if TYPE_CHECKING:
    from ensemble_ray.ports import Clock, Journal


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

    async def record_break(self, error: Exception) -> None:
        """Put on record why a run that began stopped without an end, if the record can still be written (S-ERR-69)."""
        if not isinstance(error, StaleEpochError):
            with contextlib.suppress(RecordError, StaleEpochError):  # the error itself is raised
                await self.append(self.fact(RUN, RunInterrupted.of(RecordedError.of(error))))
