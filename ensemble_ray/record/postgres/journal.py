"""Write one run's facts to PostgreSQL, in groups, and read them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from hashlib import sha256
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar, cast
from uuid import UUID

import msgspec
from msgspec import Struct

from ensemble_ray.errors import IllegalStateError, RecordError, StaleEpochError
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import KINDS_OF_RUN, read_fact
from ensemble_ray.facts.runs import LossAccepted
from ensemble_ray.ports import OfferedAnswer, Persistence
from ensemble_ray.record.journal import REFERENCE, SOON_S, EpochFence, accepted_loss, data_of, missing_text, text_of
from ensemble_ray.record.stores import resume_advice
from ensemble_ray.values.ids import RUN

if TYPE_CHECKING:
    from ensemble_ray.record.postgres.database import Connection, Database


BegunRun = tuple[str, UUID]  # id of a run and of its creation: a run that was created again is another run

_MAX_FACTS = 2_000  # Largest group, in facts and characters.
_MAX_CHARACTERS = 16_000_000

_UNSTORABLE = re.compile("[\0\\\\\ud800-\udfff]")  # what the database cannot store, and the escape
_ESCAPE = re.compile(r"\\u([0-9a-f]{4})")

_APPEND = """
SELECT {0}, a.entry, a.instance, a.newest FROM ensemble_ray.append_facts(
    %(run{0})b, %(begun{0})b, %(writer)b,
    %(entries{0})b::bigint[], %(numbers{0})b::bigint[], %(kinds{0})b::text[], %(names{0})b::text[],
    %(instances{0})b::text[], %(ats{0})b::double precision[], %(epochs{0})b::bigint[], %(data{0})b::text[],
    %(digests{0})b::bytea[], %(bodies{0})b::bytea[]
) AS a
"""


class Append(Struct, frozen=True, kw_only=True):
    target: BegunRun
    facts: Sequence[Fact]
    epoch: int
    first: int  # number of its first fact among all facts of its writer, from 1
    waiter: asyncio.Future[None] | None = None  # resolved at the commit; None: no caller waits


class RefusedAppend(Struct, frozen=True, kw_only=True):
    entry: Append
    instance: str
    newest: int


class _Rows(Struct, kw_only=True):
    entries: list[Append] = msgspec.field(default_factory=list[Append])
    #: number of the entry, number of the fact, kind, name, instance, at, epoch, data
    facts: list[tuple[int, int, str, str, str, float, int, str]] = msgspec.field(default_factory=list[Any])
    bodies: dict[bytes, bytes] = msgspec.field(
        default_factory=dict[bytes, bytes]
    )  # by hash; may be missing in the database
    characters: int = 0

    def add(self, entry: Append, kept: set[bytes]) -> None:
        def keep(text: str) -> str:
            body = text.encode("utf-8", "surrogatepass")
            key = sha256(body).digest()
            if key not in kept and key not in self.bodies:
                self.bodies[key] = body
                self.characters += len(body)
            return key.hex()

        for number, fact in enumerate(entry.facts, entry.first):
            data = text_of(fact.data.to_data(), keep)
            name, instance = text_of_name(fact.name), text_of_name(fact.fence)
            place = len(self.entries), number
            self.facts.append((*place, fact.kind, name, instance, float(fact.at), entry.epoch, data))
            self.characters += len(data)
        self.entries.append(entry)

    def parameters(self, target: BegunRun, run_index: int) -> dict[str, Any]:
        columns = ("entries", "numbers", "kinds", "names", "instances", "ats", "epochs", "data")
        values: dict[str, Any] = dict(zip(columns, map(list, zip(*self.facts, strict=True)), strict=True))
        values |= {"run": target[0], "begun": target[1]}
        values |= {"digests": list(self.bodies), "bodies": list(self.bodies.values())}
        return {f"{name}{run_index}": value for name, value in values.items()}


class CommitGroup(Struct, frozen=True, kw_only=True):
    rows: Mapping[BegunRun, _Rows]
    size: int


class CommitResult(Struct, frozen=True, kw_only=True):
    refused: Sequence[RefusedAppend]
    missing: Sequence[BegunRun]


def render(entries: Sequence[Append], kept: Mapping[BegunRun, set[bytes]]) -> CommitGroup:
    """Return a group of the first entries, as many as fit. `kept` are hashes of stored texts by run."""
    rows: dict[BegunRun, _Rows] = {}
    facts = 0
    for size, entry in enumerate(entries):
        if size and (facts >= _MAX_FACTS or sum(each.characters for each in rows.values()) >= _MAX_CHARACTERS):
            return CommitGroup(rows=rows, size=size)
        rows.setdefault(entry.target, _Rows()).add(entry, kept.get(entry.target, set()))
        facts += len(entry.facts)
    return CommitGroup(rows=rows, size=len(entries))


async def commit_group(connection: Connection, group: CommitGroup, writer: UUID) -> CommitResult:
    """Commit a group. Repeating it has no effect."""
    runs = sorted(run for run, rows in group.rows.items() if rows.facts)  # all processes lock runs in this order
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
    """Return one statement for all runs, so that the server has the whole group before it locks a row."""
    return " UNION ALL ".join(_APPEND.format(run_index) for run_index in range(runs)).encode()


def text_of_name(name: str) -> str:
    """Escape NUL and halves of surrogate pairs, which the database cannot store."""
    return _UNSTORABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", name)


def name_of(text: str) -> str:
    return _ESCAPE.sub(lambda found: chr(int(found[1], 16)), text) if "\\" in text else text


_MANY = 500  # From this number on, a thread parses facts.

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
#: The last answer with the name that the newest entry of a digest names.
_ANSWER = """
SELECT f.run_id, f.seq, f.kind, f.name, f.at, f.epoch, f.data FROM ensemble_ray.answers a
JOIN ensemble_ray.facts f ON f.run_id = a.run_id AND f.instance = regexp_replace(a.name, '/[^/]*/[^/]*$', '')
    AND f.name = a.name AND f.kind = 'model'
