"""Who owns a run in PostgreSQL.

In: a run's id. Out: a lock that the server lets go when the owner's connection ends, as it does with its process.
The lock's key holds the run's epoch: whoever takes a run by force raises the epoch and locks another key, so a frozen
owner is in nobody's way; what it writes when it wakes has an older epoch and is refused.
Never: a process id that decides; it is for messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from typing import TYPE_CHECKING
from uuid import UUID, uuid4

from ensemble_ray.errors import RunExistsError
from ensemble_ray.process.forks import after_fork
from ensemble_ray.record.naming import describe_conflict
from ensemble_ray.record.postgres.group import BegunRun
from ensemble_ray.record.postgres.journal import PostgresJournal
from ensemble_ray.record.postgres.runs import HELD, read_runs, unknown_run
from ensemble_ray.values.ids import OWNER_STEP
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.record.postgres.connection import Connection
    from ensemble_ray.record.postgres.database import Database

_LOCK = """
SELECT pg_try_advisory_lock(hashtextextended(r.run_id || ':' || r.begun || ':' || r.epoch, 0)) FROM ensemble_ray.runs r
WHERE r.run_id = %(run)s AND r.begun = %(begun)s AND r.epoch = %(epoch)s
"""
#: The run, unless somebody else took it or began it anew.
_OF_OWNER = "WHERE run_id = %(run)s AND begun = %(begun)s AND epoch = %(epoch)s"
_NEW = """
INSERT INTO ensemble_ray.runs (run_id, begun, created_at, origin, state, owner)
VALUES (%(run)s, %(begun)s, now(), %(origin)s, 'pending', %(owner)s) ON CONFLICT DO NOTHING RETURNING run_id
"""
_FOUND = """
SELECT r.begun, EXISTS (SELECT FROM ensemble_ray.facts f WHERE f.run_id = r.run_id),
    greatest(r.epoch, (SELECT max(e.epoch) FROM ensemble_ray.epochs e WHERE e.run_id = r.run_id))
FROM ensemble_ray.runs r WHERE r.run_id = %(run)s FOR UPDATE
"""
_OWNED = f"""
WITH {HELD}
SELECT r.owner FROM ensemble_ray.runs r JOIN held ON held.key = hashtextextended(r.run_id || ':' || r.begun || ':' || r.epoch, 0)
WHERE r.run_id = %(run)s
"""  # noqa: S608  our own constants
_CLAIM = """
UPDATE ensemble_ray.runs SET epoch = %(epoch)s, owner = %(owner)s, state = 'pending', cancel_asked = false
WHERE run_id = %(run)s
"""
#: Backends that have held the runs' rows for seconds: those of frozen processes. Each can be ended at any time: its
#: process connects again and repeats what was under way.
_END_FROZEN = """
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.xact_start < now() - interval '1 s'
    AND EXISTS (
        SELECT FROM pg_locks l
        WHERE l.pid = a.pid AND l.relation = 'ensemble_ray.runs'::regclass AND l.mode <> 'AccessShareLock' AND l.granted
    )
