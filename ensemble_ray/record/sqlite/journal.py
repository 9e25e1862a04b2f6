"""One run's facts as this process writes them to the run's SQLite file.

The process's writer thread renders and commits queued facts in groups. A short commit with one waiting caller runs on
the event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.errors import IllegalStateError, RecordError, StaleEpochError
from ensemble_ray.facts.effects import ToolIntended
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.process.concurrency import after_fork, new_lock, threads, track
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.journal import SOON_S, EpochFence, body_digest, text_of
from ensemble_ray.record.stores import try_lock, unlock

if TYPE_CHECKING:
    from ensemble_ray.record.sqlite.file import Row, SqliteFile


GROUP_S = 0.2
_LAST_CALL_S = 5.0
_log = bounded_logger(__name__)


class Writable(Protocol):
    def write_out(self) -> None:
        """Called in the writer's thread; must not raise."""
        ...


class GroupWriter:
    """Calls `write_out` of all objects that requested it, in groups. Thread-safe."""

    def __init__(self, group_s: float = GROUP_S) -> None:
        self._group_s = group_s
        self._asked: deque[Writable] = deque()
        self._work = threading.Event()
        self._hurry = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing: list[SqliteFile] = []

    def ask(self, somebody: Writable) -> None:
        self._asked.append(somebody)
        if not self._work.is_set():  # setting it takes a lock that the thread may hold
            self._work.set()
        if self._thread is None:
            with self._lock:
                if self._thread is None:
                    # A daemon: a hanging disk must not block the end of the process.
                    self._thread = threading.Thread(target=self._run, name="ensemble-ray-record", daemon=True)
                    self._thread.start()

    def hurry(self) -> None:
        self._hurry.set()

    def close_later(self, file: SqliteFile) -> None:
        """Close a file after this round, in the background. Called in the writer's thread."""
        self._closing.append(file)

    def finish(self, timeout_s: float = _LAST_CALL_S) -> None:
        """Run all scheduled writes and wait for them, at most `timeout_s`. Called when the process ends."""
        if self._thread is None:
            return
        last = _Mark()
        self.ask(last)
        self.hurry()
        last.reached.wait(timeout_s)

    def _run(self) -> None:
        while True:
            self._work.wait()
            self._hurry.wait(self._group_s)
            self._hurry.clear()
            self._work.clear()
            while self._asked:
                somebody = self._asked.popleft()
                try:
                    somebody.write_out()
                except Exception:  # noqa: BLE001  the thread also serves other runs
                    _log.exception("A run's record could not be written")
            if self._closing:
                # Merging a log into its file takes milliseconds; meanwhile the writer serves other runs.
                closing, self._closing = self._closing, []
                threading.Thread(target=_close, args=(closing,), name="ensemble-ray-record-close", daemon=True).start()


def _close(files: Sequence[SqliteFile]) -> None:
    for file in files:
        file.close()


class _Mark:
    def __init__(self) -> None:
        self.reached = threading.Event()

    def write_out(self) -> None:
        self.reached.set()


_writer = GroupWriter()


def group_writer() -> GroupWriter:
    return _writer


@after_fork
def _begin_anew() -> None:
    global _writer  # noqa: PLW0603  a forked child has no threads and must not write its parent's facts again
    _writer = GroupWriter()


@atexit.register
def _finish() -> None:
    _writer.finish()


PATIENCE_S = 30.0  # How long a commit waits for its turn before it fails, s.
_FROZEN_S = 1.0  # How long a forced claim waits before it checks whether the holder is stopped, s.
_FIRST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001


