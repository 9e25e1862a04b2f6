"""Many readers of one run look at its record as often as one of them would."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from msgspec.structs import replace

from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.following import SharedRecordReader
from ensemble_ray.record.stores import RecordedRun
from tests.ensemble_ray.record.facts_of_runs import fact


class CountedStore:
    """A record that grows; counts who looks."""

    def __init__(self) -> None:
        self.facts: list[Fact] = []
        self.looks = 0

    async def read(self, run_id: str, *, after: int = 0) -> AsyncGenerator[Sequence[Fact]]:
        self.looks += 1
        if found := self.facts[after:]:
            yield found

    async def summary(self, run_id: str) -> RecordedRun | None:
        return None


async def read(store: SharedRecordReader, after: int) -> int:
    """How many facts there are behind a position."""
    return len([each async for page in store.read("run", after=after) for each in page])


async def test_nobody_looks_again_who_stands_where_another_saw_nothing() -> None:
    """S-SRV-36: whoever stands before that reads; when the run has ended, everybody looks once more."""
    counted = CountedStore()
    counted.facts = [replace(fact("output", "a#0", 1.0, output={}), seq=1)]
    shared = SharedRecordReader(counted, lasting_s=1000)
    assert [await read(shared, 1) for _ in range(10)] == [0] * 10
    assert counted.looks == 1
    assert await read(shared, 0) == 1
    counted.facts.append(replace(fact("output", "b#0", 2.0, output={}), seq=2))
    assert await read(shared, 1) == 0
    shared.drop("run")
    assert await read(shared, 1) == 1
