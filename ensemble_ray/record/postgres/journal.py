"""A run's facts in PostgreSQL: the journal of one writer, and all readers.

In: facts, appended. Out: facts as readers get them. Never: a guess about a damaged fact.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ensemble_ray.errors import IllegalStateError, RecordError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import KINDS_OF_RUN, read_fact
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.ports import Persistence
from ensemble_ray.record.postgres.group import BegunRun, name_of, text_of_name
from ensemble_ray.record.rendering import accepted_loss, data_of, missing_text
from ensemble_ray.record.resume.advice import resume_advice
from ensemble_ray.values.ids import RUN

if TYPE_CHECKING:
    from ensemble_ray.record.postgres.connection import Connection
    from ensemble_ray.record.postgres.writer import PostgresWriter

#: Where a text among the bodies is named; users' own keys of that look have one `$` more.
_REFERENCE = re.compile(r'"\$body":\s*"([0-9a-f]{64})"')
#: From so many facts on, reading them is work for a thread.
_MANY = 500

_ALL = """
SELECT seq, kind, name, at, epoch, data FROM ensemble_ray.facts WHERE run_id = %s ORDER BY seq
"""
_OF_INSTANCE = """
SELECT seq, kind, name, at, epoch, data FROM ensemble_ray.facts
WHERE run_id = %s AND instance IN (%s, 'loss') AND kind <> 'stimulus' ORDER BY seq
"""
_PAGE = """
SELECT seq, kind, name, at, epoch, CASE WHEN %(has_data)s THEN data ELSE '{}' END FROM ensemble_ray.facts
WHERE run_id = %(run)s AND seq > %(after)s AND (%(kinds)s::text[] IS NULL OR kind = ANY(%(kinds)s))
    AND (%(instance)s::text IS NULL OR instance = %(instance)s)
ORDER BY seq LIMIT %(size)s
"""
_LAST = """
SELECT coalesce(max(seq), 0) FROM ensemble_ray.facts
WHERE run_id = %(run)s AND (%(kinds)s::text[] IS NULL OR kind = ANY(%(kinds)s))
    AND (%(instance)s::text IS NULL OR instance = %(instance)s)
"""
#: Facts are numbered from 1 without gaps.
_MISSING = """
SELECT coalesce(max(seq), 0), coalesce(max(seq), 0) - count(*) FROM ensemble_ray.facts WHERE run_id = %s
"""
_LOSSES = """
SELECT data FROM ensemble_ray.facts WHERE run_id = %s AND instance = %s
"""
_BODIES = """
SELECT sha256, body FROM ensemble_ray.bodies WHERE run_id = %s AND sha256 = ANY(%b)
"""


class PostgresJournal:
    """One run's facts, as one process writes them; its writer knows of it already (`attach`, `join`)."""

    def __init__(self, writer: PostgresWriter, target: BegunRun, *, is_buffered: bool, location: str) -> None:
        self.run_id = target[0]
        self._target = target
        self._writer = writer
        self._is_buffered = is_buffered
        self._location = location
        self._is_closed = False

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Add facts in order; their data must not change afterwards. Every commit is on the disk (`SYNCED`).

        Raises:
            StaleEpochError: a newer epoch has been seen.
            RecordError: the database refused what was appended.
            IllegalStateError: the journal is closed.
        """
        if self._is_closed:
            msg = f"The journal of run '{self.run_id}' is closed"
            raise IllegalStateError(msg)
        await self._writer.append(self._target, facts, epoch, Persistence.QUEUED if self._is_buffered else until)

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        """Return what is recorded of an instance, by whichever writer.

        Raises:
            RecordError: the record cannot be read, or is damaged.
        """
        await self.flush()
        facts = await self._writer.using(
            lambda connection: read_facts(connection, self.run_id, self._location, instance=instance)
        )
        return {(fact.name, fact.kind): fact for fact in facts}

    async def flush(self) -> None:
        """Return when everything appended so far is committed.

        Raises:
            RecordError: the database refused it.
        """
        await self._writer.append(self._target, (), 0, Persistence.COMMITTED)

    async def close(self) -> None:
        """Flush, and take no more facts; the connection is closed with the last journal.

        Raises:
            RecordError: the database refused what was appended.
        """
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self.flush()
        finally:
            await self._writer.detach(self._target)


async def read_facts(connection: Connection, run_id: str, location: str, *, instance: str | None = None) -> list[Fact]:
    """Return committed facts of a run in order: all of them, or the effects of one instance.

    Raises:
        RecordError: a fact is damaged.
    """
    if instance is None:
        cursor = await connection.execute(_ALL, [run_id])
    else:
        cursor = await connection.execute(_OF_INSTANCE, [run_id, text_of_name(instance)])
    return await with_bodies(connection, run_id, location, await cursor.fetchall())


async def read_page(
    connection: Connection,
    run_id: str,
    location: str,
    *,
    after: int,
    size: int,
    kinds: Collection[str] | None,
    has_data: bool,
) -> list[Fact]:
    """Return the next committed facts behind a position, in order.

    Args:
        connection: To read over.
        run_id: The run's id.
        location: The database, for messages.
        after: Position of the last fact that was read; 0: from the first one.
        size: Most facts to read.
        kinds: Only facts of these kinds; None: all.
        has_data: Whether their data is read; else it is empty.

    Raises:
        RecordError: a fact is damaged.
    """
    values = {"run": run_id, "after": after, "size": size, "has_data": has_data, **_of_kinds(kinds)}
    cursor = await connection.execute(_PAGE, values)
    return await with_bodies(connection, run_id, location, await cursor.fetchall())


async def missing_facts(connection: Connection, run_id: str) -> tuple[int, int]:
    """Return the position of a run's last fact, and how many are missing before it that nobody has accepted the loss of."""
    cursor = await connection.execute(_MISSING, [run_id])
    row = await cursor.fetchone()
    last, missing = (0, 0) if row is None else (int(row[0]), int(row[1]))
    if missing:
        cursor = await connection.execute(_LOSSES, [run_id, LossAccepted.FENCE])
        missing -= sum(accepted_loss(data).gap for (data,) in await cursor.fetchall())
    return last, max(0, missing)