class CommitLock:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = -1
        self._name = b""
        track(self)

    def acquire(self, patience_s: float = PATIENCE_S) -> bool:
        """Wait for the lock; return False if another holder keeps it for `patience_s`."""
        if self._descriptor < 0:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            self._name = b"%-10d\n" % os.getpid()
        if not try_lock(self._descriptor):
            until = time.monotonic() + patience_s
            pause_s = _FIRST_PAUSE_S
            while True:
                time.sleep(pause_s)
                if try_lock(self._descriptor):
                    break
                if time.monotonic() > until:
                    return False
                pause_s = min(pause_s * 1.5, _LONGEST_PAUSE_S)
        with contextlib.suppress(OSError):  # for messages only; on a full disk the commit itself fails
            os.pwrite(self._descriptor, self._name, 0)
        return True

    def acquire_or_raise(self, patience_s: float = PATIENCE_S) -> None:
        if not self.acquire(patience_s):
            raise self.is_held(patience_s)

    def seize(self, patience_s: float = PATIENCE_S) -> None:
        """Acquire the lock, and kill a stopped holder on this machine (SIGSTOP): it would hold the lock forever.

        SQLite recovers from its locks and partial writes as after any kill.
        """
        until = time.monotonic() + patience_s
        while not self.acquire(min(_FROZEN_S, patience_s)):
            if time.monotonic() > until:
                raise self.is_held(patience_s)
            self._end_frozen_holder()

    def is_held(self, patience_s: float) -> RecordError:
        pid = self._holder_pid()
        holder = f"process {pid}" if pid else "another process"
        msg = (
            f"Cannot write the run's record in {self.path.parent}: {holder} has held its lock "
            f"for {patience_s:.0f} s. Is it stopped? Let it go on, or end it"
        )
        return RecordError(msg, str(self.path))

    def release(self) -> None:
        if self._descriptor >= 0:
            unlock(self._descriptor)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def after_fork(self) -> None:
        """Close the parent's file: otherwise the child would keep the parent's lock."""
        self.close()

    def _holder_pid(self) -> int:
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return 0

    def _end_frozen_holder(self) -> None:
        """Kill the holder if it is a stopped process of this machine that has the file open."""
        pid = self._holder_pid()
        if not pid or pid == os.getpid() or not hasattr(os, "pidfd_open"):
            return
        try:
            process = os.pidfd_open(pid)  # first: all later checks refer to this process, even if its id is reused
        except OSError:
            return
        try:
            # A traced or sleeping process is not stopped.
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if self._is_open_in(pid) and state == "T" and self._holder_pid() == pid:
                _log.warning(
                    "%s is held by process %d, which is stopped in the middle of a commit: killing it", self.path, pid
                )
                signal.pidfd_send_signal(process, signal.SIGKILL)
        except OSError as error:
            _log.warning("Process %d, which is stopped in the middle of a commit, cannot be killed: %s", pid, error)
        finally:
            os.close(process)

    def _is_open_in(self, pid: int) -> bool:
        own = os.fstat(self._descriptor)
        for opened in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.path.samestat(opened.stat(), own):
                    return True
        return False


COMMIT_LOCK = "commit.lock"
_MAX_WAITING = 50_000  # Facts above which `append` waits, so that a slow disk cannot fill the memory.
_GROUP = 512
_GO = 32  # Facts rendered without a pause; in the pauses the event loop can run.
_BREATH_S = 0.0002  # Pause between two batches of rendering when no caller waits, s.
_TURN_S = 0.05  # How long the writer waits for another process before it serves other runs, s.
#: A commit may run on the event loop's thread if the last one took no longer, s. One takes 0.06 to 0.11 ms on a local
#: disk; handing it to the writer's thread takes longer than that.
SHORT_S = 0.001
_MOST_STORED_BODIES = 10_000  # Cached hashes of stored texts. The file ignores texts that are inserted again.


_Outcome = tuple["asyncio.Future[None]", Exception | None]


@dataclass(slots=True, eq=False)
class _Unit:
    facts: Sequence[Fact]
    epoch: int
    until: Persistence = Persistence.QUEUED
    waiter: asyncio.Future[None] | None = None
    loop: asyncio.AbstractEventLoop | None = None
    size: int = field(init=False)
    has_effect: bool = False
    rows: list[Row] = field(default_factory=list["Row"])
    bodies: dict[str, str | bytes] = field(default_factory=dict[str, "str | bytes"])  # bytes: contents of attachments
    refusal: StaleEpochError | None = None

    def __post_init__(self) -> None:
        self.size = len(self.facts)