WHERE a.digest = %s AND a.at >= %s AND a.run_id <> %s ORDER BY f.seq DESC LIMIT 1
"""
_OFFER = """
INSERT INTO ensemble_ray.answers (digest, run_id, name, at) VALUES (%s, %s, %s, %s)
ON CONFLICT (digest) DO UPDATE SET run_id = excluded.run_id, name = excluded.name, at = excluded.at
"""

_STORE_CONTENT = """
INSERT INTO ensemble_ray.bodies
SELECT run_id, %(digest)b, %(content)b FROM ensemble_ray.runs WHERE run_id = %(run)s AND begun = %(begun)s
ON CONFLICT DO NOTHING
"""


class PostgresJournal:
    """Writes one run's facts in this process; every commit is on the disk. The caller registers the run first."""

    def __init__(self, writer: PostgresWriter, target: BegunRun, *, is_buffered: bool, location: str) -> None:
        self.run_id = target[0]
        self._target = target
        self._writer = writer
        self._is_buffered = is_buffered
        self._location = location
        self._is_closed = False

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        if self._is_closed:
            raise IllegalStateError(f"The journal of run '{self.run_id}' is closed")
        await self._writer.append(self._target, facts, epoch, Persistence.QUEUED if self._is_buffered else until)

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        await self.flush()
        facts = await self._writer.using(
            lambda connection: read_facts(connection, self.run_id, self._location, instance=instance)
        )
        return {(fact.name, fact.kind): fact for fact in facts}

    async def store_content(self, content: bytes) -> bool:
        if self._is_closed:
            raise IllegalStateError(f"The journal of run '{self.run_id}' is closed")
        await self._writer.using(lambda connection: store_content(connection, self._target, content))
        return True

    async def read_content(self, sha256: str) -> bytes | None:
        return await self._writer.using(lambda connection: read_content(connection, self.run_id, sha256))

    async def flush(self) -> None:
        await self._writer.append(self._target, (), 0, Persistence.COMMITTED)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self.flush()
        finally:
            await self._writer.detach(self._target)


