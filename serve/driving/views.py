"""DrivenRunViews: how the runs of an endpoint stand, for clients that look at them.

In: what is at work in this process, what the ledger keeps, what records tell. Out: a run, a page of runs, its end. Must never happen: a
run that is told as interrupted because it was accepted, or ended, between two looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from http import HTTPStatus
from typing import TYPE_CHECKING

from ensemble_ray.process.forks import threads
from ensemble_ray.serve.driving.details import detail_of, summary_of
from ensemble_ray.serve.driving.outcomes import open_reviews, status_of_state
from ensemble_ray.serve.refusals import Refusal
from ensemble_ray.serve.run_schemas import RunDetail, RunFilter, RunPage, RunStatus
from ensemble_ray.serve.run_service import LARGEST_PAGE

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.serve.driving.active import ActiveRun
    from ensemble_ray.serve.driving.ledger import LedgerEntry
    from ensemble_ray.serve.driving.run_ledger import RunLedger

#: How often a run that somebody waits for is looked at, whether it waits for a person, s.
_LOOK_S = 1.0


class DrivenRunViews:
    """The runs of one process as clients see them."""

    def __init__(self, ledger: RunLedger, active: Mapping[str, ActiveRun], store: Callable[[], RunStore]) -> None:
        """Make it.

        Args:
            ledger: What was accepted.
            active: Runs that are not over, from before they are in the ledger until their outcome is there.
            store: Returns the store of their records.
        """
        self._ledger = ledger
        self._active = active
        self._store = store

    async def entry(self, run_id: str) -> LedgerEntry:
        """Return a run as it was accepted, with its outcome when it has ended.

        Raises:
            Refusal: there is no such run.
        """
        active = self._active.get(run_id)
        if active is not None and active.is_kept:
            return active.entry
        found = await threads.run(self._ledger.find, run_id)
        if found is None:
            raise Refusal(
                HTTPStatus.NOT_FOUND, "RUN_NOT_FOUND", f"There is no run '{run_id[:200]}'", run_id=run_id[:200]
            )
        return found

    async def detail(self, run_id: str) -> RunDetail:
        """Return a run as it stands.

        Raises:
            Refusal: there is no such run.
        """
        active = self._active.get(run_id)
        entry = await self.entry(run_id)
        ended = entry.outcome if active is None else active.ended
        if ended is not None:
            return ended
        active = self._active.get(run_id)
        if active is None:
            return detail_of(entry, status=RunStatus.INTERRUPTED)
        if not active.has_begun:
            return detail_of(entry, status=RunStatus.ACCEPTED)
        summary = await self._store().summary(run_id)
        status = RunStatus.RUNNING if summary is None else status_of_state(summary.state)
        if status is not RunStatus.WAITING:
            status = RunStatus.RUNNING  # its end is not kept yet
        return detail_of(entry, status=status, reviews=await open_reviews(self._store(), run_id))

    async def wait(self, run_id: str, timeout_s: float) -> RunDetail:
        """Return a run when it ended, waits for a person, or the time is up.

        Raises:
            Refusal: there is no such run.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while (active := self._active.get(run_id)) is not None and (left := deadline - loop.time()) > 0:
            try:
                async with asyncio.timeout(min(left, _LOOK_S)):
                    await active.done.wait()
            except TimeoutError:
                if active.is_aside and (found := await self.detail(run_id)).status is RunStatus.WAITING:
                    return found
            else:
                if active.ended is not None:
                    return active.ended
        return await self.detail(run_id)

    async def page(self, wanted: RunFilter, cursor: str | None, size: int) -> RunPage:
        """Return runs, newest first.

        Raises:
            Refusal: the cursor is none that a page gave.
        """
        if cursor is not None and not (cursor.isascii() and cursor.isdecimal() and len(cursor) <= 18):  # noqa: PLR2004  as SQLite counts
            raise Refusal(HTTPStatus.BAD_REQUEST, "INVALID_CURSOR", "The cursor is none that a list gave")
        size = min(size, LARGEST_PAGE)
        before = None if cursor is None else int(cursor)
        there = set(self._active)  # before the look: one that ends meanwhile has its outcome at the next one
        entries = await self._entries(wanted, before, size + 1)
        shown = [await self._read_again(each, there) for each in entries[:size]]
        more = str(shown[-1].seq) if len(entries) > size else None
        return RunPage(
            runs=[summary_of(each, is_active=each.run_id in self._active) for each in shown], next_cursor=more
        )

    async def _entries(self, wanted: RunFilter, before: int | None, size: int) -> Sequence[LedgerEntry]:
        """Return entries, newest first; a run whose end the ledger does not have yet is one that ended."""
        if wanted.status is None or all(active.ended is None for active in self._active.values()):
            entries = await threads.run(self._ledger.page, wanted, before=before, size=size)
            return [self._with_end(each) for each in entries]
        found: list[LedgerEntry] = []
        all_states = wanted.model_copy(update={"status": None})
        while len(found) < size:
            some = await threads.run(self._ledger.page, all_states, before=before, size=LARGEST_PAGE)
            found += [each for each in map(self._with_end, some) if each.status is wanted.status]
            if len(some) < LARGEST_PAGE:
                break
            before = some[-1].seq
        return found[:size]

    def _with_end(self, entry: LedgerEntry) -> LedgerEntry:
        active = self._active.get(entry.run_id)
        if active is None or active.ended is None:
            return entry
        return replace(entry, status=active.ended.status, ended_at=active.ended.ended_at, outcome=active.ended)

    async def _read_again(self, entry: LedgerEntry, there: set[str]) -> LedgerEntry:
        """Return an entry with the outcome that came since it was read."""
        if entry.status.is_final or entry.run_id in self._active or entry.run_id not in there:
            return entry
        return await threads.run(self._ledger.find, entry.run_id) or entry
