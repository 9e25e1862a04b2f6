"""How one task used the memory of its ensemble. Package: execute. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from ensemble_ray.values.metrics import MemoryOperationCounts

__all__ = ["MemoryUse"]


@dataclass(slots=True)
class MemoryUse:
    """Counts what it hears. Fulfils `MemoryOperationListener`; one for each task that is counted (S-MEM-101)."""

    short_term_entries_written: int = 0
    long_term_stores: int = 0
    long_term_retrievals: int = 0
    entity_lookups: int = 0
    #: time of retrievals and lookups, s
    reading_s: float = 0.0

    def on_stm_write(self) -> None:
        """Count it."""
        self.short_term_entries_written += 1

    def on_ltm_store(self) -> None:
        """Count it."""
        self.long_term_stores += 1

    def on_ltm_retrieval(self, duration: float) -> None:
        """Count it and its time, s."""
        self.long_term_retrievals += 1
        self.reading_s += max(0.0, duration)

    def on_entity_lookup(self, duration: float) -> None:
        """Count it and its time, s."""
        self.entity_lookups += 1
        self.reading_s += max(0.0, duration)

    @property
    def counts(self) -> MemoryOperationCounts:
        """How often memory was used."""
        return MemoryOperationCounts(
            short_term_entries_written=self.short_term_entries_written,
            long_term_stores=self.long_term_stores,
            long_term_retrievals=self.long_term_retrievals,
            entity_lookups=self.entity_lookups,
        )

    @property
    def reading_time(self) -> timedelta:
        """How long it took to read."""
        return timedelta(seconds=self.reading_s)
