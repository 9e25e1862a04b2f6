"""The runs of a store as rows, newest first, page by page. Runs on the library's loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus

from ensemble_ray.definition.run_options import has_tag
from ensemble_ray.errors import RecordError, message_of
from ensemble_ray.record.stores import RecordedRun, RunReader
from ensemble_ray.studio.http_server import StudioRefusal
from ensemble_ray.studio.schemas import RunList, RunRow, RunSeries
from ensemble_ray.studio.views.run_view import TOTAL_KINDS, RunTotals
from ensemble_ray.studio.views.steps import wire_status

MOST_ROWS, _USUAL_ROWS = 200, 50  # rows of one page: the most, and the default
_READ_A_PAGE = 200  # a page of a search reads so many records
_READERS = 8
_LASTING_S = 1.0
_SERIES = 40
_ASKED_FOR_NAMES = 400  # runs whose records are read for the name of their team
_KEPT = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSearch:
    """A filter of runs. An empty field matches every run."""

    text: str = ""  # words in the id and the team, else in the summary
    statuses: frozenset[str] = frozenset()
    ensemble: str = ""  # part of the name of the team
    tag: str = ""  # `name` or `name:value`
    since: float = 0.0  # Unix time, s


@dataclass(slots=True)
class _Row:
    created_at: float
    summary: RecordedRun
    totals: RunTotals = field(default_factory=RunTotals)
    row: RunRow | None = None
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)  # concurrent requests fold a long record once


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
        """Return the next rows after a cursor.

        The words are searched in ids and teams first. If no run matches, the search reads records, up to a limit per page.
        """
        summaries = [each for each in await self.summaries() if may_see(each)]
        after = _position_of(cursor) if cursor else None
        left = [each for each in summaries if after is None or _position(each) < after]
        left = [each for each in left if each.created_at.timestamp() >= search.since]
        left = [each for each in left if not search.statuses or wire_status(each.state) in search.statuses]
        limit = max(1, min(limit, MOST_ROWS))
        words = search.text.casefold().split()
        named = [each for each in left if _has(words, each.run_id, each.origin)]
        if named and not search.tag and not search.ensemble:
            return _page(await self.rows(named[:limit]), named[:limit], len(named) > limit, len(summaries))
        # Tags and team names are only in the records.
        return await self._find(() if named else words, search, named or left, limit, len(summaries))

    async def _find(
        self, words: Sequence[str], search: RunSearch, left: Sequence[RecordedRun], limit: int, total: int
    ) -> RunList:
        """Return the next rows with these words, and the tag and team of the search."""
        team = search.ensemble.casefold()
        found: list[RunRow] = []
        read = position = 0
        while position < len(left) and len(found) < limit and read < _READ_A_PAGE:
            some = left[position : position + _READERS * 4]
            read += sum(not self._is_known(each) for each in some)
            for summary, row in zip(some, await self.rows(some), strict=True):
                position += 1
                is_tagged = not search.tag or has_tag(row.tags, search.tag, separator=":")
                is_of_team = team in row.ensemble.casefold()
                if is_tagged and is_of_team and _has(words, row.run_id, summary.origin, row.ensemble, row.summary):
                    found.append(row)
                    if len(found) == limit:
                        break
        return _page(found, left[:position], position < len(left), total)

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
        """If the record cannot be read, the summary of the row contains the error."""
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
            try:
                pages = self._store.read(summary.run_id, after=known.totals.cursor, kinds=TOTAL_KINDS)
                async with aclosing(pages):
                    async for page in pages:
                        for fact in page:
                            known.totals.apply(fact)
            except RecordError as error:
                return known.totals.row(summary).model_copy(update={"summary": message_of(error)})
        row = known.totals.row(summary)
        known.row = row
        return row

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


def _page(rows: list[RunRow], seen: Sequence[RecordedRun], has_more: bool, total: int) -> RunList:  # noqa: FBT001  private
    at, run_id = _position(seen[-1]) if seen else (0.0, "")
    return RunList(runs=rows, next_cursor=f"{at!r}:{run_id}" if has_more and seen else None, total_known=total)


def _position(summary: RecordedRun) -> tuple[float, str]:
    return summary.created_at.timestamp(), summary.run_id


def _position_of(cursor: str) -> tuple[float, str]:
    at, _, run_id = cursor.partition(":")
    try:
        return float(at), run_id
    except ValueError:
        raise StudioRefusal(
            HTTPStatus.BAD_REQUEST, "INVALID_CURSOR", "Invalid cursor. Pass the next_cursor of a page of runs"
        ) from None