async def store_content(connection: Connection, target: BegunRun, content: bytes) -> None:
    run_id, begun = target
    values = {"run": run_id, "begun": begun, "digest": sha256(content).digest(), "content": content}
    await connection.execute(_STORE_CONTENT, values)


async def read_content(connection: Connection, run_id: str, digest: str) -> bytes | None:
    cursor = await connection.execute(_BODIES, [run_id, [bytes.fromhex(digest)]])
    row = await cursor.fetchone()
    return None if row is None else bytes(row[1])


async def read_facts(connection: Connection, run_id: str, location: str, *, instance: str | None = None) -> list[Fact]:
    """Return committed facts of a run in order: all, or those of one instance without stimuli."""
    if instance is None:
        cursor = await connection.execute(_ALL, [run_id])
    else:
        cursor = await connection.execute(_OF_INSTANCE, [run_id, text_of_name(instance)])
    return await with_bodies(connection, run_id, location, await cursor.fetchall())


async def find_answer(
    connection: Connection, digest: str, since: float, run_id: str, location: str
) -> Fact[ModelAnswered] | None:
    cursor = await connection.execute(_ANSWER, [digest, since, run_id])
    rows = await cursor.fetchall()
    if not rows:
        return None
    (found,) = await with_bodies(connection, rows[0][0], location, [row[1:] for row in rows])
    # The run may have been removed, and another run may have its id.
    answer = cast("Fact[ModelAnswered]", found)
    return answer if answer.data.reuse_digest == digest else None


async def offer_answers(connection: Connection, run_id: str, answers: Sequence[OfferedAnswer]) -> None:
    rows = [(digest, run_id, text_of_name(name), at) for digest, name, at in sorted(answers)]  # all lock in this order
    await connection.cursor().executemany(_OFFER, rows)


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
    values = {"run": run_id, "after": after, "size": size, "has_data": has_data, **_of_kinds(kinds)}
    cursor = await connection.execute(_PAGE, values)
    return await with_bodies(connection, run_id, location, await cursor.fetchall())


async def missing_facts(connection: Connection, run_id: str) -> tuple[int, int]:
    """Return the position of the last fact, and the number of missing facts without an accepted loss."""
    cursor = await connection.execute(_MISSING, [run_id])
    row = await cursor.fetchone()
    last, missing = (0, 0) if row is None else (int(row[0]), int(row[1]))
    if missing:
        cursor = await connection.execute(_LOSSES, [run_id, LossAccepted.FENCE])
        missing -= sum(accepted_loss(data).gap for (data,) in await cursor.fetchall())
    return last, max(0, missing)


async def check_whole(connection: Connection, run_id: str, location: str) -> None:
    last, missing = await missing_facts(connection, run_id)
    if missing:
        raise RecordError(
            f"The record of run '{run_id}' in {location} is damaged: {missing} of the facts up to {last} are missing. "
            f"Restore them, or continue without them: {resume_advice(run_id, None, field='allow_loss=True')}",
            location,
        )


async def last_seq(connection: Connection, run_id: str, kinds: Collection[str] | None) -> int:
    """Return the position of the last committed fact of these kinds (None: any kind), or 0."""
    cursor = await connection.execute(_LAST, {"run": run_id, **_of_kinds(kinds)})
    row = await cursor.fetchone()
    return 0 if row is None else int(row[0])


def _of_kinds(kinds: Collection[str] | None) -> dict[str, object]:
    is_of_run = kinds is not None and set(kinds) <= KINDS_OF_RUN
    return {"kinds": None if kinds is None else list(kinds), "instance": RUN if is_of_run else None}


async def with_bodies(
    connection: Connection, run_id: str, location: str, rows: Sequence[tuple[Any, ...]]
) -> list[Fact]:
    """Return the facts of rows (seq, kind, name, at, epoch, data), with their long texts."""
    named = {bytes.fromhex(digest) for row in rows for digest in REFERENCE.findall(row[5])}
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
            raise RecordError(
                f"The record is damaged: fact {seq} of run '{run_id}' in {location} cannot be read ({error})", location
            ) from error
    return found


