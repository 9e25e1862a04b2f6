"""Store runs in a PostgreSQL database. Adapter of `RunStore`.

A process has one connection for writing, one for each run that it owns, and one for the duration of each read. An
owner holds a session lock, so a pooler that assigns sessions per transaction must not be used.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import json
import os
import socket
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from datetime import UTC
from typing import Any, LiteralString, TypeVar
from uuid import UUID, uuid4

from ensemble_ray.errors import RecordError, RunExistsError, ValidationError
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import LossAccepted, ReviewDecided, RunEnded
from ensemble_ray.ports import OfferedAnswer, Persistence
from ensemble_ray.process.concurrency import after_fork
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.open_reviews import END_KINDS, Gate, Obstacle, ends_of_open, fold_gates, obstacle_at
from ensemble_ray.record.postgres import journal as records
from ensemble_ray.record.postgres.database import Connection, Database, create_answers, has_answers
from ensemble_ray.record.postgres.journal import Append, BegunRun, PostgresJournal, PostgresWriter, text_of_name
from ensemble_ray.record.runs import check_run_id, chosen_id, describe_conflict
from ensemble_ray.record.stores import PAGE, GatesOfRun, OwnedRun, RecordedRun, pages
from ensemble_ray.values.ids import OWNER_STEP, RUN
from ensemble_ray.values.outputs import RunState

_log = bounded_logger(__name__)
#: Keys of all owners' locks. Reading `pg_locks` acquires no lock that would disturb other processes.
_HELD = """
held AS MATERIALIZED (
    SELECT l.classid::bigint << 32 | l.objid::bigint AS key FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
        AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
)
"""
_LAST_STATE = """
(
    SELECT f.kind || ' ' || f.data FROM ensemble_ray.facts f
    WHERE f.run_id = r.run_id AND f.instance = 'run' AND f.kind IN ('end', 'resume') ORDER BY f.seq DESC LIMIT 1
)
"""
_RUNS = f"""
WITH {_HELD}
SELECT r.run_id, r.created_at, r.origin, r.state, r.owner,
    hashtextextended(r.run_id || ':' || r.begun || ':' || r.epoch, 0) IN (SELECT key FROM held),
    CASE WHEN r.state NOT IN ('completed', 'failed', 'cancelled') THEN {_LAST_STATE} END
FROM ensemble_ray.runs r
"""  # noqa: S608  our own constants


async def read_runs(connection: Connection, location: str, run_id: str | None = None) -> list[RecordedRun]:
    if run_id is None:
        cursor = await connection.execute(f"{_RUNS} ORDER BY r.created_at DESC, r.run_id DESC")
    else:
        cursor = await connection.execute(f"{_RUNS} WHERE r.run_id = %s", [run_id])
    return [
        RecordedRun(
            run_id=found,
            created_at=created_at.astimezone(UTC),
            origin=origin,
            state=_to_visible(_to_written(state), last_fact, is_owned=is_owned),
            location=location,
            owner=owner if is_owned and not _to_written(state).is_final else "",
        )
        for found, created_at, origin, state, owner, is_owned, last_fact in await cursor.fetchall()
    ]


def _to_written(state: str) -> RunState:
    try:
        return RunState(state)
    except ValueError:
        return RunState.INTERRUPTED


def _to_visible(state: RunState, last_fact: str | None, *, is_owned: bool) -> RunState:
    if state.is_final:
        return state
    if is_owned:
        return RunState.RUNNING if state is RunState.INTERRUPTED else state
    kind, _, data = (last_fact or "").partition(" ")
    if kind == RunEnded.KIND:
        with contextlib.suppress(ValueError, AttributeError):
            return RunEnded.from_data(json.loads(data), 0.0).state or RunState.INTERRUPTED
    return RunState.INTERRUPTED


async def _unknown_run(connection: Connection | None, run_id: str, location: str) -> ValidationError:
    recorded: list[str] = []
    if connection is not None:
        cursor = await connection.execute("SELECT run_id FROM ensemble_ray.runs")
        recorded = [row[0] for row in await cursor.fetchall()]
    near = difflib.get_close_matches(run_id, recorded, n=3, cutoff=0.5)
    shown = f". Nearest: [{', '.join(near)}]" if near else ""
    return ValidationError(f"Unknown run '{run_id}' in {location}{shown}")


_LOCK = """
SELECT pg_try_advisory_lock(hashtextextended(r.run_id || ':' || r.begun || ':' || r.epoch, 0)) FROM ensemble_ray.runs r
WHERE r.run_id = %(run)s AND r.begun = %(begun)s AND r.epoch = %(epoch)s
"""
#: The run, unless another process claimed it or created it again.
_OF_OWNER = "WHERE run_id = %(run)s AND begun = %(begun)s AND epoch = %(epoch)s"
_NEW = """
INSERT INTO ensemble_ray.runs (run_id, begun, created_at, origin, state, owner)
VALUES (%(run)s, %(begun)s, now(), %(origin)s, %(state)s, %(owner)s) ON CONFLICT DO NOTHING RETURNING run_id
"""
_FOUND = """
SELECT r.begun, EXISTS (SELECT FROM ensemble_ray.facts f WHERE f.run_id = r.run_id),
    greatest(r.epoch, (SELECT max(e.epoch) FROM ensemble_ray.epochs e WHERE e.run_id = r.run_id))
