"""Reads recorded runs for the page: rows, runs, steps, reviews and changes. Runs on the library's loop."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import datetime

from ensemble_ray.errors import RecordError, ValidationError, message_of
from ensemble_ray.process.concurrency import threads
from ensemble_ray.record.open_reviews import fold_gates
from ensemble_ray.record.stores import RecordedRun, RunReader
from ensemble_ray.studio import schemas
from ensemble_ray.studio.documents import FlowDrawer, FlowView
from ensemble_ray.studio.http_server import Visitor, not_found
from ensemble_ray.studio.run_list import RunListing, RunSearch
from ensemble_ray.studio.views.run_view import RunView, review_of
from ensemble_ray.studio.views.step_detail import compare_steps, detail_of

_KEPT = 16  # views in the cache. Followed views stay: a new view folds the whole record.
_FOLLOWED_S = 10.0  # a view without requests for so long is not followed


@dataclass(slots=True, kw_only=True)
class CachedRun:
    view: RunView
    summary: RecordedRun
    problem: str | None = None  # why its record cannot be read to the end


@dataclass(slots=True)
class _Kept:
    created_at: datetime
    view: RunView
    asked_at: float
    problem: str | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class RunViews:
    def __init__(self, store: RunReader, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._clock = clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    async def see(self, run_id: str) -> CachedRun:
        summary = await self.summary(run_id)
        kept = self._kept.get(run_id)
        if kept is None or kept.created_at != summary.created_at:
            kept = self._kept[run_id] = _Kept(summary.created_at, RunView(run_id), self._clock())
        self._kept.move_to_end(run_id)
        kept.asked_at = self._clock()
        while len(self._kept) > _KEPT:  # views without followers go, the least recently used first
            oldest_id, oldest = next(iter(self._kept.items()))
            if self._clock() - oldest.asked_at < _FOLLOWED_S:
                break
            del self._kept[oldest_id]
        async with kept.lock:
            await self._catch_up(kept)
            kept.view.settle(summary)
        return CachedRun(view=kept.view, summary=summary, problem=kept.problem)

    async def summary(self, run_id: str) -> RecordedRun:
        try:
            found = await self._store.summary(run_id)
        except ValidationError:  # the id cannot name a record
            found = None
        if found is None:
            raise not_found("run", run_id)
        return found

    async def _catch_up(self, kept: _Kept) -> None:
        try:
            await self._read(kept, is_partial=kept.problem is not None)
        except RecordError as error:
            if kept.problem is not None:
                kept.problem = message_of(error)
                return
            # Show the readable part of the record.
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
                await asyncio.sleep(0)  # a long record blocks the loop for one page at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDelta:
    changes: schemas.LiveSteps | None
    is_over: bool  # no more changes follow by themselves
    stamp: tuple[int, str]  # changes with the run


class StudioReader:
    """Recorded runs, for the page."""

    def __init__(
        self,
        store: RunReader,
        *,
        can_decide: bool,
        is_asked_here: Callable[[str], bool] | None = None,
        is_of_one: bool = False,
    ) -> None:
        """Read a store.

        Args:
            store: Contains the records.
            can_decide: Whether this page accepts review decisions.
            is_asked_here: Whether a handler of this process accepts the decision of a gate.
            is_of_one: Whether all runs of the store belong to one program and form one series.
        """
        self._store = store
        self._can_decide = can_decide
        self._is_asked_here = is_asked_here
        self._is_of_one = is_of_one
        self._views = RunViews(store)
        self._listing = RunListing(store)
        self._flows = FlowDrawer()

    async def runs(self, search: RunSearch, visitor: Visitor, *, cursor: str, limit: int) -> schemas.RunList:
        return await self._listing.page(search, visitor.may_see, cursor=cursor, limit=limit)

    async def run(self, run_id: str, visitor: Visitor) -> schemas.RunDetailSchema:
        return self._detail(await self._see(run_id, visitor), visitor)

    async def series(self, run_id: str, visitor: Visitor) -> schemas.RunSeries:
        summary = await self.check_visible(run_id, visitor)
        return await self._listing.series(summary, visitor.may_see, is_of_one=self._is_of_one)

    async def steps(self, run_id: str, visitor: Visitor, *, after: int) -> schemas.StepList:
        """Return the steps that changed after a position."""
        view = (await self._see(run_id, visitor)).view
        return schemas.StepList(steps=view.steps.rows(after=after), cursor=view.cursor)

    async def look(self, run_id: str, visitor: Visitor, *, after: int, stamp: tuple[int, str] | None) -> RunDelta:
        """Return the changes of a run after a position, and after the stamp of the last look."""
        seen = await self._see(run_id, visitor)
        view = seen.view
        state = view.totals.state(seen.summary)
        now = (view.cursor, f"{state.value} {seen.summary.owner}")
        is_over = state.is_final or (not state.is_active and state.value == "interrupted")
        if now == stamp:
            return RunDelta(changes=None, is_over=is_over, stamp=now)
        # An interruption has no position.
        steps = view.steps.rows(after=after)
        if is_over and after >= view.cursor:
            steps = [row for row in view.steps.rows() if row.status == "interrupted"]
        changes = schemas.LiveSteps(steps=steps, run=self._detail(seen, visitor, has_texts=False), cursor=view.cursor)
        return RunDelta(changes=changes, is_over=is_over, stamp=now)

    async def step(self, run_id: str, step_id: str, visitor: Visitor) -> schemas.StepDetail:
        seen = await self._see(run_id, visitor)
        return await self._step(seen, step_id, self._reviews(seen))

    async def step_details(
        self, run_id: str, step_ids: Iterable[str], visitor: Visitor
    ) -> AsyncIterator[tuple[str, schemas.StepDetail]]:
        """Yield many steps in all detail, with their ids."""
        seen = await self._see(run_id, visitor)
        reviews = self._reviews(seen)
        for each in step_ids:
            yield each, await self._step(seen, each, reviews)

    async def _step(self, seen: CachedRun, step_id: str, reviews: Sequence[schemas.ReviewSchema]) -> schemas.StepDetail:
        run_id = seen.view.run_id
        state = seen.view.steps.history.executions.get(step_id)
        if state is None:
            raise not_found("step", step_id)
        facts = [each for each in await self._store.facts_of(run_id, step_id) if each.instance == step_id]
        question = state.label if state.kind == "delegation" else ""
        return detail_of(
            seen.view.steps.show(state).row(), facts, seen.view.totals.head.header, reviews=reviews, question=question
        )

    async def flow(self, run_id: str, visitor: Visitor, view: FlowView) -> schemas.FlowSchema:
        seen = await self._see(run_id, visitor)
        header, steps = seen.view.totals.head.header, seen.view.steps
        return await threads.run(self._flows.draw, header, steps.rows(), view, steps.graph_trace())

    async def compare(self, a: str, b: str, visitor: Visitor) -> schemas.ComparedRuns:
        seen = [await self._see(run_id, visitor) for run_id in (a, b)]
        rows = [(each.view.totals.row(each.summary), each.view.steps) for each in seen]
        return compare_steps(rows[0], rows[1])

    async def reviews(self, visitor: Visitor) -> schemas.ReviewListSchema:
        """Return the open gates of all runs, oldest first."""
        now = time.time()
        found: list[schemas.ReviewSchema] = []
        for run, facts in await self._store.gates():
            if not visitor.may_see(run):
                continue
            if not (waiting := [gate for gate in fold_gates(facts) if gate.is_open]):
                continue
            name, is_owned = (await self._listing.row(run)).ensemble, bool(run.owner)
            can = self._can_decide
            found += [review_of(each, ensemble=name, at=now, is_owned=is_owned, can_decide=can) for each in waiting]
        ordered = sorted(self._mark(found), key=lambda each: (each.created_at, each.run_id, each.gate_id))
        return schemas.ReviewListSchema(reviews=ordered)

    async def gate(self, run_id: str, gate_id: str) -> schemas.ReviewSchema | None:
        reviews = self._reviews(await self._views.see(run_id))
        return next((each for each in reviews if each.gate_id == gate_id), None)

    async def check_visible(self, run_id: str, visitor: Visitor) -> RecordedRun:
        """Return the state of a run, or refuse a run that the visitor may not see."""
        summary = await self._views.summary(run_id)
        if not visitor.may_see(summary):
            raise not_found("run", run_id)
        return summary

    async def _see(self, run_id: str, visitor: Visitor) -> CachedRun:
        await self.check_visible(run_id, visitor)
        return await self._views.see(run_id)

    def _reviews(self, seen: CachedRun) -> Sequence[schemas.ReviewSchema]:
        return self._mark(seen.view.reviews(seen.summary, at=time.time(), can_decide=self._can_decide))

    def _mark(self, reviews: Sequence[schemas.ReviewSchema]) -> list[schemas.ReviewSchema]:
        """Gates with a handler in this process are decidable."""
        is_ours, change = self._is_asked_here, {"decidable": True}
        if is_ours is None:
            return list(reviews)
        return [each.model_copy(update=change) if is_ours(each.gate_id) else each for each in reviews]

    def _detail(self, seen: CachedRun, visitor: Visitor, *, has_texts: bool = True) -> schemas.RunDetailSchema:
        detail = seen.view.detail(
            seen.summary,
            at=time.time(),
            can_decide=self._can_decide,
            forks=self._listing.forks_of(seen.summary.run_id, visitor.may_see),
            problem=seen.problem,
            has_texts=has_texts,
        )
        return detail.model_copy(update={"reviews": self._mark(detail.reviews)}) if detail.reviews else detail