"""


class Claim:
    """The lock that makes this process the owner of a run, on a connection of its own."""

    def __init__(self, database: Database, connection: Connection, target: BegunRun, epoch: int) -> None:
        self.target = target
        self.epoch = epoch
        self._values = {"run": target[0], "begun": target[1], "epoch": epoch}
        self._database = database
        self._connection: Connection | None = connection
        self._using = asyncio.Lock()
        _held.add(self)

    async def write_state(self, state: RunState) -> None:
        """Say how the run stands; when somebody else took it, that is for its new owner to say.

        Raises:
            RecordError: it cannot be written.
        """

        async def once() -> None:
            async with self._using:
                connection = await self._connect()
                await connection.execute(
                    f"UPDATE ensemble_ray.runs SET state = %(state)s {_OF_OWNER}",  # noqa: S608  our own constant
                    {**self._values, "state": state.value},
                )

        await self._database.patiently(once)

    async def is_cancel_asked(self) -> bool:
        """Whether somebody asked for the run's end; a database that cannot be reached now has not asked."""
        if self._using.locked():
            return False
        with contextlib.suppress(Exception):  # whoever writes next will tell; only a lost claim is made again here
            async with self._using, asyncio.timeout(self._database.patience_s):
                connection = await self._connect()
                cursor = await connection.execute(
                    f"SELECT cancel_asked FROM ensemble_ray.runs {_OF_OWNER}",  # noqa: S608  our own constant
                    self._values,
                )
                row = await cursor.fetchone()
                return row is not None and bool(row[0])
        return False

    async def release(self) -> None:
        """Own the run no more; whoever asks when this has returned finds it free."""
        _held.discard(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # broken already: the server let go by itself
                try:
                    # A busy server gets to the end of a connection later than whoever takes the run next comes.
                    async with asyncio.timeout(self._database.patience_s):
                        await connection.execute("SELECT pg_advisory_unlock_all()")
                finally:
                    await connection.close()

    def forget(self) -> None:
        """In a forked child: keep nothing open that would hold the parent's lock when the parent is dead."""
        if self._connection is not None and not self._connection.closed:
            with contextlib.suppress(OSError):
                os.close(self._connection.fileno())

    async def _connect(self) -> Connection:
        """Return the connection; a broken one is made again, and the lock taken again unless a newer owner came."""
        if self._connection is None or self._connection.closed:
            self._connection = await self._database.connect()
            await self._connection.execute(_LOCK, self._values)
        return self._connection


class OwnedPostgresRun:
    """A run that this process owns; fulfils `OwnedRun`."""

    def __init__(self, claim: Claim, journal: PostgresJournal) -> None:
        self._claim = claim
        self._journal = journal

    @property
    def journal(self) -> PostgresJournal:
        """Where this process writes its facts."""
        return self._journal

    @property
    def epoch(self) -> int:
        """The epoch that this owner writes under."""
        return self._claim.epoch

    async def write_state(self, state: RunState) -> None:
        """Say how the run stands; after a final state, or `interrupted`, the run has no owner any more.

        Raises:
            RecordError: it cannot be written.
        """
        await self._claim.write_state(state)
        if not state.is_going_on:
            await self._claim.release()

    async def is_cancel_asked(self) -> bool:
        """Whether somebody asked for the run's end since this owner came."""
        return await self._claim.is_cancel_asked()

    async def close(self, state: RunState) -> None:
        """Close the journal and write the state; whatever fails here, the run has no owner any more.

        Raises:
            RecordError: the database refused what was appended, or the state.
        """
        try:
            await self._journal.close()
            await self._claim.write_state(state)
        finally:
            await self._claim.release()


async def claim_new(database: Database, run_id: str, origin: str) -> Claim:
    """Begin a run as its owner; what is left of one that recorded nothing is taken over.

    Raises:
        RunExistsError: there is a run of that id.
        Error: psycopg's.
    """
    connection = await database.connect()
    try:
        begun = await _begin(database, connection, run_id, origin)
    except BaseException:
        await connection.close()
        raise
    return Claim(database, connection, (run_id, begun), 0)


async def claim_recorded(database: Database, run_id: str, *, by_force: bool) -> Claim:
    """Own a recorded run under an epoch above all earlier ones.

    Raises:
        RunExistsError: somebody owns it.
        ValidationError: there is no such run.
        RecordError: its record is damaged.
        Error: psycopg's.
    """
    import psycopg

    connection = await database.connect()
    try:
        try:
            begun, epoch = await _claim(database, connection, run_id, by_force=by_force)
        except psycopg.errors.LockNotAvailable:
            if not by_force:
                raise
            await connection.execute(_END_FROZEN)
            begun, epoch = await _claim(database, connection, run_id, by_force=by_force)
    except BaseException:
        await connection.close()
        raise
    return Claim(database, connection, (run_id, begun), epoch)


def this_process() -> str:
    """Return this process's name, for people."""
    return f"process {os.getpid()} on {socket.gethostname()}"


async def ask_cancel(database: Database, run_id: str) -> None:
    """Ask the owner of a run to end it.

    Raises:
        ValidationError: there is no such run.
        Error: psycopg's.
    """
    async with await database.connect() as connection:
        cursor = await connection.execute(
            "UPDATE ensemble_ray.runs SET cancel_asked = true WHERE run_id = %s", [run_id]
        )
        if not cursor.rowcount:
            raise await unknown_run(connection, run_id, database.location)


async def remove(database: Database, run_id: str) -> None:
    """Remove a run that nobody owns.

    Raises:
        RunExistsError: somebody owns it.
        ValidationError: there is no such run.
        Error: psycopg's.
    """
    async with await database.connect() as connection, connection.transaction():
        await _lock(connection, run_id, database.location, is_free=True)
        await _delete(connection, run_id)


async def _begin(database: Database, connection: Connection, run_id: str, origin: str) -> UUID:
    begun = uuid4()
    values = {"run": run_id, "begun": begun, "origin": origin, "owner": this_process(), "epoch": 0}
    async with connection.transaction():
        cursor = await connection.execute(_NEW, values)
        if await cursor.fetchone() is None:
            _, has_facts, _ = await _lock(connection, run_id, database.location, is_free=True)
            if has_facts:
                (found,) = await read_runs(connection, database.location, run_id)
                raise RunExistsError(describe_conflict(run_id, found.state))
            await _delete(connection, run_id)
            await connection.execute(_NEW, values)
        await connection.execute(_LOCK, values)
    return begun


async def _claim(database: Database, connection: Connection, run_id: str, *, by_force: bool) -> tuple[UUID, int]:
    async with connection.transaction():
        if by_force:
            await connection.execute("SET LOCAL lock_timeout = '2s'")
        begun, _, newest = await _lock(connection, run_id, database.location, is_free=not by_force)
        values = {"run": run_id, "begun": begun, "epoch": newest + OWNER_STEP, "owner": this_process()}
        await connection.execute(_CLAIM, values)
        await connection.execute(
            "DELETE FROM ensemble_ray.epochs WHERE run_id = %s", [run_id]
        )  # all below the run's now
        await connection.execute(_LOCK, values)
    return begun, newest + OWNER_STEP


async def _delete(connection: Connection, run_id: str) -> None:
    for table in ("facts", "bodies", "epochs", "writers", "runs"):
        await connection.execute(f"DELETE FROM ensemble_ray.{table} WHERE run_id = %s", [run_id])  # noqa: S608  our tables


async def _lock(connection: Connection, run_id: str, location: str, *, is_free: bool) -> tuple[UUID, bool, int]:
    """Lock a run's row until the end of the transaction; gives its beginning, whether there are facts, the newest epoch.

    Raises:
        ValidationError: there is no such run.
        RunExistsError: somebody owns it, and it must be free.
    """
    if is_free:
        await _refuse_owned(connection, run_id)  # at once: its owner may have frozen while it holds the row
    cursor = await connection.execute(_FOUND, {"run": run_id})
    row = await cursor.fetchone()
    if row is None:
        raise await unknown_run(connection, run_id, location)
    if is_free:
        await _refuse_owned(connection, run_id)  # again: it must be free while the row is ours
    begun, has_facts, newest = row
    return begun, has_facts, newest


async def _refuse_owned(connection: Connection, run_id: str) -> None:
    owner = await owner_of(connection, run_id)
    if owner is not None:
        msg = f"Run '{run_id}' is running ({owner}): wait for its end, or choose another run_id"
        raise RunExistsError(msg)


async def owner_of(connection: Connection, run_id: str) -> str | None:
    """Return who owns a run now, for people; None: nobody does."""
    row = await (await connection.execute(_OWNED, {"run": run_id})).fetchone()
    return None if row is None else str(row[0])


#: Claims outlive whoever made them: a run is owned until it is let go or the process ends.
_held: set[Claim] = set()


@after_fork
def _forget_all() -> None:
    for claim in list(_held):
        claim.forget()