class SqliteJournal:
    """Writes one run's record in this process. See `ensemble_ray.ports.Journal`."""

    def __init__(
        self,
        directory: Path,
        run_id: str,
        *,
        is_buffered: bool = False,
        file: SqliteFile | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.run_id = run_id
        self._directory = directory
        self._is_buffered = is_buffered
        self._patience_s = patience_s
        self._writer = group_writer()
        self._fence = EpochFence(run_id)
        self._queue: deque[_Unit] = deque()
        self._appended = 0
        self._done = 0
        self._has_asked = False
        self._is_urgent = False
        self._is_closed = False
        self._failure: Exception | None = None
        self._waiting = 0
        self._has_committed_here = False  # whether this round of the event loop had a commit on its thread
        self._timer: asyncio.TimerHandle | None = None  # begins the commit of facts that are needed soon
        self._writing = new_lock()  # held by the thread that writes; what follows belongs to it
        self._commit_s = 0.0  # duration of the last commit that did not wait for the disk, s
        self._file = file
        self._lock = CommitLock(directory / COMMIT_LOCK)
        self._stalled: list[_Unit] = []
        self._stalled_since = 0.0
        self._stored_bodies: set[str] = set()

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Add facts in order; the caller must not change their data afterwards. They are committed within 200 ms.

        A queued fact may be refused at its commit; then the next `append` for that instance raises a `StaleEpochError`.
        """
        self._check_usable()
        self._fence.admit(facts, epoch)
        if until <= Persistence.SOON or self._is_buffered:
            if facts:
                self._push(_Unit(facts, epoch))
            if self._appended - self._done > _MAX_WAITING:
                await self.flush()
            elif until is Persistence.SOON and self._timer is None and not self._is_buffered:
                self._timer = asyncio.get_running_loop().call_later(SOON_S, self._commit_queue)
            return
        await self._push_and_wait(facts, epoch, until)

    async def lookup_recorded(self, instance: str) -> Mapping[tuple[str, str], Fact]:
        from ensemble_ray.record.sqlite.file import read_instance

        await self.flush()
        facts = await threads.run(read_instance, self._directory, self.run_id, instance)
        return {(fact.name, fact.kind): fact for fact in facts}

    async def store_content(self, content: bytes) -> bool:
        self._check_usable()
        digest = sha256(content).hexdigest()
        if digest not in self._stored_bodies:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            self._is_urgent = True
            self._waiting += 1  # so that no commit of it runs on the event loop
            try:
                self._push(_Unit((), 0, Persistence.COMMITTED, waiter, loop, bodies={digest: content}))
                self._writer.hurry()
                await waiter
            finally:
                self._waiting -= 1
        return True

    async def read_content(self, sha256: str) -> bytes | None:
        from ensemble_ray.record.sqlite.file import read_content

        return await threads.run(read_content, self._directory, sha256)

    async def flush(self) -> None:
        if self._failure is not None:
            raise self._refusal(self._failure)
        if self._appended != self._done:
            self._check_usable()
            await self._push_and_wait((), 0, Persistence.COMMITTED)

    async def close(self) -> None:
        if self._is_closed:
            return
        if self._writer is not group_writer():  # a forked process: the queue belongs to its parent
            self._is_closed = True
            return
        try:
            await self.flush()
            if self._file is not None:
                await self._push_and_wait((), 0, Persistence.COMMITTED)  # a last check that the file exists
        finally:
            self._is_closed = True
            self._ask()

    @property
    def has_short_commits(self) -> bool:
        """Whether the disk is so fast that a short write may run on the event loop's thread."""
        return self._commit_s < SHORT_S

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._refusal(self._failure)
        if self._is_closed:
            raise IllegalStateError(f"The journal of run '{self.run_id}' is closed")
        if self._writer is not group_writer():
            raise IllegalStateError(
                f"The journal of run '{self.run_id}' was opened before this process was forked: join the run in it"
            )

    async def _push_and_wait(self, facts: Sequence[Fact], epoch: int, until: Persistence) -> None:
        loop = asyncio.get_running_loop()
        unit = _Unit(facts, epoch, until, waiter := loop.create_future(), loop)
        if until is Persistence.SYNCED or not self._commit_here(loop, unit):
            self._is_urgent = True
            self._push(unit)
            self._writer.hurry()
        self._waiting += 1
        try:
            await waiter
        finally:
            self._waiting -= 1

    def _commit_queue(self) -> None:
        self._timer = None
        if self._appended == self._done or self._writer is not group_writer():
            return
        if not self._commit_here(asyncio.get_running_loop()):
            self._is_urgent = True
            self._ask()
            self._writer.hurry()

    def _commit_here(self, loop: asyncio.AbstractEventLoop, *units: _Unit) -> bool:
        """Commit these units and all queued ones on the loop's thread; return False if the writer's thread should."""
        if not self._can_commit_here() or not self._writing.acquire(blocking=False):
            return False
        try:
            self._has_committed_here = True
            loop.call_soon(self._end_round)
            self._appended += sum([unit.size for unit in units])
            self._queue.extend(units)
            self._write_queue(turn_s=0.0, here=loop)
        finally:
            self._writing.release()
        return True

    def _can_commit_here(self) -> bool:
        """Whether a commit is faster on the loop's thread than a wait for the writer's thread.

        It is if no other caller waits, so that no commit could be shared, and if the last commit was short.
        """
        return (
            self._file is not None
            and not self._waiting
            and not self._has_committed_here
            and self.has_short_commits
            and self._appended - self._done < _GO
        )

    def _end_round(self) -> None:
        self._has_committed_here = False

    def _push(self, unit: _Unit) -> None:
        self._appended += unit.size
        self._queue.append(unit)
        if not self._has_asked:
            self._ask()

    def _ask(self) -> None:
        self._has_asked = True
        self._writer.ask(self)

    def _refusal(self, error: Exception) -> RecordError:
        from ensemble_ray.record.sqlite.file import cannot_write
        from ensemble_ray.record.sqlite.losses import RECORD

        return cannot_write(self._directory / RECORD, error)

    # With `_writing` held: in the writer's thread, or in the loop's.

    def write_out(self) -> None:
        self._has_asked = False  # first: a later append must schedule a write again
        with self._writing:
            self._write_queue()

    def _write_queue(self, *, turn_s: float = _TURN_S, here: asyncio.AbstractEventLoop | None = None) -> None:
        """After `turn_s` of waiting for other processes, the rest is left to the writer's thread.

        `here` is the running loop, if this is its thread.
        """
        rest = len(self._queue)  # a limit, so that a busy run does not delay other runs
        group: list[_Unit] = []
        try:
            while self._failure is None:
                group = self._stalled
                if not group:
                    group = self._next_group(rest)
                    rest -= len(group)
                if not group and (self._file is not None or self._is_closed):
                    break
                if not self._is_committed(group, turn_s):
                    self._stalled = group
                    self._ask()
                    return
                self._stalled = []
                self._resolve_waiters(group, here=here)
        except Exception as error:  # noqa: BLE001  every failure must reach the waiting callers
            self._failure = error
            self._stalled = []
            _log.error("Run %s: its record ends here. %s", self.run_id, self._refusal(error))
            self._resolve_waiters(group, error)
        if self._failure is not None:
            while self._queue:
                self._resolve_waiters([self._queue.popleft()], self._failure)
        if self._is_closed and not self._queue:
            self._lock.close()
            file, self._file = self._file, None
            if file is not None:
                self._writer.close_later(file)

    def _next_group(self, limit: int) -> list[_Unit]:
        group: list[_Unit] = []
        rendered = breathed = 0
        self._is_urgent = False
        is_waited_for = False
        while len(group) < limit and rendered < _GROUP:
            unit = self._queue.popleft()
            group.append(unit)
            is_waited_for = is_waited_for or unit.waiter is not None
            if rendered - breathed >= _GO and not is_waited_for and not self._is_urgent:
                time.sleep(_BREATH_S)
                breathed = rendered
            self._render(unit)
            rendered += len(unit.rows)
        return group

    def _render(self, unit: _Unit) -> None:
        def keep(text: str) -> str:
            digest = body_digest(text)
            if digest not in self._stored_bodies:
                unit.bodies[digest] = text
            return digest

        unit.rows = [
            (fact.kind, fact.name, fact.fence, fact.at, unit.epoch, text_of(fact.data.to_data(), keep))
            for fact in unit.facts
        ]
        unit.has_effect = any(isinstance(f.data, ToolIntended) and f.data.effect != "none" for f in unit.facts)
        unit.facts = ()

    def _is_committed(self, group: list[_Unit], turn_s: float) -> bool:
        import sqlite3

        from ensemble_ray.record.sqlite.file import SqliteFile, is_stale

        if not self._lock.acquire(turn_s):
            now = time.monotonic()
            self._stalled_since = self._stalled_since or now - _TURN_S
            if now - self._stalled_since > self._patience_s:
                raise self._lock.is_held(self._patience_s)
            return False
        self._stalled_since = 0.0
        try:
            if self._file is None:
                self._file = SqliteFile(self._directory)
            is_synced = any(unit.until is Persistence.SYNCED for unit in group)
            has_effect = any(unit.has_effect for unit in group)
            rows, bodies = _together(group)
            if not rows and not bodies and not is_synced:
                self._file.check_there(is_last=True)
                return True
            began = time.perf_counter()
            try:
                self._file.add(rows, bodies, is_synced=is_synced, has_effect=has_effect)
            except sqlite3.IntegrityError as error:
                if not is_stale(error):
                    raise
                rows, bodies = self._add_admitted(self._file, group, is_synced=is_synced)
            if not is_synced:
                self._commit_s = time.perf_counter() - began
        finally:
            self._lock.release()
        if len(self._stored_bodies) < _MOST_STORED_BODIES:
            self._stored_bodies.update(bodies)
        return True

    def _add_admitted(
        self, file: SqliteFile, group: list[_Unit], *, is_synced: bool
    ) -> tuple[list[Row], dict[str, str | bytes]]:
        """Commit the units that the newest epochs admit, and refuse the others one by one."""
        has_effect = any(unit.has_effect for unit in group)
        with file.transaction(is_synced=is_synced, has_effect=has_effect):
            fence = EpochFence(self.run_id)
            for instance, epoch in file.epochs().items():
                fence.learn(instance, epoch)
                self._fence.learn(instance, epoch)
            for unit in group:
                instances = {row[2] for row in unit.rows}
                try:
                    fence.admit_instances(instances, unit.epoch)
                except StaleEpochError as error:
                    unit.refusal = error
                    # The unit's other facts are refused too: their instances must stop.
                    for instance in instances:
                        fence.learn(instance, unit.epoch + 1)
                        self._fence.learn(instance, unit.epoch + 1)
            rows, bodies = _together([unit for unit in group if unit.refusal is None])
            file.add_in_transaction(rows, bodies)
        return rows, bodies

    def _resolve_waiters(
        self, group: Iterable[_Unit], error: Exception | None = None, *, here: asyncio.AbstractEventLoop | None = None
    ) -> None:
        done: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
        for unit in group:
            self._done += unit.size
            if unit.waiter is not None and unit.loop is not None:
                told = unit.refusal if error is None else self._refusal(error)
                done.setdefault(unit.loop, []).append((unit.waiter, told))
        _resolve(done.pop(here, ()) if here is not None else ())
        for loop, outcomes in done.items():
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, outcomes)


def _together(group: Sequence[_Unit]) -> tuple[list[Row], dict[str, str | bytes]]:
    if len(group) == 1:
        return group[0].rows, group[0].bodies
    bodies: dict[str, str | bytes] = {}
    for unit in group:
        bodies.update(unit.bodies)
    return [row for unit in group for row in unit.rows], bodies


def _resolve(outcomes: Sequence[_Outcome]) -> None:
    for waiter, error in outcomes:
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