T = TypeVar("T")

_GROUP_S = 0.2  # How long a fact stays in memory at most if no caller waits for it, s (S-DUR-2).
_FULL = 20_000  # Queued facts above which `append` waits for a commit.
_SMALL_VALUES = 200  # Smaller groups are rendered on the event loop: on a busy machine, a thread starts late.
_SMALL_CHARACTERS = 20_000


class PostgresWriter:
    """The queue of facts of one process and one database, and the task that writes them. For one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._id = uuid.uuid4()
        self._queue: list[Append] = []
        self._queued_facts = 0
        self._last_number = 0  # of any run; the database only needs numbers that rise within a run
        self._fences: dict[BegunRun, EpochFence] = {}  # older facts are refused before they are queued
        self._kept: dict[BegunRun, set[bytes]] = {}
        self._users: dict[BegunRun, int] = {}
        self._failures: dict[BegunRun, RecordError] = {}
        self._failure: RecordError | None = None
        self._due = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._using = asyncio.Lock()
        self._threads: ThreadPoolExecutor | None = None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def attach(self, target: BegunRun) -> None:
        self._users[target] = self._users.get(target, 0) + 1

    async def join(self, run: str) -> BegunRun | None:
        async def ask(connection: Connection) -> UUID | None:
            cursor = await connection.execute("SELECT begun FROM ensemble_ray.runs WHERE run_id = %s", [run])
            row = await cursor.fetchone()
            return None if row is None else row[0]

        begun = await self.using(ask)
        if begun is not None:
            self.attach((run, begun))
            return run, begun
        await self.release_unused()
        return None

    async def release_unused(self) -> None:
        if not self._users and self._task is None:
            await self._release()

    async def detach(self, target: BegunRun) -> None:
        left = self._users.get(target, 0) - 1
        if left > 0:
            self._users[target] = left
            return
        self._users.pop(target, None)
        self._fences.pop(target, None)
        self._kept.pop(target, None)
        self._failures.pop(target, None)
        if self._users:
            return
        if self._task is not None:
            self._due.set()
            while self._task is not None and not self._users:
                await asyncio.wait([self._task], timeout=0.05)
        elif self._threads is not None or self._connection is not None:
            await self._release()

    async def append(self, target: BegunRun, facts: Sequence[Fact], epoch: int, until: Persistence) -> None:
        """Return when the facts have the requested persistence."""
        failure = self._failure or self._failures.get(target)
        if failure is not None:
            raise _again(failure)
        if not facts and until is Persistence.QUEUED:
            return
        self._fence(target).admit(facts, epoch)
        waits = until > Persistence.SOON or self._queued_facts >= _FULL
        waiter: asyncio.Future[None] | None = asyncio.get_running_loop().create_future() if waits else None
        first = self._last_number + 1
        self._last_number += len(facts)
        self._queue.append(Append(target=target, facts=tuple(facts), epoch=epoch, first=first, waiter=waiter))
        self._queued_facts += len(facts)
        self._ensure_task()
        if waiter is not None:
            self._due.set()
            await waiter
        else:
            self._schedule(SOON_S if until is Persistence.SOON else _GROUP_S)

    async def using(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
        """Run another operation on the connection, between two groups; repeat it if the connection breaks."""

        async def once() -> T:
            async with self._using:
                return await self._on_connection(operation)

        return await self._database.patiently(once)

    def _schedule(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time() + delay_s
        if self._timer is not None:
            if self._timer.when() <= at:
                return
            self._timer.cancel()
        self._timer = loop.call_at(at, self._due.set)

    def _fence(self, target: BegunRun) -> EpochFence:
        if target not in self._fences:
            self._fences[target] = EpochFence(target[0])
        return self._fences[target]

    def _ensure_task(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._write(), name="ensemble-ray-postgres")

    async def _write(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            try:
                while self._queue:
                    await self._write_group()
                if not self._users:
                    await self._release()
                    self._task = None
                    if self._queue:
                        self._ensure_task()
                        self._due.set()
                    return
            except RecordError as error:
                self._abandon(error)
                return
            except Exception as error:  # noqa: BLE001  every failure must reach the waiting callers
                failure = self._database.failure(error)
                failure.__cause__ = error
                self._abandon(failure)
                return

    async def _write_group(self) -> None:
        entries = list(self._queue)
        if _is_small(entries):
            group = render(entries, self._kept)
        else:
            if self._threads is None:  # a separate pool: users' tools may fill the loop's pool
                self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ensemble-ray-postgres")
            loop = asyncio.get_running_loop()
            group = await loop.run_in_executor(self._threads, render, entries, self._kept)
        taken = entries[: group.size]
        outcome = await self.using(lambda connection: commit_group(connection, group, self._id))
        del self._queue[: group.size]
        self._queued_facts -= sum(len(entry.facts) for entry in taken)
        for target in group.rows:
            if target in self._users:
                self._kept.setdefault(target, set()).update(group.rows[target].bodies)
        self._resolve(taken, outcome)

    def _resolve(self, taken: Sequence[Append], outcome: CommitResult) -> None:
        errors: dict[int, Exception] = {}
        for refusal in outcome.refused:
            entry = refusal.entry
            errors[id(entry)] = StaleEpochError(entry.target[0], refusal.instance, entry.epoch, refusal.newest)
            if entry.target not in self._users:
                continue
            fence = self._fence(entry.target)
            fence.learn(refusal.instance, refusal.newest)
            for fact in entry.facts:  # the entry's other instances lost facts too: they must stop
                fence.learn(fact.fence, entry.epoch + 1)
        location = self._database.location
        missing = {
            target: RecordError(
                f"The record of run '{target[0]}' was deleted from {location} while it was written", location
            )
            for target in outcome.missing
        }
        self._failures.update({target: error for target, error in missing.items() if target in self._users})
        for entry in taken:
            _notify(entry, missing.get(entry.target) or self._failures.get(entry.target) or errors.get(id(entry)))

    def _abandon(self, failure: RecordError) -> None:
        self._failure = failure
        self._task = None
        for entry in self._queue:
            _notify(entry, failure)
        self._queue.clear()
        self._queued_facts = 0

    async def _on_connection(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
        if self._connection is None:
            connection = await self._database.connect()
            # Plans are made while the tables are small, and reused later: they must not use sequential scans.
            await connection.execute("SELECT set_config('enable_seqscan', 'off', false)")
            self._connection = connection
        try:
            return await operation(self._connection)
        except BaseException:
            # It may be in any state, with an unread answer: do not reuse it.
            await self._disconnect()
            raise

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):
                await connection.close()

    async def _release(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        async with self._using:
            await self._disconnect()


def _is_small(entries: Sequence[Append]) -> bool:
    left = _SMALL_VALUES
    characters = 0
    found: list[object] = [fact.data.to_data() for entry in entries[:left] for fact in entry.facts[:left]]
    while found and left and characters <= _SMALL_CHARACTERS:
        left -= 1
        match found.pop():
            case str() | bytes() as text:
                characters += len(text)
            case Mapping() as mapping:
                found.extend(islice(cast("Mapping[object, object]", mapping).values(), left))
            case list() | tuple() as values:
                found.extend(cast("Sequence[object]", values)[:left])
            case _:
                pass
    return not found and characters <= _SMALL_CHARACTERS


def _notify(entry: Append, error: Exception | None) -> None:
    if entry.waiter is None or entry.waiter.done():
        return
    if error is None:
        entry.waiter.set_result(None)
    else:
        entry.waiter.set_exception(_again(error) if isinstance(error, RecordError) else error)


def _again(failure: RecordError) -> RecordError:
    """Return a copy, because each caller needs its own exception."""
    told = RecordError(str(failure), failure.path)
    told.__cause__ = failure.__cause__
    return told
