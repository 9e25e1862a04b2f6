"""RunViews: the runs of a store as they stand, each folded once and then kept up with its record.

In: a store, ids of runs. Out: views that have all that is recorded. Rules: a record is read from where its view stands; one run is
read by one reader at a time; of many views those are let go that nobody asks for any more. On the library's loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError, ValidationError, message_of
from ensemble_ray.studio.refusals import not_found
from ensemble_ray.studio.views.run_view import RunView

if TYPE_CHECKING:
    from datetime import datetime

    from ensemble_ray.record.stores import RecordedRun, RunReader

#: Views that are kept; what is followed is kept whatever their number, since it would be folded anew at each look.
_KEPT = 16
#: A view that nobody asked for so long is followed by nobody, s: who follows a run looks some times a second.
_FOLLOWED_S = 10.0


@dataclass(slots=True, kw_only=True)
class SeenRun:
    """A run as it was seen last."""

    view: RunView
    summary: RecordedRun
    #: why its record cannot be read to its end; None: it can
    problem: str | None = None


@dataclass(slots=True)
class _Kept:
    created_at: datetime
    view: RunView
    asked_at: float
    problem: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RunViews:
    """Views of a store's runs."""

    def __init__(self, store: RunReader, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def see(self, run_id: str) -> SeenRun:
        """Return a run as it stands now.

        Raises:
            StudioRefusal: there is no such run.
            RecordError: the store cannot be read.
        """
        summary = await self.summary(run_id)
        kept = self._kept.get(run_id)
        if kept is None or kept.created_at != summary.created_at:
            kept = self._kept[run_id] = _Kept(summary.created_at, RunView(run_id), self._clock())
        self._kept.move_to_end(run_id)
        kept.asked_at = self._clock()
        self._evict_idle()
        async with kept.lock:
            await self._catch_up(kept)
            kept.view.settle(summary)
        return SeenRun(view=kept.view, summary=summary, problem=kept.problem)

    async def summary(self, run_id: str) -> RecordedRun:
        """Return how a run stands.

        Raises:
            StudioRefusal: there is no such run.
        """
        try:
            found = await self._store.summary(run_id)
        except ValidationError:  # the id cannot name a record
            found = None
        if found is None:
            raise not_found("run", run_id)
        return found

    def _evict_idle(self) -> None:
        """Drop views that nobody follows, those that were not asked for longest first, until few are left."""
        while len(self._kept) > _KEPT:
            run_id, oldest = next(iter(self._kept.items()))
            if self._clock() - oldest.asked_at < _FOLLOWED_S:
                return
            del self._kept[run_id]

    async def _catch_up(self, kept: _Kept) -> None:
        try:
            await self._read(kept, is_partial=kept.problem is not None)
        except RecordError as error:
            if kept.problem is not None:
                kept.problem = message_of(error)
                return
            # What is left of it is shown, with what is wrong.
            kept.problem, kept.view = message_of(error), RunView(kept.view.run_id)
            try:
                await self._read(kept, is_partial=True)
            except RecordError as again:
                kept.problem = message_of(again)

    async def _read(self, kept: _Kept, *, is_partial: bool) -> None:
        view = kept.view
        async with aclosing(self._store.read(view.run_id, after=view.cursor, is_partial=is_partial)) as pages:
            async for page in pages:
                view.apply(page)
                await asyncio.sleep(0)  # a long record keeps the loop for one page at a time
