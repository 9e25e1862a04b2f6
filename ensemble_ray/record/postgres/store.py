"""PostgresStore: the runs in a PostgreSQL database. Adapter of `RunStore`.

In: the URL of a database. Out: runs that this process owns or writes to, and what is known of all. Connections of a
process: one that writes, while any journal is open; one for each run that it owns; one for a moment to read.
Never: a pooler that hands out sessions by transactions between us and the server; owning a run is a session's lock.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Collection, Sequence

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reviews import ReviewDecided
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.ports import Persistence
from ensemble_ray.record.naming import chosen_id
from ensemble_ray.record.open_reviews import Gate, Obstacle
from ensemble_ray.record.postgres.database import Database
from ensemble_ray.record.postgres.gates import gates_in, read_gates, record_decision
from ensemble_ray.record.postgres.journal import (
    PostgresJournal,
    check_whole,
    last_seq,
    missing_facts,
    read_facts,
    read_page,
)
from ensemble_ray.record.postgres.owner import Claim, OwnedPostgresRun, ask_cancel, claim_new, claim_recorded, remove
from ensemble_ray.record.postgres.runs import read_runs
from ensemble_ray.record.postgres.writer import PostgresWriter
from ensemble_ray.record.runs import check_run_id
from ensemble_ray.record.stores import PAGE, GatesOfRun, OwnedRun, RecordedRun, pages
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.outputs import RunState

#: How long a server that cannot be reached is waited for in the middle of a run, s.
PATIENCE_S = 10.0
#: Writers by event loop and database: journals of one process share one, whichever store opened them.
_writers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, PostgresWriter]] = weakref.WeakKeyDictionary()


class PostgresStore:
    """All runs of one database."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        """Name the database; nothing is connected.

        Args:
            url: `postgresql://USER:PASSWORD@HOST:PORT/DATABASE`; everything that libpq knows may stand in it.
            patience_s: How long a server that cannot be reached is waited for in the middle of a run.

        Raises:
            ValidationError: the extra is not installed, or the URL cannot be read.
        """
        self._url = url
        self._database = Database(url, patience_s=patience_s)

    async def begin(self, run_id: str, *, origin: str = "", is_buffered: bool = False) -> OwnedRun:
        """Begin the record of a new run as its owner. What a run of that id left that recorded nothing is taken over.

        Raises:
            RunExistsError: there is a run of that id; the message says how it stands.
            RecordError: the database cannot be used.
            ValidationError: the id cannot name a record.
        """
        check_run_id(run_id)
        with self._database.translated_errors():
            claim = await claim_new(self._database, run_id, origin)
        return OwnedPostgresRun(claim, self._journal(claim, is_buffered=is_buffered))

    async def claim(self, run_id: str, *, is_buffered: bool = False, by_force: bool = False) -> OwnedRun:
        """Own a recorded run, under an epoch above all earlier ones (S-DUR-16).

        Raises:
            RunExistsError: somebody owns it; the message names the process.
            RecordError: the record is damaged, or the database cannot be used.
            ValidationError: there is no such run.
        """
        check_run_id(run_id)
        with self._database.translated_errors():
            claim = await claim_recorded(self._database, run_id, by_force=by_force)
        return OwnedPostgresRun(claim, self._journal(claim, is_buffered=is_buffered))

    async def accept_loss(self, run_id: str, *, by_force: bool = False) -> bool:
        """Go on without what a record has lost: it is recorded that it is lost. False: nothing is.

        Raises:
            RunExistsError: somebody owns it.
            RecordError: what is left cannot be read, or the database cannot be used.
            ValidationError: there is no such run.
        """
        async with self._database.reading() as connection:
            last, gap = (0, 0) if connection is None else await missing_facts(connection, run_id)
        if not gap:
            return False
        owned = await self.claim(run_id, by_force=by_force)
        reason = f"{gap} of the facts up to {last} are missing in {self._database.location}"
        data = LossAccepted(last=last, expected=last, gap=gap, texts=0, has_effect=True, reason=reason)
        lost = Fact(run=run_id, name=RUN, at=time.time(), data=data, epoch=owned.epoch)
        try:
            await owned.journal.append((lost,), epoch=owned.epoch, until=Persistence.COMMITTED)
        finally:
            await owned.close(RunState.INTERRUPTED)
        return True

    async def join(self, run_id: str, *, writer: str, is_buffered: bool = False) -> PostgresJournal:  # noqa: ARG002  all writers of a process are one here
        """Write to a run that another process owns.

        Raises:
            RecordError: there is no such run, or the database cannot be used.
            ValidationError: the id cannot name a record.
        """
        check_run_id(run_id)
        database, own_writer = self._database, self._writer()
        target = await own_writer.join(run_id)
        if target is None:
            msg = (
                f"Cannot write the run's record: there is no run '{run_id}' in {database.location}. "
                "Is ENSEMBLE_RAY_STORE the same in all processes?"
            )
            raise RecordError(msg, database.location)
        return PostgresJournal(own_writer, target, is_buffered=is_buffered, location=database.location)

    async def facts(self, run_id: str, *, is_partial: bool = False) -> list[Fact]:
        """All committed facts in order, numbered from 1; none when there is no such run.

        Raises:
            RecordError: the record is damaged, of a newer format, or the database cannot be used.
        """
        async with self._database.reading() as connection:
            if connection is None:
                return []
            if not is_partial:
                await check_whole(connection, run_id, self._database.location)
            return await read_facts(connection, run_id, self._database.location)

    def read(
        self,
        run_id: str,
        *,
        after: int = 0,
        kinds: Collection[str] | None = None,
        has_data: bool = True,
        is_partial: bool = False,
    ) -> AsyncGenerator[Sequence[Fact]]:
        """Return the facts that are committed when reading begins, in order, page by page.

        Raises:
            RecordError: the record is damaged, of a newer format, was removed meanwhile, or the database cannot be used.
        """
        database = self._database

        async def last() -> int:
            async with database.reading() as connection:
                if connection is None:
                    return 0
                if not is_partial:
                    await check_whole(connection, run_id, database.location)
                return await last_seq(connection, run_id, kinds)

        # A transaction for each page: how long its reader takes for one must hold nothing open on the server.
        async def page(position: int) -> Sequence[Fact]:
            async with database.reading() as connection:
                if connection is None:
                    return []
                return await read_page(
                    connection, run_id, database.location, after=position, size=PAGE, kinds=kinds, has_data=has_data
                )

        return pages(last, page, run_id, after=after)

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        """Return what is recorded of one instance, in order, stimuli left out.

        Raises:
            RecordError: the record is damaged, of a newer format, or the database cannot be used.
        """
        async with self._database.reading() as connection:
            if connection is None:
                return []
            return await read_facts(connection, run_id, self._database.location, instance=instance)

    async def summary(self, run_id: str) -> RecordedRun | None:
        """Return the run as lists show it; None when there is none.

        Raises:
            RecordError: the database cannot be used.
        """
        async with self._database.reading() as connection:
            found = [] if connection is None else await read_runs(connection, self._database.location, run_id)
        return found[0] if found else None

    async def runs(self) -> list[RecordedRun]:
        """All runs, newest first.

        Raises:
            RecordError: the database cannot be used.
        """
        async with self._database.reading() as connection:
            return [] if connection is None else await read_runs(connection, self._database.location)

    async def find(self, text: str) -> RecordedRun:
        """Return the run of that id, the only one whose id begins so, or the newest for `latest`.

        Raises:
            ValidationError: there is none, or several; the message names the nearest.
            RecordError: the database cannot be used.
        """
        runs = {run.run_id: run for run in await self.runs()}  # newest first
        return runs[chosen_id(text, list(runs), lambda: list(runs), self._database.location)]

    async def ask_cancel(self, run_id: str) -> None:
        """Ask the owner of a run to end it.

        Raises:
            ValidationError: there is no such run.
            RecordError: the database cannot be used.
        """
        with self._database.translated_errors():
            await ask_cancel(self._database, run_id)

    async def gates(self) -> list[GatesOfRun]:
        """Return the runs that have not ended and have review gates, oldest first.

        Raises:
            RecordError: the database cannot be used.
        """
        async with self._database.reading() as connection:
            return [] if connection is None else await gates_in(connection, self._database.location)

    async def gates_of(self, run_id: str) -> list[Fact]:
        """Return what is recorded of a run's review gates; nothing when there is no such run.

        Raises:
            RecordError: the record is damaged, or the database cannot be used.
        """
        async with self._database.reading() as connection:
            return [] if connection is None else await read_gates(connection, run_id, self._database.location)

    async def decide(self, run_id: str, gate: str, decision: ReviewDecided) -> tuple[Gate, Obstacle] | None:
        """Record a decision at a gate unless something is in its way, which is returned then; one step for every process.

        Raises:
            RecordError: the record is damaged, or the database cannot be used.
            ValidationError: there is no such run.
        """
        check_run_id(run_id)
        with self._database.translated_errors():
            return await record_decision(self._database, run_id, gate, decision)

    async def delete(self, run_id: str) -> None:
        """Remove a run's record.

        Raises:
            RunExistsError: somebody owns it.
            ValidationError: there is no such run.
            RecordError: the database cannot be used.
        """
        with self._database.translated_errors():
            await remove(self._database, run_id)

    def _journal(self, claim: Claim, *, is_buffered: bool) -> PostgresJournal:
        writer = self._writer()
        writer.attach(claim.target)
        return PostgresJournal(writer, claim.target, is_buffered=is_buffered, location=self._database.location)

    def _writer(self) -> PostgresWriter:
        writers = _writers.setdefault(asyncio.get_running_loop(), {})
        writer = writers.get(self._url)
        if writer is None or writer.has_failed:  # its journals stay failed; new ones try anew
            writer = writers[self._url] = PostgresWriter(self._database)
        return writer
