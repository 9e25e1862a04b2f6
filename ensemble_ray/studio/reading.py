"""Reads recorded runs for the page: rows, runs, steps, reviews and changes. Runs on the library's loop."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import datetime
from hashlib import sha256
from http import HTTPStatus
from typing import Literal, NamedTuple, get_args

import msgspec
from msgspec import Struct

from ensemble_ray.definition.run_options import has_tag
from ensemble_ray.errors import RecordError, ValidationError, message_of
from ensemble_ray.evaluation.results import EvaluationResult, read_output, results_run_id
from ensemble_ray.process.concurrency import threads
from ensemble_ray.record.failure import read_failure, read_next_step
from ensemble_ray.record.open_reviews import fold_gates
from ensemble_ray.record.stores import RecordedRun, RunReader
from ensemble_ray.recovery.revealing import RevealRefusedError, ValueReader, may_reveal, reveal_to
from ensemble_ray.studio import schemas
from ensemble_ray.studio.documents import FlowDrawer, FlowView
from ensemble_ray.studio.http_server import StudioRefusal, Visitor, not_found
from ensemble_ray.studio.schemas import RunGroup, RunList, RunRow, RunSeries
from ensemble_ray.studio.views.evaluations import MOST_EVALUATIONS, evaluation_detail, evaluation_row, group_runs
from ensemble_ray.studio.views.run_view import OF_PROGRAM, TOTAL_KINDS, RunTotals, RunView, review_of
from ensemble_ray.studio.views.steps import compare_steps, detail_of, wire_status
from ensemble_ray.studio.views.trends import MOST_TEAMS, TrendPeriod, date_of, trends_of
from ensemble_ray.values.outputs import RunState

MOST_ROWS, _USUAL_ROWS = 200, 50  # rows of one page: the most, and the default
_READ_A_PAGE = 200  # a page that needs the contents of records reads so many unknown ones
_READERS = 8
_LASTING_S = 1.0
_SERIES = 40
_ASKED_FOR_NAMES = 400  # runs whose records are read for the name of their team
_KEPT = 50_000
_MOST_GROUPS = 200

SortKey = Literal["started", "state", "name", "duration", "tokens", "cost", "attempts"]
GroupKey = Literal["team", "tag", "error"]
#: Values of rows to sort by; None is the last in both orders.
_NUMBERS: Mapping[SortKey, Callable[[RunRow], float | None]] = {
    "duration": lambda row: row.duration_ms,
    "tokens": lambda row: row.estimated_tokens if row.tokens is None else row.tokens,
    "cost": lambda row: None if row.cost is None else float(row.cost.amount),
    "attempts": lambda row: row.attempts,
}
_STATUSES = get_args(schemas.RunStatus)
#: Parts of errors that differ between runs: numbers of four digits or more, fractions, ids.
_PARTICULARS = re.compile(r"\b(?=\w*\d)[0-9a-f]{6,}\b|\d{4,}|\d+\.\d+")
_COUNTED = 10_000  # newest runs in trends


class RunSearch(Struct, frozen=True, kw_only=True):
    """A filter of runs, and their order. An empty field matches every run."""

    text: str = ""  # words in the id and the origin, else in the contents of the row
    statuses: frozenset[str] = frozenset()
    ensemble: str = ""  # part of the name of the team
    tag: str = ""  # `name` or `name:value`
    since: float = 0.0  # Unix time, s
    until: float = math.inf  # Unix time, s, exclusive
    sort: SortKey = "started"
    is_descending: bool = True
    group: GroupKey | None = None
    within: str | None = None  # a group; None: the groups themselves

    @property
    def is_by_row(self) -> bool:
        """Whether the order or the groups are in the contents of records."""
        return self.sort in {"name", *_NUMBERS} or self.group is not None


class _Place(NamedTuple):
    """A place in the order of runs; of a cursor it has no run."""

    value: tuple[float, str] | None
    at: float
    run_id: str
    run: RecordedRun | None = None


class _Row(Struct):
    created_at: float
    summary: RecordedRun
    totals: RunTotals | None = None  # None: nothing is read, or the row is final
    row: RunRow | None = None
    is_damaged: bool = False
    reading: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)  # concurrent requests fold a long record once


class RunListing:
    def __init__(self, store: RunReader) -> None:
        self._store = store
        self._rows: dict[str, _Row] = {}
        self._listed: tuple[float, list[RecordedRun]] | None = None
        self._listing = asyncio.Lock()
        self._readers = asyncio.Semaphore(_READERS)

    async def page(
        self,
        search: RunSearch,
        may_see: Callable[[RecordedRun], bool],
        *,
        cursor: str = "",
        limit: int = _USUAL_ROWS,
    ) -> RunList:
        """Return the next rows after a cursor, or groups of rows.

        Words are searched in ids and origins first. If no run has them there, they are searched in rows. A page that needs the
        contents of records reads a limited number of unknown ones; `unread` is the number of the others.
        """
        visible = [each for each in await self.summaries() if may_see(each)]
        runs = [each for each in visible if search.since <= each.created_at.timestamp() < search.until]
        words = search.text.casefold().split()
        if named := [each for each in runs if _has(words, each.run_id, each.origin)]:
            runs, words = named, []
        has_contents = bool(words or search.tag or search.ensemble)
        needs_rows = search.is_by_row or has_contents
        if needs_rows:
            first = () if search.is_by_row else self._left(search, cursor, runs)
            await self._read_some([*first, *runs])  # the rows of this page, then those that are counted
        unread = [each for each in runs if self._row_of(each) is None] if needs_rows else []
        matching = [each for each in runs if self._matches(each, search, words)] if needs_rows else runs
        left = self._left(search, cursor, matching if search.is_by_row else runs)
        known = {each.run_id for each in matching}
        waiting = {each.run_id for each in unread}
        found: list[RecordedRun] = []
        seen = 0
        for each in left if search.group is None or search.within is not None else ():
            if len(found) == max(1, min(limit, MOST_ROWS)) or each.run_id in waiting:
                break
            seen += 1
            if each.run_id in known:
                found.append(each)
        has_more = seen > 0 and any(each.run_id in known or each.run_id in waiting for each in left[seen:])
        return RunList(
            runs=await self.rows(found),
            next_cursor=self._cursor_at(left[seen - 1], search) if has_more else None,
            total_known=len(visible),
            counts=Counter(wire_status(each.state) for each in (matching if has_contents else runs)),
            unread=len(unread),
            groups=self._groups(matching, search) if search.group is not None and search.within is None else [],
        )

    def _left(self, search: RunSearch, cursor: str, runs: Iterable[RecordedRun]) -> list[RecordedRun]:
        """Return the runs with the wanted status in the order of the search, after a cursor."""
        chosen = [each for each in runs if not search.statuses or wire_status(each.state) in search.statuses]
        places = [self._place(each, search.sort) for each in chosen]
        begin = _place_of(cursor, search.sort) if cursor else None
        if begin is not None:
            places.append(begin)  # after its own run, since sorting is stable
        is_newest_first = search.sort != "started" or search.is_descending
        places.sort(key=lambda place: (place.at, place.run_id), reverse=is_newest_first)
        valued = [(each.value, each) for each in places if each.value is not None]
        valued.sort(key=lambda pair: pair[0], reverse=search.is_descending)
        ordered = [*(each for _, each in valued), *(each for each in places if each.value is None)]
        after = 0 if begin is None else next(at for at, each in enumerate(ordered) if each is begin) + 1
        return [each.run for each in ordered[after:] if each.run is not None]

    def _place(self, run: RecordedRun, sort: SortKey) -> _Place:
        value: tuple[float, str] | None = None
        row = self._row_of(run)
        if sort == "state":
            value = (_STATUSES.index(wire_status(run.state)), "")
        elif sort == "name" and row is not None:
            value = (0, row.ensemble.casefold()) if row.ensemble else None
        elif sort in _NUMBERS and row is not None and (number := _NUMBERS[sort](row)) is not None:
            value = (number, "")
        return _Place(value, run.created_at.timestamp(), run.run_id, run)

    def _cursor_at(self, run: RecordedRun, search: RunSearch) -> str:
        return json.dumps([search.sort, *self._place(run, search.sort)[:3]])

    def _matches(self, run: RecordedRun, search: RunSearch, words: Sequence[str]) -> bool:
        """Whether a known row has these words, and the tag, the team and the group of the search."""
        row = self._row_of(run)
        return (
            row is not None
            and (not search.tag or has_tag(row.tags, search.tag, separator=":"))
            and search.ensemble.casefold() in row.ensemble.casefold()
            and _has(words, row.run_id, run.origin, row.ensemble, row.summary, row.subject, row.failure)
            and (search.within is None or search.group is None or search.within in _group_keys(row, search.group))
        )

    def _groups(self, matching: Iterable[RecordedRun], search: RunSearch) -> list[RunGroup]:
        """Return the largest groups of known rows with the wanted status."""
        found: dict[str, list[RecordedRun]] = {}
        for run in self._left(search, "", matching):
            if search.group is not None and (row := self._row_of(run)) is not None:
                for key in _group_keys(row, search.group):
                    found.setdefault(key, []).append(run)
        largest = sorted(found.items(), key=lambda item: (not item[0], -len(item[1])))[:_MOST_GROUPS]
        return [
            RunGroup(
                key=key,
                statuses=Counter(wire_status(each.state) for each in runs),
                latest_at=round(max(each.created_at.timestamp() for each in runs) * 1000),
            )
            for key, runs in largest
        ]

    def _row_of(self, run: RecordedRun) -> RunRow | None:
        """Return the cached row of a run. It may be older than the run."""
        known = self._rows.get(run.run_id)
        return None if known is None or known.created_at != run.created_at.timestamp() else known.row

    async def _read_some(self, runs: Iterable[RecordedRun]) -> None:
        """Read the first unknown rows, then those that may have changed."""

        def is_old(run: RecordedRun) -> bool:
            return (
                self._row_of(run) is None
                or run.state.is_active
                or self._rows[run.run_id].summary.state is not run.state
            )

        old = {each.run_id: each for each in runs if is_old(each)}
        await self.rows(sorted(old.values(), key=lambda run: self._row_of(run) is not None)[:_READ_A_PAGE])

    async def summaries(self) -> list[RecordedRun]:
        """The list may be up to 1 s old."""
        async with self._listing:
            if self._listed is None or time.monotonic() - self._listed[0] > _LASTING_S:
                runs = await self._store.runs()
                self._listed = time.monotonic(), runs
            return self._listed[1]

    async def rows(self, summaries: Sequence[RecordedRun]) -> list[RunRow]:
        return list(await asyncio.gather(*(self.row(each) for each in summaries)))

    async def row(self, summary: RecordedRun) -> RunRow:
        """If the record cannot be read, the row contains the error."""
        created = summary.created_at.timestamp()
        known = self._rows.get(summary.run_id)
        if known is None or known.created_at != created:
            known = self._rows[summary.run_id] = _Row(created, summary)
            while len(self._rows) > _KEPT:
                del self._rows[next(iter(self._rows))]
        elif self._is_known(summary) and known.row is not None:
            return known.row
        async with known.reading, self._readers:
            if known.row is not None and self._is_known(summary):
                return known.row
            totals = known.totals = known.totals or RunTotals()
            known.summary, known.is_damaged = summary, False
            try:
                pages = self._store.read(summary.run_id, after=totals.cursor, kinds=TOTAL_KINDS)
                async with aclosing(pages):
                    async for page in pages:
                        for fact in page:
                            totals.apply(fact)
            except RecordError as error:
                known.is_damaged = True
                text = message_of(error)
                known.row = totals.row(summary).model_copy(update={"summary": text, "failure": text})
                return known.row
            known.row = totals.row(summary)
            if self._is_known(summary):
                known.totals = None  # a resumed run is read again
        return known.row

    def evict(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        self._rows.pop(run_id, None)
        self._listed = None

    async def series(
        self, summary: RecordedRun, may_see: Callable[[RecordedRun], bool], *, is_of_one: bool
    ) -> RunSeries:
        """Return a run with its neighbours in time (S-VIZ-76). `is_of_one`: all runs form a series."""
        runs = [
            each
            for each in reversed(await self.summaries())
            if may_see(each) and (is_of_one or each.origin == summary.origin)
        ]
        are_all_known = True
        if not is_of_one and not summary.origin:
            # Runs of programs have no origin, so the recorded name identifies the team. If not all earlier records are read, the
            # position in the series is unknown.
            around = _around(runs, summary, _ASKED_FOR_NAMES)
            are_all_known = around.start == 0
            runs = runs[around]
            name, rows = (await self.row(summary)).ensemble, await self.rows(runs)
            runs = [each for each, row in zip(runs, rows, strict=True) if row.ensemble == name]
        around = _around(runs, summary, _SERIES)
        return RunSeries(first=around.start + 1 if are_all_known else None, runs=await self.rows(runs[around]))

    async def rows_since(self, since: float, may_see: Callable[[RecordedRun], bool]) -> tuple[list[RunRow], int, bool]:
        """Return rows of the newest runs since a Unix time, the number of these runs, and whether no more rows will follow.

        One call reads a limited number of unknown records, the newest first.
        """
        runs = [each for each in await self.summaries() if each.created_at.timestamp() >= since and may_see(each)]
        rows, unread = list[RunRow](), list[RecordedRun]()
        for each in runs[:_COUNTED]:
            row = self._row_of(each)
            if row is not None and self._rows[each.run_id].summary.state is each.state:
                rows.append(row)
            else:
                unread.append(each)
        rows += await self.rows(unread[:_READ_A_PAGE])
        rows.sort(key=lambda row: row.created_at, reverse=True)
        return rows, len(runs), len(unread) <= _READ_A_PAGE

    def forks_of(self, run_id: str, may_see: Callable[[RecordedRun], bool]) -> list[str]:
        """Return the known forks that the caller may see: those with a cached row."""
        return [
            name
            for name, each in self._rows.items()
            if each.row is not None and each.row.origin_run == run_id and may_see(each.summary)
        ]

    def _is_known(self, summary: RecordedRun) -> bool:
        """Whether the cached row is final."""
        known = self._rows.get(summary.run_id)
        return (
            known is not None
            and known.row is not None
            and not known.is_damaged
            and summary.state.is_final
            and known.row.status == wire_status(summary.state)
        )


def _around(runs: Sequence[RecordedRun], run: RecordedRun, count: int) -> slice:
    """Return the positions of `count` runs around one, in a list with the oldest first."""
    ids = [each.run_id for each in runs]
    position = ids.index(run.run_id) if run.run_id in ids else len(ids)
    end = min(len(runs), position + count // 2)
    return slice(max(0, end - count), end)


def _has(words: Sequence[str], *texts: str) -> bool:
    text = " ".join(texts).casefold()
    return all(word in text for word in words)


def _group_keys(row: RunRow, group: GroupKey) -> Sequence[str]:
    match group:
        case "team":
            return (row.ensemble,)
        case "tag":
            return [f"{name}:{value}" if value else name for name, value in row.tags.items()] or ("",)
        case "error":
            return (_PARTICULARS.sub("…", row.failure),)


def _place_of(cursor: str, sort: SortKey) -> _Place:
    try:
        found: object = json.loads(cursor)
    except ValueError:
        found = None
    match found:
        case [str(name), [int() | float() as number, str(text)], int() | float() as at, str(run_id)] if name == sort:
            return _Place((number, text), at, run_id)
        case [str(name), None, int() | float() as at, str(run_id)] if name == sort:
            return _Place(None, at, run_id)
        case _:
            raise StudioRefusal(
                HTTPStatus.BAD_REQUEST,
                "INVALID_CURSOR",
                "Invalid cursor. Pass the next_cursor of a page with this order",
            )


_KEPT_RUNS = 16  # views in the cache. Followed views stay: a new view folds the whole record.
_FOLLOWED_S = 10.0  # a view without requests for so long is not followed


class CachedRun(Struct, kw_only=True):
    view: RunView
    summary: RecordedRun
    problem: str | None = None  # why its record cannot be read to the end


class _Kept(Struct):
    created_at: datetime
    view: RunView
    asked_at: float
    problem: str | None = None
    lock: asyncio.Lock = msgspec.field(default_factory=asyncio.Lock)


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
        while len(self._kept) > _KEPT_RUNS:  # views without followers go, the least recently used first
            oldest_id, oldest = next(iter(self._kept.items()))
            if self._clock() - oldest.asked_at < _FOLLOWED_S:
                break
            del self._kept[oldest_id]
        async with kept.lock:
            await self._catch_up(kept)
            kept.view.settle(summary)
        return CachedRun(view=kept.view, summary=summary, problem=kept.problem)

    def evict(self, run_id: str) -> None:
        self._kept.pop(run_id, None)

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


def fork_obstacle(seen: CachedRun) -> str | None:
    """Return why a run cannot be forked here, whatever the step."""
    head = seen.view.totals.head
    if head.is_dynamic or head.header.is_empty:
        return f"Run '{seen.summary.run_id}' has no plan to fork from"
    if seen.summary.state.is_active:
        return f"Run '{seen.summary.run_id}' is running: wait for its end"
    return None if head.source.place else OF_PROGRAM.format("fork")


def offers_of(seen: CachedRun) -> list[schemas.Action]:
    """Return the actions on a run that would not be refused."""
    found: list[schemas.Action] = []
    if not seen.view.totals.state(seen.summary).is_final:
        found.append("cancel")
    if seen.view.totals.resume_obstacle(seen.summary) is None:
        found.append("resume")
    if fork_obstacle(seen) is None:
        found.append("fork")
    return found


def value_reader(visitor: Visitor) -> ValueReader:
    return ValueReader(name=visitor.name, is_admin=visitor.sees_cluster, roles=visitor.roles)


class RunDelta(Struct, frozen=True, kw_only=True):
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
        self._results: dict[str, tuple[datetime, EvaluationResult]] = {}  # by run, with its creation

    async def runs(self, search: RunSearch, visitor: Visitor, *, cursor: str, limit: int) -> schemas.RunList:
        return await self._listing.page(search, visitor.may_see, cursor=cursor, limit=limit)

    async def rows_of(self, run_ids: Iterable[str], visitor: Visitor) -> dict[str, RunRow]:
        """Return the rows of those runs that the visitor may see, by id."""
        wanted = frozenset(run_ids)
        found = [each for each in await self._listing.summaries() if each.run_id in wanted and visitor.may_see(each)]
        return {row.run_id: row for row in await self._listing.rows(found)}

    def evict(self, run_id: str) -> None:
        """Forget a run that was deleted."""
        self._listing.evict(run_id)
        self._views.evict(run_id)

    async def run(self, run_id: str, visitor: Visitor) -> schemas.RunDetailSchema:
        return await self._detail(await self._see(run_id, visitor), visitor)

    async def reveal(self, run_id: str, visitor: Visitor) -> schemas.RevealedValues:
        """Return the values of a run's placeholders, which are not cached."""
        await self.check_visible(run_id, visitor)
        try:
            redaction = await reveal_to(value_reader(visitor), self._store, run_id)
        except RevealRefusedError as error:
            raise StudioRefusal(HTTPStatus.FORBIDDEN, "FORBIDDEN", str(error)) from None
        except ValidationError as error:
            raise StudioRefusal(HTTPStatus.CONFLICT, "NOT_REVEALABLE", message_of(error)) from None
        return schemas.RevealedValues(values=dict(redaction.values))

    async def series(self, run_id: str, visitor: Visitor) -> schemas.RunSeries:
        summary = await self.check_visible(run_id, visitor)
        return await self._listing.series(summary, visitor.may_see, is_of_one=self._is_of_one)

    async def trends(self, visitor: Visitor, *, days: int, offset_min: int, ensemble: str) -> schemas.Trends:
        period = TrendPeriod(days=days, now=round(time.time() * 1000), offset_min=offset_min)
        rows, total, is_complete = await self._listing.rows_since(period.since / 1000, visitor.may_see)
        teams = await threads.run(lambda: trends_of(rows, period, ensemble=ensemble))
        return schemas.Trends(
            first_day=date_of(period.last - days + 1),
            last_day=date_of(period.last),
            teams=teams[:MOST_TEAMS],
            more_teams=max(0, len(teams) - MOST_TEAMS),
            runs=total,
            counted=len(rows),
            is_complete=is_complete,
        )

    async def evaluations(self, visitor: Visitor) -> schemas.Evaluations:
        rows, _, is_complete = await self._listing.rows_since(0.0, visitor.may_see)
        found = group_runs(rows)
        shown = [evaluation_row(each, await self._result(each.id, visitor)) for each in found[:MOST_EVALUATIONS]]
        return schemas.Evaluations(
            evaluations=shown, more=max(0, len(found) - MOST_EVALUATIONS), is_complete=is_complete
        )

    async def evaluation(self, name: str, visitor: Visitor, *, compare: str) -> schemas.EvaluationDetail:
        """Return one evaluation, and its comparison with another one, if it is named."""
        results = [await self._result(each, visitor) for each in (name, *([compare] if compare else []))]
        for each, result in zip((name, compare), results, strict=False):
            if result is None:
                raise not_found("evaluation", each)
        first, *others = [each for each in results if each is not None]
        return await threads.run(evaluation_detail, first, others[0] if others else None)

    async def _result(self, evaluation: str, visitor: Visitor) -> EvaluationResult | None:
        """Return the stored result of an evaluation, if the visitor may see it; results do not change."""
        run_id = results_run_id(evaluation)
        run = await self._store.summary(run_id)
        if run is None or run.state is not RunState.COMPLETED or not visitor.may_see(run):
            return None
        kept = self._results.get(run_id)
        if kept is None or kept[0] != run.created_at:
            try:
                found = EvaluationResult.from_json(await read_output(self._store, run_id))
            except (RecordError, ValidationError):  # the page of its run says what is wrong
                return None
            kept = self._results[run_id] = (run.created_at, found)
            while len(self._results) > MOST_EVALUATIONS:
                del self._results[next(iter(self._results))]
        return kept[1]

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
        run = await self._detail(seen, visitor, has_texts=False)
        changes = schemas.LiveSteps(steps=steps, run=run, cursor=view.cursor)
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

    async def attachment(self, run_id: str, digest: str, visitor: Visitor) -> bytes:
        """Return the content of an attachment by its SHA-256."""
        await self.check_visible(run_id, visitor)
        content = await self._store.read_content(run_id, digest)
        if content is None or await threads.run(lambda: sha256(content).hexdigest()) != digest:
            raise not_found("attachment", digest)
        return content

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
            row, is_owned = await self._listing.row(run), bool(run.owner)
            found += [
                review_of(
                    each,
                    ensemble=row.ensemble,
                    subject=row.subject,
                    at=now,
                    is_owned=is_owned,
                    can_decide=self._can_decide,
                )
                for each in waiting
            ]
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

    async def _detail(self, seen: CachedRun, visitor: Visitor, *, has_texts: bool = True) -> schemas.RunDetailSchema:
        summary, problem, failure, next_step = seen.summary, seen.problem, None, None
        if not seen.view.totals.state(summary).is_active:
            is_partial = problem is not None
            try:
                failure = await read_failure(self._store, summary, is_partial=is_partial)
                step = None if failure else await read_next_step(self._store, summary, is_partial=is_partial)
                next_step = failure.next if failure else step
            except RecordError as error:  # the rest of the run is shown
                problem = problem or message_of(error)
        detail = seen.view.detail(
            summary,
            at=time.time(),
            can_decide=self._can_decide,
            forks=self._listing.forks_of(summary.run_id, visitor.may_see),
            problem=problem,
            failure=failure,
            next_step=next_step,
            offers=offers_of(seen),
            has_texts=has_texts,
        )
        can_reveal = may_reveal(seen.view.totals.head.header.redaction, value_reader(visitor))
        return detail.model_copy(update={"reviews": self._mark(detail.reviews), "can_reveal": can_reveal})