FROM ensemble_ray.runs r WHERE r.run_id = %(run)s FOR UPDATE
"""
_OWNED = f"""
WITH {_HELD}
SELECT r.owner FROM ensemble_ray.runs r JOIN held ON held.key = hashtextextended(r.run_id || ':' || r.begun || ':' || r.epoch, 0)
WHERE r.run_id = %(run)s
"""  # noqa: S608  our own constants
_CLAIM = """
UPDATE ensemble_ray.runs SET epoch = %(epoch)s, owner = %(owner)s, state = %(state)s, cancel_asked = false
WHERE run_id = %(run)s
"""
#: Backends of frozen processes, which have locked the runs' rows for over 1 s. Ending one is safe: its process connects
#: again and repeats the operation.
_END_FROZEN = """
SELECT pg_terminate_backend(a.pid) FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.xact_start < now() - interval '1 s'
    AND EXISTS (
        SELECT FROM pg_locks l
        WHERE l.pid = a.pid AND l.relation = 'ensemble_ray.runs'::regclass AND l.mode <> 'AccessShareLock' AND l.granted
    )
"""


class _OwnedRun:
    def __init__(
        self, database: Database, connection: Connection, target: BegunRun, epoch: int, journal: PostgresJournal
    ) -> None:
        self.journal = journal
        self.epoch = epoch
        self._values = {"run": target[0], "begun": target[1], "epoch": epoch}
        self._database = database
        self._connection: Connection | None = connection
        self._using = asyncio.Lock()
        _held.add(self)

    async def write_state(self, state: RunState) -> None:
        """Store the state, unless another process has claimed the run. An inactive state releases it."""

        async def once() -> None:
            async with self._using:
                connection = await self._connect()
                await connection.execute(
                    f"UPDATE ensemble_ray.runs SET state = %(state)s {_OF_OWNER}",  # noqa: S608  our own constant
                    {**self._values, "state": state.value},
                )

        await self._database.patiently(once)
        if not state.is_active:
            await self._release()

    async def is_cancel_asked(self) -> bool:
        """Whether a client requested the cancellation; False if the database cannot be reached now."""
        if self._using.locked():
            return False
        with contextlib.suppress(Exception):  # the next write raises; here a lost claim is only renewed
            async with self._using, asyncio.timeout(self._database.patience_s):
                connection = await self._connect()
                cursor = await connection.execute(
                    f"SELECT cancel_asked FROM ensemble_ray.runs {_OF_OWNER}",  # noqa: S608  our own constant
                    self._values,
                )
                row = await cursor.fetchone()
                return row is not None and bool(row[0])
        return False

    async def close(self, state: RunState) -> None:
        try:
            await self.journal.close()
            await self.write_state(state)
        finally:
            await self._release()

    async def _release(self) -> None:
        """Release ownership. Other processes can claim the run once this returns."""
        _held.discard(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # the server has released the lock
                try:
                    # Unlock explicitly: a busy server may notice the closed connection after the next claim.
                    async with asyncio.timeout(self._database.patience_s):
                        await connection.execute("SELECT pg_advisory_unlock_all()")
                finally:
                    await connection.close()

    def drop(self) -> None:
        """Close the inherited connection in a forked child: it would keep the lock of a dead parent."""
        if self._connection is not None and not self._connection.closed:
            with contextlib.suppress(OSError):
                os.close(self._connection.fileno())

    async def _connect(self) -> Connection:
        """Return the connection. Replace a broken one and lock again, unless a newer owner exists."""
        if self._connection is None or self._connection.closed:
            self._connection = await self._database.connect()
            await self._connection.execute(_LOCK, self._values)
        return self._connection


_held: set[_OwnedRun] = set()  # Strong references: a run is owned until it is released or the process ends.


@after_fork
def _forget_all() -> None:
    for owned in list(_held):
        owned.drop()


async def _begin(connection: Connection, run_id: str, origin: str, location: str, state: RunState) -> UUID:
    begun = uuid4()
    values = {
        "run": run_id,
        "begun": begun,
        "origin": origin,
        "state": state.value,
        "owner": _this_process(),
        "epoch": 0,
    }
    async with connection.transaction():
        cursor = await connection.execute(_NEW, values)
        if await cursor.fetchone() is None:
            _, has_facts, _ = await _lock(connection, run_id, location, is_free=True)
            if has_facts:
                (found,) = await read_runs(connection, location, run_id)
                raise RunExistsError(describe_conflict(run_id, found.state))
            await _delete(connection, run_id)
            await connection.execute(_NEW, values)
        await connection.execute(_LOCK, values)
    return begun


async def _claim(
    connection: Connection, run_id: str, location: str, state: RunState, *, by_force: bool
) -> tuple[UUID, int]:
    async with connection.transaction():
        if by_force:
            await connection.execute("SET LOCAL lock_timeout = '2s'")
        begun, _, newest = await _lock(connection, run_id, location, is_free=not by_force)
        values = {
            "run": run_id,
            "begun": begun,
            "epoch": newest + OWNER_STEP,
            "state": state.value,
            "owner": _this_process(),
        }
        await connection.execute(_CLAIM, values)
        # All epochs of instances are below the run's epoch.
        await connection.execute("DELETE FROM ensemble_ray.epochs WHERE run_id = %s", [run_id])
        await connection.execute(_LOCK, values)
    return begun, newest + OWNER_STEP


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


async def _delete(connection: Connection, run_id: str) -> None:
    for table in ("facts", "bodies", "epochs", "writers", "runs"):
        await connection.execute(f"DELETE FROM ensemble_ray.{table} WHERE run_id = %s", [run_id])  # noqa: S608  our tables


async def _lock(connection: Connection, run_id: str, location: str, *, is_free: bool) -> tuple[UUID, bool, int]:
    """Return the run's creation id, whether it has facts, and its newest epoch. Its row is locked for the transaction."""
    if is_free:
        # Before waiting for the row: its owner may have frozen with the row locked.
        await _refuse_owned(connection, run_id)
    cursor = await connection.execute(_FOUND, {"run": run_id})
    row = await cursor.fetchone()
    if row is None:
        raise await _unknown_run(connection, run_id, location)
    if is_free:
        await _refuse_owned(connection, run_id)  # the run must have no owner while this process has the row
    begun, has_facts, newest = row
    return begun, has_facts, newest