async def check_whole(connection: Connection, run_id: str, location: str) -> None:
    """Refuse a record of which facts are missing.

    Raises:
        RecordError: how many are missing, and what to do.
    """
    last, missing = await missing_facts(connection, run_id)
    if missing:
        msg = (
            f"The record of run '{run_id}' in {location} is damaged: {missing} of the facts up to {last} are missing. "
            f"Restore them, or go on without them: {resume_advice(run_id, None, field='allow_loss=True')}"
        )
        raise RecordError(msg, location)


async def last_seq(connection: Connection, run_id: str, kinds: Collection[str] | None) -> int:
    """Position of the last committed fact, of those kinds if any are named; 0 when there is none."""
    cursor = await connection.execute(_LAST, {"run": run_id, **_of_kinds(kinds)})
    row = await cursor.fetchone()
    return 0 if row is None else int(row[0])


def _of_kinds(kinds: Collection[str] | None) -> dict[str, object]:
    """Return what the statements need to know of the wanted kinds; those of the run itself are found by their instance."""
    is_of_run = kinds is not None and set(kinds) <= KINDS_OF_RUN
    return {"kinds": None if kinds is None else list(kinds), "instance": RUN if is_of_run else None}


async def with_bodies(
    connection: Connection, run_id: str, location: str, rows: Sequence[tuple[Any, ...]]
) -> list[Fact]:
    """Return facts of rows (seq, kind, name, at, epoch, data), with the long texts that they name.

    Raises:
        RecordError: a fact is damaged.
    """
    named = {bytes.fromhex(digest) for row in rows for digest in _REFERENCE.findall(row[5])}
    bodies: dict[str, bytes] = {}
    if named:
        cursor = await connection.execute(_BODIES, [run_id, list(named)])
        bodies = {bytes(key).hex(): bytes(body) for key, body in await cursor.fetchall()}
    if len(rows) < _MANY:
        return _facts(run_id, rows, bodies, location)
    return await asyncio.to_thread(_facts, run_id, rows, bodies, location)


def _facts(run_id: str, rows: Sequence[tuple[Any, ...]], bodies: Mapping[str, bytes], location: str) -> list[Fact]:
    def resolve(digest: str) -> str:
        body = bodies.get(digest)
        return missing_text(digest) if body is None else body.decode("utf-8", "surrogatepass")

    found: list[Fact] = []
    for seq, kind, name, at, epoch, data in rows:
        try:
            named, fields = name_of(name), data_of(data, resolve)
            found.append(read_fact(run=run_id, kind=kind, name=named, at=at, data=fields, epoch=epoch, seq=seq))
        except (ValueError, TypeError, RecursionError) as error:
            msg = f"The record is damaged: fact {seq} of run '{run_id}' in {location} cannot be read ({error})"
            raise RecordError(msg, location) from error
    return found
