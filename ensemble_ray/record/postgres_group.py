"""One group of facts on its way into PostgreSQL: rendered, and committed in one transaction. Room: record.

In: what several writers of a process appended. Out: which of it the database refused because of a newer epoch.
Sequence numbers, epochs and what of a group is there already are decided by the database, inside the transaction and
under a lock on the run's row: no other process can come between, and a client that freezes decides nothing.
Never: a fact twice because a commit was repeated, a group in part.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ensemble_ray.messages import Fact
from ensemble_ray.record.journal import fence_of
from ensemble_ray.record.rendering import text_of

if TYPE_CHECKING:
    from psycopg import AsyncCursor

    from ensemble_ray.record.postgres_database import Connection

__all__ = ["Entry", "Group", "Outcome", "Refusal", "commit_group", "name_of", "render", "text_of_name"]

#: Largest group: facts, and characters; what is left waits for the next one.
_MAX_FACTS = 2_000
_MAX_CHARACTERS = 16_000_000

#: What a text of the database cannot hold, and the character that says so.
_UNSTORABLE = re.compile("[\0\\\\\ud800-\udfff]")
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")

_LOCK = """
SELECT run_id FROM ensemble_ray.runs WHERE run_id = ANY(%b) ORDER BY run_id FOR NO KEY UPDATE
"""
_BODIES = """
INSERT INTO ensemble_ray.bodies SELECT %(run)b, b.* FROM unnest(%(digests)b::bytea[], %(bodies)b::bytea[]) AS b
WHERE EXISTS (SELECT FROM ensemble_ray.runs WHERE run_id = %(run)b)
ON CONFLICT DO NOTHING
"""
#: A statement of its own after `_LOCK`: it must see what was committed while the lock was waited for.
_FACTS = """
WITH run AS MATERIALIZED (
    SELECT r.epoch,
        coalesce((SELECT max(f.seq) FROM ensemble_ray.facts f WHERE f.run_id = %(run)b), 0) AS seq,
        coalesce((SELECT w.written FROM ensemble_ray.writers w
            WHERE w.run_id = %(run)b AND w.writer = %(writer)b), 0) AS written
    FROM ensemble_ray.runs r WHERE r.run_id = %(run)b
), newest AS MATERIALIZED (
    SELECT i.instance, greatest(run.epoch, e.epoch) AS epoch, i.lowest, i.highest
    FROM unnest(%(instances)b::text[], %(lowest)b::bigint[], %(highest)b::bigint[]) AS i (instance, lowest, highest)
    CROSS JOIN run
    LEFT JOIN ensemble_ray.epochs e ON e.run_id = %(run)b AND e.instance = i.instance
), older AS MATERIALIZED (
    SELECT instance, epoch FROM newest WHERE lowest < epoch
), given AS (
    SELECT * FROM unnest(
        %(entry)b::bigint[], %(number)b::bigint[], %(kind)b::text[], %(name)b::text[], %(instance)b::text[],
        %(at)b::double precision[], %(epoch)b::bigint[], %(data)b::text[]
    ) AS g (entry, number, kind, name, instance, at, epoch, data)
), refused AS MATERIALIZED (
    SELECT g.entry, g.instance, o.epoch AS newest
    FROM given g JOIN older o ON o.instance = g.instance WHERE g.epoch < o.epoch
), added AS (
    INSERT INTO ensemble_ray.facts
    SELECT %(run)b, run.seq + row_number() OVER (ORDER BY g.number),
        g.kind, g.name, g.instance, g.at, g.epoch, g.data
    FROM given g CROSS JOIN run
    WHERE g.number > run.written AND g.entry NOT IN (SELECT entry FROM refused)
), raised AS (
    INSERT INTO ensemble_ray.epochs
    SELECT %(run)b, instance, highest FROM newest WHERE highest > epoch AND instance <> 'run'
    ON CONFLICT (run_id, instance) DO UPDATE SET epoch = excluded.epoch
), raised_run AS (
    UPDATE ensemble_ray.runs SET epoch = newest.highest FROM newest
    WHERE run_id = %(run)b AND newest.instance = 'run' AND newest.highest > newest.epoch
), progress AS (
    INSERT INTO ensemble_ray.writers SELECT %(run)b, %(writer)b, %(last)b FROM run
    ON CONFLICT (run_id, writer) DO UPDATE SET written = greatest(ensemble_ray.writers.written, excluded.written)
)
SELECT -1::bigint, ''::text, 0::bigint FROM run UNION ALL SELECT entry, instance, newest FROM refused
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What one call appended."""

    run: str
    facts: Sequence[Fact]
    epoch: int
    #: number of its first fact among those of its writer in that run, from 1
    first: int
    #: told when it is committed; None: nobody waits
    waiter: asyncio.Future[None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An entry that a newer epoch kept out."""

    entry: Entry
    instance: str
    newest: int