async def _refuse_owned(connection: Connection, run_id: str) -> None:
    owner = await _owner_of(connection, run_id)
    if owner is not None:
        raise RunExistsError(f"Run '{run_id}' is running ({owner}): wait for its end, or choose another run_id")


async def _owner_of(connection: Connection, run_id: str) -> str | None:
    row = await (await connection.execute(_OWNED, {"run": run_id})).fetchone()
    return None if row is None else str(row[0])


#: Same condition as in the index of gates, so that the server uses the index.
_GATES = """
SELECT seq, kind, name, at, epoch, data FROM ensemble_ray.facts
WHERE run_id = %s AND kind IN ('review', 'review_decision') ORDER BY seq
"""
_RUNS_WITH_GATES = """
SELECT r.run_id FROM ensemble_ray.runs r
WHERE r.state NOT IN ('completed', 'failed', 'cancelled', 'budget_exhausted') AND EXISTS (
    SELECT FROM ensemble_ray.facts f WHERE f.run_id = r.run_id AND f.kind IN ('review', 'review_decision')
) ORDER BY r.created_at, r.run_id
"""
_ENDS = """
SELECT f.seq, f.kind, f.name, f.at, f.epoch, '{}' FROM ensemble_ray.facts f
JOIN unnest(%(instances)s::text[], %(names)s::text[]) AS e (instance, name) ON f.instance = e.instance AND f.name = e.name
WHERE f.run_id = %(run)s AND f.kind = ANY(%(kinds)s)
"""
_RUN = "SELECT begun, epoch FROM ensemble_ray.runs WHERE run_id = %s FOR NO KEY UPDATE"
_EPOCH = "SELECT max(epoch) FROM ensemble_ray.epochs WHERE run_id = %s AND instance = %s"
_NAMED = """
SELECT seq, kind, name, at, epoch, data FROM ensemble_ray.facts
WHERE run_id = %s AND instance = %s AND name = %s ORDER BY seq
"""


