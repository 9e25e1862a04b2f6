"""Everything a process writes to one PostgreSQL database: one task, one connection, one group after the other.

In: facts of any number of runs. Out: groups, committed. What somebody waits for is committed at once, together with all
that came before it; the rest within 200 ms. A connection that breaks is made again, and what was under way repeated.
Never: work of any length on the event loop, a fact lost in silence: a writer that gave up takes nothing more.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TYPE_CHECKING, TypeVar, cast

from ensemble_ray.errors import RecordError, StaleEpochError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.journal import EpochFence
from ensemble_ray.record.postgres.group import Append, BegunRun, CommitGroup, CommitResult, commit_group, render

if TYPE_CHECKING:
    from uuid import UUID

    from ensemble_ray.record.postgres.connection import Connection
    from ensemble_ray.record.postgres.database import Database

T = TypeVar("T")

#: Longest time that a fact nobody waits for stays in memory, s (S-DUR-2).
_GROUP_S = 0.2
#: Facts in memory above which whoever appends waits for a commit.
_FULL = 20_000
#: A group of so few values and characters is rendered where it is: on a busy machine a thread comes late.
_SMALL_VALUES = 200
_SMALL_CHARACTERS = 20_000


class PostgresWriter:
    """The queue of one process and one database, and the task that empties it. For one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._id = uuid.uuid4()
        self._queue: list[Append] = []
        self._queued_facts = 0
        #: number of the last fact of any run: in each run they rise, which is all that the database compares
        self._last_number = 0
        #: by run: newest epochs seen; what is older is refused before it is queued
        self._fences: dict[BegunRun, EpochFence] = {}
        #: by run: hashes of long texts that are in the database
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
        """Whether it gave up."""
        return self._failure is not None

    @property
    def is_used(self) -> bool:
        """Whether any journal writes through it."""
        return bool(self._users)

    def attach(self, target: BegunRun) -> None:
        """Let a journal of that run write through it."""
        self._users[target] = self._users.get(target, 0) + 1

    async def join(self, run: str) -> BegunRun | None:
        """Let a journal of a run that another process began write through it; return None when there is no such run.

        Raises:
            RecordError: the database cannot be used.
        """

        async def ask(connection: Connection) -> UUID | None:
            cursor = await connection.execute("SELECT begun FROM ensemble_ray.runs WHERE run_id = %s", [run])
            row = await cursor.fetchone()
            return None if row is None else row[0]

        begun = await self.using(ask)
        if begun is not None:
            self.attach((run, begun))
            return run, begun
        if not self._users and self._task is None:
            await self._release()
        return None

    async def detach(self, target: BegunRun) -> None:
        """Let a journal of that run go; with the last one, close the connection."""
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
            while self._task is not None and not self._users:  # somebody new may keep it going
                await asyncio.wait([self._task], timeout=0.05)
        elif self._threads is not None or self._connection is not None:
            await self._release()

    async def append(self, target: BegunRun, facts: Sequence[Fact], epoch: int, until: Persistence) -> None:
        """Take facts; return when they are as safe as asked.

        Raises:
            StaleEpochError: a newer epoch of the run or of an instance is known, or was found.
            RecordError: the database refused something earlier, or this.
        """
        self._check(target)
        if not facts and until is Persistence.QUEUED:
            return
        self._fence(target).admit(facts, epoch)
        waits = until is not Persistence.QUEUED or self._queued_facts >= _FULL
        waiter: asyncio.Future[None] | None = asyncio.get_running_loop().create_future() if waits else None
        first = self._last_number + 1
        self._last_number += len(facts)
        self._queue.append(Append(target=target, facts=tuple(facts), epoch=epoch, first=first, waiter=waiter))
        self._queued_facts += len(facts)
        self._ensure_task()
        if waiter is not None:
            self._due.set()
            await waiter
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_GROUP_S, self._due.set)

    async def using(self, operation: Callable[[Connection], Awaitable[T]]) -> T:
        """Do something else over the connection, between two groups; repeated when the connection breaks.

        Raises:
            RecordError: the database cannot be reached, or refuses.
        """

        async def once() -> T:
            async with self._using:
                return await self._on_connection(operation)

        return await self._database.patiently(once)

    def _check(self, target: BegunRun) -> None:
        failure = self._failure or self._failures.get(target)
        if failure is not None:
            raise _again(failure)

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
                    if self._queue:  # of somebody who came meanwhile
                        self._ensure_task()
                        self._due.set()
                    return
            except RecordError as error:
                self._abandon(error)
                return
            except Exception as error:  # noqa: BLE001  whatever it is, those who wait must be told
                failure = self._database.failure(error)
                failure.__cause__ = error
                self._abandon(failure)
                return

    async def _write_group(self) -> None:
        entries = list(self._queue)
        group = await self._render(entries)
        taken = entries[: group.size]
        outcome = await self.using(lambda connection: commit_group(connection, group, self._id))
        del self._queue[: group.size]
        self._queued_facts -= sum(len(entry.facts) for entry in taken)
        for target in group.rows:
            if target in self._users:
                self._kept.setdefault(target, set()).update(group.bodies(target))
        self._resolve(taken, outcome)

    async def _render(self, entries: Sequence[Append]) -> CommitGroup:
        if _is_small(entries):
            return render(entries, self._kept)
        if self._threads is None:  # one of our own: users' tools may fill the loop's
            self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ensemble-ray-postgres")
        return await asyncio.get_running_loop().run_in_executor(self._threads, render, entries, self._kept)

    def _resolve(self, taken: Sequence[Append], outcome: CommitResult) -> None:
        errors: dict[int, Exception] = {}
        for refusal in outcome.refused:
            entry = refusal.entry
            errors[id(entry)] = StaleEpochError(entry.target[0], refusal.instance, entry.epoch, refusal.newest)
            if entry.target not in self._users:
                continue  # its journals were closed meanwhile
            fence = self._fence(entry.target)
            fence.learn(refusal.instance, refusal.newest)
            for fact in entry.facts:  # the entry's other instances lost facts with it: they must stop too
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
            # Statements are planned while the tables are small and kept: they must not be planned as scans.
            await connection.execute("SELECT set_config('enable_seqscan', 'off', false)")
            self._connection = connection
        try:
            return await operation(self._connection)
        except BaseException:
            # In the middle of anything: what it was told and has not answered is nobody's any more.
            await self._disconnect()
            raise

    async def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(Exception):  # it is broken already, or will be
                await connection.close()

    async def _release(self) -> None:
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        async with self._using:
            await self._disconnect()


def _is_small(entries: Sequence[Append]) -> bool:
    """Whether rendering takes less than a moment; looks no further than it must."""
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
    """Return the same failure for one more to be told: an exception of its own for each."""
    told = RecordError(str(failure), failure.path)
    told.__cause__ = failure.__cause__
    return told