@dataclass(slots=True, kw_only=True)
class _Rows:
    """What one run gets from a group, in columns."""

    entries: list[Entry] = field(default_factory=list[Entry])
    entry: list[int] = field(default_factory=list[int])
    number: list[int] = field(default_factory=list[int])
    kind: list[str] = field(default_factory=list[str])
    name: list[str] = field(default_factory=list[str])
    instance: list[str] = field(default_factory=list[str])
    at: list[float] = field(default_factory=list[float])
    epoch: list[int] = field(default_factory=list[int])
    data: list[str] = field(default_factory=list[str])
    #: long texts that are not known to be in the database, by hash
    bodies: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    characters: int = 0

    def add(self, entry: Entry, kept: set[bytes]) -> None:
        """Render an entry."""

        def keep(text: str) -> str:
            body = text.encode("utf-8", "surrogatepass")
            key = sha256(body).digest()
            if key not in kept and key not in self.bodies:
                self.bodies[key] = body
                self.characters += len(body)
            return key.hex()

        for number, fact in enumerate(entry.facts, entry.first):
            data = text_of(fact.data, keep)
            self.entry.append(len(self.entries))
            self.number.append(number)
            self.kind.append(fact.kind)
            self.name.append(text_of_name(fact.name))
            self.instance.append(text_of_name(fence_of(fact)))
            self.at.append(float(fact.at))
            self.epoch.append(entry.epoch)
            self.data.append(data)
            self.characters += len(data)
        self.entries.append(entry)

    def parameters(self, run: str, writer: UUID) -> dict[str, Any]:
        """The values of `_FACTS`."""
        lowest: dict[str, int] = {}
        highest: dict[str, int] = {}
        for instance, epoch in zip(self.instance, self.epoch, strict=True):
            lowest[instance] = min(epoch, lowest.get(instance, epoch))
            highest[instance] = max(epoch, highest.get(instance, epoch))
        return {
            "run": run,
            "writer": writer,
            "last": max(self.number),
            "instances": list(lowest),
            "lowest": list(lowest.values()),
            "highest": list(highest.values()),
            "entry": self.entry,
            "number": self.number,
            "kind": self.kind,
            "name": self.name,
            "instance": self.instance,
            "at": self.at,
            "epoch": self.epoch,
            "data": self.data,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What is committed at once, by run."""

    rows: Mapping[str, _Rows]
    #: how many of the entries that were given it holds
    size: int

    def bodies(self, run: str) -> Sequence[bytes]:
        """Hashes of the long texts that it brings to a run."""
        return list(self.rows[run].bodies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a group."""

    refused: Sequence[Refusal]
    #: runs that are not there any more
    missing: Sequence[str]


def render(entries: Sequence[Entry], kept: Mapping[str, set[bytes]]) -> Group:
    """A group of the first entries, as many as fit. Pure; may run in a thread while nobody changes its arguments.

    Args:
        entries: What was appended, in order; at least one.
        kept: By run: hashes of long texts that are in the database.
    """
    rows: dict[str, _Rows] = {}
    facts = 0
    for size, entry in enumerate(entries):
        if size and (facts >= _MAX_FACTS or sum(each.characters for each in rows.values()) >= _MAX_CHARACTERS):
            return Group(rows=rows, size=size)
        rows.setdefault(entry.run, _Rows()).add(entry, kept.get(entry.run, set()))
        facts += len(entry.facts)
    return Group(rows=rows, size=len(entries))


async def commit_group(connection: Connection, group: Group, writer: UUID) -> Outcome:
    """Commit a group; doing so again changes nothing more.

    Raises:
        Error: psycopg's; whether it is committed is unknown then.
    """
    runs = sorted(run for run, rows in group.rows.items() if rows.number)
    if not runs:
        return Outcome(refused=(), missing=())
    async with connection.pipeline(), connection.transaction():
        await connection.execute(_LOCK, [runs])
        cursors = [await _insert(connection, run, group.rows[run], writer) for run in runs]
    refused: list[Refusal] = []
    missing: list[str] = []
    for run, cursor in zip(runs, cursors, strict=True):
        found = await cursor.fetchall()
        if not found:
            missing.append(run)
        entries = group.rows[run].entries
        refused += [
            Refusal(entry=entries[number], instance=name_of(instance), newest=newest)
            for number, instance, newest in found
            if number >= 0
        ]
    return Outcome(refused=refused, missing=missing)


async def _insert(connection: Connection, run: str, rows: _Rows, writer: UUID) -> AsyncCursor[tuple[Any, ...]]:
    if rows.bodies:
        bodies = {"run": run, "digests": list(rows.bodies), "bodies": list(rows.bodies.values())}
        await connection.execute(_BODIES, bodies)
    return await connection.execute(_FACTS, rows.parameters(run, writer))


def text_of_name(name: str) -> str:
    """A name as the database can hold it: its texts know neither NUL nor halves of surrogate pairs."""
    return _UNSTORABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", name)


def name_of(text: str) -> str:
    """A name again."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text) if "\\" in text else text
