"""The batches of a run, folded from its facts. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.events import BatchProgressEvent
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import BatchMember, BatchRecorded
from ensemble_ray.record.identity.definition import map_key, position_of
from ensemble_ray.values.ids import instance_of

_CLOSED = {"collected", "void"}


class RecordedBatch(Struct, frozen=True, kw_only=True):
    batch: str
    planned_at: float  # Unix time, s
    changed_at: float
    state: str = "planned"
    items: tuple[BatchMember, ...] = ()
    total: int = 0
    answered: int = 0
    failed: int = 0
    model: str = ""
    endpoint: str = ""
    file: str = ""
    provider_batch: str = ""
    status: str = ""

    @property
    def is_open(self) -> bool:
        return self.state not in _CLOSED

    def to_data(self) -> dict[str, object]:
        names = ("batch", "state", "status", "total", "answered", "failed", "model", "provider_batch")
        return {name: getattr(self, name) for name in names}

    def to_event(self, run_id: str) -> BatchProgressEvent:
        return BatchProgressEvent(
            batch=self.batch,
            state=self.state,
            status=self.status,
            total=self.total,
            answered=self.answered,
            failed=self.failed,
            provider_batch=self.provider_batch,
            run_id=run_id,
        )

    def instances(self) -> Iterator[str]:
        for first, last, occurrence in self.items:
            for index in range(first, last + 1):
                yield instance_of(map_key(index), occurrence=occurrence)

    def contains(self, index: int, occurrence: int) -> bool:
        at = bisect_right(self.items, (occurrence, index), key=lambda each: (each.occurrence, each.first))
        found = self.items[at - 1] if at else None
        return found is not None and found.occurrence == occurrence and index <= found.last


class RecordedBatches:
    def __init__(self) -> None:
        self._batches: dict[str, RecordedBatch] = {}

    def __iter__(self) -> Iterator[RecordedBatch]:
        return iter(tuple(self._batches.values()))

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, batch: str) -> RecordedBatch:
        return self._batches[batch]

    def get(self, batch: str) -> RecordedBatch | None:
        return self._batches.get(batch)

    def apply(self, fact: Fact[BatchRecorded]) -> RecordedBatch:
        data = fact.data
        known = self._batches.get(data.batch)
        before = known or RecordedBatch(batch=data.batch, planned_at=fact.at, changed_at=fact.at)
        after = replace(
            before,
            changed_at=fact.at,
            state=data.state,
            items=data.items or before.items,
            total=data.total or before.total,
            answered=data.answered or before.answered,
            failed=data.failed or before.failed,
            model=data.model or before.model,
            endpoint=data.endpoint or before.endpoint,
            file=data.file or before.file,
            provider_batch=data.provider_batch or before.provider_batch,
            status=data.status or before.status,
        )
        self._batches[data.batch] = after
        return after

    def apply_all(self, facts: Iterable[Fact]) -> None:
        for fact in facts:
            if isinstance(fact.data, BatchRecorded):
                self.apply(cast("Fact[BatchRecorded]", fact))

    def find(self, instance: str) -> RecordedBatch | None:
        """Return the newest batch with the request of a map."""
        key, _, occurrence = instance.rpartition("#")
        position = position_of(key)
        if position is None or position[0] or not occurrence.isdecimal():
            return None
        number = int(occurrence)
        newest_first = reversed(self._batches.values())
        return next((each for each in newest_first if each.contains(position[1], number)), None)


def members_of(instances: Iterable[str]) -> tuple[BatchMember, ...]:
    """Return the maps as ranges, by occurrence, then by index."""
    places: list[tuple[int, int]] = []
    for instance in instances:
        key, _, occurrence = instance.rpartition("#")
        position = position_of(key)
        assert position is not None  # noqa: S101  only maps are in batches
        places.append((int(occurrence), position[1]))
    return tuple(_ranges(sorted(places)))


def _ranges(places: Sequence[tuple[int, int]]) -> Iterator[BatchMember]:
    begin = 0
    for end in range(1, len(places) + 1):
        occurrence, index = places[end - 1]
        if end == len(places) or places[end] != (occurrence, index + 1):
            yield BatchMember(places[begin][1], index, occurrence)
            begin = end
