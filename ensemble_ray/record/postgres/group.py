"""One group of facts on its way into PostgreSQL: rendered, and committed in one transaction.

In: what several writers of a process appended. Out: which of it the database refused because of a newer epoch.
Sequence numbers, epochs and what of a group is there already are decided by a function in the database
(`schema`), under a lock on the run's row: no other process can come between. A group is one message: a client
that freezes or dies half-way has sent nothing or everything.
Never: a fact twice because a commit was repeated, a group in part.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ensemble_ray.facts.fact import Fact
from ensemble_ray.record.rendering import text_of

if TYPE_CHECKING:
    from ensemble_ray.record.postgres.connection import Connection

#: A run's id, and which beginning of it: one that was removed and begun anew is another.
BegunRun = tuple[str, UUID]

#: Largest group: facts, and characters; what is left waits for the next one.
_MAX_FACTS = 2_000
_MAX_CHARACTERS = 16_000_000

#: What a text of the database cannot hold, and the character that says so.
_UNSTORABLE = re.compile("[\0\\\\\ud800-\udfff]")
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")

_APPEND = """
SELECT {0}, a.entry, a.instance, a.newest FROM ensemble_ray.append_facts(
    %(run{0})b, %(begun{0})b, %(writer)b,
    %(entries{0})b::bigint[], %(numbers{0})b::bigint[], %(kinds{0})b::text[], %(names{0})b::text[],
    %(instances{0})b::text[], %(ats{0})b::double precision[], %(epochs{0})b::bigint[], %(data{0})b::text[],
    %(digests{0})b::bytea[], %(bodies{0})b::bytea[]
) AS a
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Append:
    """What one call appended."""

    target: BegunRun
    facts: Sequence[Fact]
    epoch: int
    #: number of its first fact among those of its writer, from 1
    first: int
    #: told when it is committed; None: nobody waits
    waiter: asyncio.Future[None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedAppend:
    """An entry that a newer epoch kept out."""

    entry: Append
    instance: str
    newest: int


@dataclass(slots=True, kw_only=True)
class _Rows:
    """What one run gets from a group, in columns."""

    entries: list[Append] = field(default_factory=list[Append])
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

    def add(self, entry: Append, kept: set[bytes]) -> None:
        """Render an entry."""

        def keep(text: str) -> str:
            body = text.encode("utf-8", "surrogatepass")
            key = sha256(body).digest()
            if key not in kept and key not in self.bodies:
                self.bodies[key] = body
                self.characters += len(body)
            return key.hex()

        for number, fact in enumerate(entry.facts, entry.first):
            data = text_of(fact.data.to_data(), keep)
            self.entry.append(len(self.entries))
            self.number.append(number)
            self.kind.append(fact.kind)
            self.name.append(text_of_name(fact.name))
            self.instance.append(text_of_name(fact.fence))
            self.at.append(float(fact.at))
            self.epoch.append(entry.epoch)
            self.data.append(data)
            self.characters += len(data)
        self.entries.append(entry)

    def parameters(self, target: BegunRun, run_index: int) -> dict[str, Any]:
        """Return the values of `_APPEND`."""
        return {
            f"run{run_index}": target[0],
            f"begun{run_index}": target[1],
            f"entries{run_index}": self.entry,
            f"numbers{run_index}": self.number,
            f"kinds{run_index}": self.kind,
            f"names{run_index}": self.name,
            f"instances{run_index}": self.instance,
            f"ats{run_index}": self.at,
            f"epochs{run_index}": self.epoch,
            f"data{run_index}": self.data,
            f"digests{run_index}": list(self.bodies),
            f"bodies{run_index}": list(self.bodies.values()),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitGroup:
    """What is committed at once, by run."""

    rows: Mapping[BegunRun, _Rows]
    #: how many of the entries that were given it holds
    size: int

    def bodies(self, target: BegunRun) -> Sequence[bytes]:
        """Hashes of the long texts that it brings to a run."""
        return list(self.rows[target].bodies)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitResult:
    """What became of a group."""

    refused: Sequence[RefusedAppend]
    #: runs that are not there any more
    missing: Sequence[BegunRun]


def render(entries: Sequence[Append], kept: Mapping[BegunRun, set[bytes]]) -> CommitGroup:
    """Return a group of the first entries, as many as fit. Pure; may run in a thread while nobody changes its arguments.

    Args:
        entries: What was appended, in order; at least one.
        kept: By run: hashes of long texts that are in the database.
    """
    rows: dict[BegunRun, _Rows] = {}
    facts = 0
    for size, entry in enumerate(entries):
        if size and (facts >= _MAX_FACTS or sum(each.characters for each in rows.values()) >= _MAX_CHARACTERS):
            return CommitGroup(rows=rows, size=size)
        rows.setdefault(entry.target, _Rows()).add(entry, kept.get(entry.target, set()))
        facts += len(entry.facts)
    return CommitGroup(rows=rows, size=len(entries))


async def commit_group(connection: Connection, group: CommitGroup, writer: UUID) -> CommitResult:
    """Commit a group; doing so again changes nothing more.

    Raises:
        Error: psycopg's; whether it is committed is unknown then.
    """
    runs = sorted(run for run, rows in group.rows.items() if rows.number)  # all processes lock them in this order
    refused: list[RefusedAppend] = []
    missing: list[BegunRun] = []
    if not runs:
        return CommitResult(refused=refused, missing=missing)
    values: dict[str, Any] = {"writer": writer}
    for run_index, run in enumerate(runs):
        values.update(group.rows[run].parameters(run, run_index))
    cursor = await connection.execute(_statement(len(runs)), values)
    for run_index, entry, instance, newest in await cursor.fetchall():
        if entry is None:
            missing.append(runs[run_index])
        else:
            found = group.rows[runs[run_index]].entries[entry]
            refused.append(RefusedAppend(entry=found, instance=name_of(instance), newest=newest))
    return CommitResult(refused=refused, missing=missing)


@lru_cache(maxsize=50)
def _statement(runs: int) -> bytes:
    """One statement for all: the server has the whole group before it locks anything."""
    return " UNION ALL ".join(_APPEND.format(run_index) for run_index in range(runs)).encode()


def text_of_name(name: str) -> str:
    """Return a name as the database can hold it: its texts know neither NUL nor halves of surrogate pairs."""
    return _UNSTORABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", name)


def name_of(text: str) -> str:
    """Return a name as it was before `text_of_name`."""
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text) if "\\" in text else text