async def _read_gates(connection: Connection, run_id: str, location: str) -> list[Fact]:
    found = await records.with_bodies(connection, run_id, location, await _rows(connection, _GATES, [run_id]))
    ends = ends_of_open(found)
    if not ends:
        return found
    values = {
        "run": run_id,
        "instances": [text_of_name(instance) for instance, _ in ends],
        "names": [text_of_name(name) for _, name in ends],
        "kinds": list(END_KINDS),
    }
    return found + await records.with_bodies(connection, run_id, location, await _rows(connection, _ENDS, values))


async def _rows(
    connection: Connection, query: LiteralString, values: Sequence[object] | Mapping[str, object]
) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query, values)).fetchall()


T = TypeVar("T")
PATIENCE_S = 10.0  # How long a running operation waits for a server that cannot be reached, s.
#: By event loop and database, shared by all journals of this process.
_writers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, PostgresWriter]] = weakref.WeakKeyDictionary()


class PostgresStore:
    """All runs of one database. Its methods raise `RecordError` if the database cannot be used."""

    def __init__(self, url: str, *, patience_s: float = PATIENCE_S) -> None:
        self._url = url
        self._database = Database(url, patience_s=patience_s)

    async def begin(
        self, run_id: str, *, origin: str = "", is_buffered: bool = False, state: RunState = RunState.PENDING
    ) -> OwnedRun:
        check_run_id(run_id)
        async with self._connection_to_own() as connection:
            begun = await _begin(connection, run_id, origin, self._database.location, state)
        return self._own(connection, (run_id, begun), 0, is_buffered=is_buffered)

    async def claim(
        self, run_id: str, *, is_buffered: bool = False, by_force: bool = False, state: RunState = RunState.PENDING
    ) -> OwnedRun:
        check_run_id(run_id)
        import psycopg

        location = self._database.location
        async with self._connection_to_own() as connection:
            try:
                begun, epoch = await _claim(connection, run_id, location, state, by_force=by_force)
            except psycopg.errors.LockNotAvailable:
                if not by_force:
                    raise
                await connection.execute(_END_FROZEN)
                begun, epoch = await _claim(connection, run_id, location, state, by_force=by_force)
        return self._own(connection, (run_id, begun), epoch, is_buffered=is_buffered)

    async def accept_loss(self, run_id: str, *, by_force: bool = False) -> bool:
        async with self._database.reading() as connection:
            last, gap = (0, 0) if connection is None else await records.missing_facts(connection, run_id)
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

    async def join(self, run_id: str, *, writer: str, is_buffered: bool = False) -> PostgresJournal:  # noqa: ARG002  a process has one writer per database
        check_run_id(run_id)
        database, own_writer = self._database, self._writer()
        target = await own_writer.join(run_id)
        if target is None:
            raise RecordError(
                f"Cannot write the run's record: there is no run '{run_id}' in {database.location}. "
                "Is ENSEMBLE_RAY_STORE the same in all processes?",
                database.location,
            )
        return PostgresJournal(own_writer, target, is_buffered=is_buffered, location=database.location)

    async def facts(self, run_id: str, *, is_partial: bool = False) -> list[Fact]:
        async with self._database.reading() as connection:
            if connection is None:
                return []
            if not is_partial:
                await records.check_whole(connection, run_id, self._database.location)
            return await records.read_facts(connection, run_id, self._database.location)

    def read(
        self,
        run_id: str,
        *,
        after: int = 0,
        kinds: Collection[str] | None = None,
        has_data: bool = True,
        is_partial: bool = False,
    ) -> AsyncGenerator[Sequence[Fact]]:
        database = self._database

        async def last() -> int:
            async with database.reading() as connection:
                if connection is None:
                    return 0
                if not is_partial:
                    await records.check_whole(connection, run_id, database.location)
                return await records.last_seq(connection, run_id, kinds)

        # One transaction per page: a slow reader must not keep a transaction open on the server.
        async def page(position: int) -> Sequence[Fact]:
            async with database.reading() as connection:
                if connection is None:
                    return []
                return await records.read_page(
                    connection, run_id, database.location, after=position, size=PAGE, kinds=kinds, has_data=has_data
                )

        return pages(last, page, run_id, after=after)

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        async with self._database.reading() as connection:
            if connection is None:
                return []
            return await records.read_facts(connection, run_id, self._database.location, instance=instance)

    async def read_content(self, run_id: str, sha256: str) -> bytes | None:
        async with self._database.reading() as connection:
            return None if connection is None else await records.read_content(connection, run_id, sha256)

    async def summary(self, run_id: str) -> RecordedRun | None:
        async with self._database.reading() as connection:
            found = [] if connection is None else await read_runs(connection, self._database.location, run_id)
        return found[0] if found else None

    async def runs(self) -> list[RecordedRun]:
        async with self._database.reading() as connection:
            return [] if connection is None else await read_runs(connection, self._database.location)

    async def find(self, text: str) -> RecordedRun:
        runs = {run.run_id: run for run in await self.runs()}
        return runs[chosen_id(text, list(runs), lambda: list(runs), self._database.location)]

    async def ask_cancel(self, run_id: str) -> None:
        with self._database.translated_errors():
            async with await self._database.connect() as connection:
                cursor = await connection.execute(
                    "UPDATE ensemble_ray.runs SET cancel_asked = true WHERE run_id = %s", [run_id]
                )
                if not cursor.rowcount:
                    raise await _unknown_run(connection, run_id, self._database.location)

    async def gates(self) -> list[GatesOfRun]:
        found: list[GatesOfRun] = []
        async with self._database.reading() as connection:
            if connection is None:
                return found
            for (run_id,) in await _rows(connection, _RUNS_WITH_GATES, ()):
                for run in await read_runs(connection, self._database.location, run_id):
                    if run.state.is_final:  # its owner died before it stored the state
                        continue
                    try:
                        found.append(GatesOfRun(run, await _read_gates(connection, run_id, self._database.location)))
                    except RecordError as error:
                        _log.warning("The review gates of run %s are not listed: %s", run_id, error)
        return found

    async def gates_of(self, run_id: str) -> list[Fact]:
        async with self._database.reading() as connection:
            return [] if connection is None else await _read_gates(connection, run_id, self._database.location)

    async def decide(self, run_id: str, gate: str, decision: ReviewDecided) -> tuple[Gate, Obstacle] | None:
        check_run_id(run_id)
        database = self._database
        with database.translated_errors():
            async with await database.connect() as connection, connection.transaction():
                rows = await _rows(connection, _RUN, [run_id])
                if not rows:
                    raise await _unknown_run(connection, run_id, database.location)
                ((begun, of_run),) = rows
                # A claim of the run locks its row too: if the run has no owner now, its next owner reads this decision.
                is_owned = await _owner_of(connection, run_id) is not None
                fact = Fact(run=run_id, name=gate, at=time.time(), data=decision)
                instance = text_of_name(fact.instance)
                found = await _rows(connection, _NAMED, [run_id, instance, text_of_name(gate)])
                (asked,) = fold_gates(await records.with_bodies(connection, run_id, database.location, found))
                obstacle = obstacle_at(asked, at=fact.at, is_owned=is_owned)
                if obstacle is not None:
                    return asked, obstacle
                ((of_instance,),) = await _rows(connection, _EPOCH, [run_id, instance])
                entry = Append(target=(run_id, begun), facts=(fact,), epoch=max(of_run, of_instance or 0), first=1)
                await records.commit_group(connection, records.render([entry], {}), uuid4())
        return None

    async def find_answer(self, digest: str, *, since: float, run_id: str) -> Fact[ModelAnswered] | None:
        async def find(connection: Connection) -> Fact[ModelAnswered] | None:
            if not await has_answers(connection):
                return None
            return await records.find_answer(connection, digest, since, run_id, self._database.location)

        return await self._use_answers(find)

    async def offer_answers(self, run_id: str, answers: Sequence[OfferedAnswer]) -> None:
        async def offer(connection: Connection) -> None:
            if not await has_answers(connection):
                await create_answers(connection)
            await records.offer_answers(connection, run_id, answers)

        await self._use_answers(offer)

    async def delete(self, run_id: str) -> None:
        with self._database.translated_errors():
            async with await self._database.connect() as connection, connection.transaction():
                await _lock(connection, run_id, self._database.location, is_free=True)
                await _delete(connection, run_id)
                if await has_answers(connection):
                    await connection.execute("DELETE FROM ensemble_ray.answers WHERE run_id = %s", [run_id])

    async def _use_answers(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
        writer = self._writer()  # many tasks share its connection
        try:
            return await writer.using(operation)
        finally:
            await writer.release_unused()

    @contextlib.asynccontextmanager
    async def _connection_to_own(self) -> AsyncGenerator[Connection]:
        with self._database.translated_errors():
            connection = await self._database.connect()
            try:
                yield connection
            except BaseException:
                await connection.close()
                raise

    def _own(self, connection: Connection, target: BegunRun, epoch: int, *, is_buffered: bool) -> OwnedRun:
        writer = self._writer()
        writer.attach(target)
        journal = PostgresJournal(writer, target, is_buffered=is_buffered, location=self._database.location)
        return _OwnedRun(self._database, connection, target, epoch, journal)

    def _writer(self) -> PostgresWriter:
        writers = _writers.setdefault(asyncio.get_running_loop(), {})
        writer = writers.get(self._url)
        if writer is None or writer.has_failed:  # its journals stay failed; new ones retry
            writer = writers[self._url] = PostgresWriter(self._database)
        return writer
