"""ShownRuns: the recorded runs that a dashboard has seen, for its page. Fulfils `RunReader`.

In: runs as they begin, from any thread. Out: their records, each from its own store. A run that is recorded nowhere (durability `off`) is
not among them: pages have its messages alone (S-WEB-64). Never: a run that was not begun with this dashboard. Read on the library's loop.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING

from ensemble_ray.process.forks import new_lock
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress

if TYPE_CHECKING:
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.ports import EnteredRun
    from ensemble_ray.record.stores import GatesOfRun, RecordedRun, RunStore

#: Runs that are remembered; who shows more shows the newest.
_MOST = 10_000


class ShownRuns:
    """Runs by id, with the places of their records."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._places: dict[str, StoreAddress] = {}

    def add(self, run: EnteredRun) -> None:
        """Take notice of a run that begins."""
        if not run.is_recorded:
            return
        with self._lock:
            self._places.pop(run.run_id, None)
            self._places[run.run_id] = StoreAddress(home=run.home, url=run.url)
            while len(self._places) > _MOST:
                del self._places[next(iter(self._places))]

    def place_of(self, run_id: str) -> StoreAddress | None:
        """Return where a run is recorded; None: it was not seen."""
        return self._places.get(run_id)

    async def read(
        self,
        run_id: str,
        *,
        after: int = 0,
        kinds: Collection[str] | None = None,
        has_data: bool = True,
        is_partial: bool = False,
    ) -> AsyncGenerator[Sequence[Fact]]:
        """Return the facts behind a position; see `RunStore.read`."""
        store = self._store_of(run_id)
        if store is None:
            return
        pages = store.read(run_id, after=after, kinds=kinds, has_data=has_data, is_partial=is_partial)
        async with aclosing(pages):
            async for page in pages:
                yield page

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        """Return what is recorded of one instance; see `RunStore.facts_of`."""
        store = self._store_of(run_id)
        return [] if store is None else await store.facts_of(run_id, instance)

    async def summary(self, run_id: str) -> RecordedRun | None:
        """Return how a run stands; None: it was not seen, or has no record yet."""
        store = self._store_of(run_id)
        return None if store is None else await store.summary(run_id)

    async def runs(self) -> list[RecordedRun]:
        """Return the runs, newest first."""
        found = [each for store in self._stores() for each in await store.runs() if each.run_id in self._places]
        return sorted(found, key=lambda each: (each.created_at, each.run_id), reverse=True)

    async def gates(self) -> list[GatesOfRun]:
        """Return the runs with review gates, oldest first; see `RunStore.gates`."""
        found = [each for store in self._stores() for each in await store.gates() if each.run.run_id in self._places]
        return sorted(found, key=lambda each: each.run.created_at)

    def _store_of(self, run_id: str) -> RunStore | None:
        place = self.place_of(run_id)
        return None if place is None else store_at(place)

    def _stores(self) -> list[RunStore]:
        with self._lock:
            places = dict.fromkeys(self._places.values())
        return [store_at(place) for place in places]
