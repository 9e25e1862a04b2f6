"""FileJournal: one run's facts in a segment of its own on disk; and the runs of a home. Room: record.

In: facts, taken without waiting and written in groups by the process's writer thread. Out: the recorded effect of a
name. Never: rendering or file access on the event loop, a lost fact that nobody is told of.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ensemble_ray.errors import IllegalStateError, RecordError
from ensemble_ray.messages import Fact
from ensemble_ray.outputs import RunState
from ensemble_ray.ports import Journal
from ensemble_ray.record.bodies import FileBodies
from ensemble_ray.record.files import Place, cannot_write, read_line
from ensemble_ray.record.journal import EpochGate
from ensemble_ray.record.rendering import fact_of, in_json_form, line_of
from ensemble_ray.record.runs import RunDirectory, RunSummary, find_run, list_runs, make_private, read_facts
from ensemble_ray.record.segments import located_facts, new_segment
from ensemble_ray.record.writer import group_writer

__all__ = [
    "FileJournal",
    "OpenRun",
    "RunDirectory",
    "RunSummary",
    "close_run",
    "find_run",
    "join_run",
    "list_runs",
    "new_writer_name",
    "open_run",
    "read_facts",
]

_log = logging.getLogger(__name__)
#: Facts that may wait for the writer; beyond that, appending waits, so that a slow disk cannot fill the memory.
_MAX_WAITING = 50_000
#: Facts rendered and written in one go; between two goes the writer lets the event loop run.
_GO = 32
#: How long the writer steps back between two goes when nobody waits for it, s.
_BREATH_S = 0.0002

#: A fact that is not written yet, with the epoch of its writer.
_Entry = tuple[Fact, int]


def new_writer_name() -> str:
    """A name for this process as a writer; unique, and sorted by time."""
    return f"{time.time_ns() // 1_000_000:x}-{os.getpid()}-{secrets.token_hex(4)}"


class FileJournal:
    """One run's record as this process writes it."""

    def __init__(self, directory: Path, run_id: str, *, writer: str | None = None) -> None:
        """Open the record of a run; what is in it already is known from then on.

        Args:
            directory: The run's directory; made when missing, readable by its owner only.
            run_id: The run's id.
            writer: Names this writer's files.

        Raises:
            RecordError: the directory cannot be written, or what is in it cannot be read.
        """
        self.run_id = run_id
        self._gate = EpochGate(run_id)
        self._index: dict[tuple[str, str], _Entry | Place] = {}
        self._queue: deque[_Entry] = deque()
        self._waiters: deque[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._appended = 0
        self._written = 0
        self._has_asked = False
        self._is_closed = False
        self._failure: Exception | None = None
        try:
            make_private(directory)
            self._know(directory)
            self._segment, self.writer = new_segment(directory, run_id, writer or new_writer_name())
            self._bodies = FileBodies(directory, self.writer)
        except OSError as error:
            raise cannot_write(directory, error) from error

    def _know(self, directory: Path) -> None:
        for fact, place in located_facts(directory, self.run_id, resolve=str):
            self._gate.know(fact)
            if fact.kind != "stimulus":
                self._index[fact.name, fact.kind] = place

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0) -> None:
        """Add facts in order; their data must not change afterwards. They are written within 200 ms.

        Raises:
            StaleEpochError: a newer epoch has been seen.
            RecordError: the disk refused what was appended before.
            IllegalStateError: the journal is closed.
        """
        if self._failure is not None or self._is_closed:
            self._refuse()
        self._gate.admit(facts, epoch)
        for fact in facts:
            entry = (fact, epoch)
            if fact.kind != "stimulus":  # an instance has many
                self._index[fact.name, fact.kind] = entry
            self._queue.append(entry)
        self._appended += len(facts)
        if not self._has_asked:
            self._ask()
        if len(self._queue) > _MAX_WAITING:
            await self.flush()

    def recorded(self, name: str, kind: str) -> Fact | None:
        """The effect recorded under that name, its data as JSON data; None when there is none."""
        found = self._index.get((name, kind))
        if found is None:
            return None
        if isinstance(found, Place):
            return fact_of(self.run_id, read_line(found), self._bodies.get)
        return in_json_form(found[0], epoch=found[1])

    async def flush(self) -> None:
        """Return when everything appended so far is handed to the operating system.

        Raises:
            RecordError: the disk refused it.
        """
        if self._written != self._appended and self._failure is None:
            loop = asyncio.get_running_loop()
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.append((loop, waiter))
            self._ask()
            group_writer().hurry()
            await waiter
        if self._failure is not None:
            self._refuse()

    async def close(self) -> None:
        """Flush and let go of the files.

        Raises:
            RecordError: the disk refused what was appended.
        """
        if self._is_closed:
            return
        try:
            await self.flush()
        finally:
            self._is_closed = True
            self._segment.close()
            with contextlib.suppress(OSError):  # flushed, or told of above
                self._bodies.close()

    def _ask(self) -> None:
        self._has_asked = True
        group_writer().ask(self)

    def _refuse(self) -> None:
        if isinstance(self._failure, OSError):
            raise cannot_write(self._segment.path, self._failure)
        if self._failure is not None:
            raise RecordError(
                f"Cannot write the run's record to {self._segment.path}: {self._failure}", str(self._segment.path)
            )
        raise IllegalStateError(f"The journal of run '{self.run_id}' is closed")

    # In the writer's thread.

    def write_out(self) -> None:
        """Write everything appended so far."""
        self._has_asked = False  # first: what is appended from here on asks again
        waiters = [self._waiters.popleft() for _ in range(len(self._waiters))]
        rest = len(self._queue)  # and no more, so that a busy run does not keep others waiting
        try:
            while rest and self._failure is None:
                go = [self._queue.popleft() for _ in range(min(_GO, rest))]
                self._write(go)
                self._written += len(go)
                rest -= len(go)
                if rest and not self._waiters and not waiters:
                    time.sleep(_BREATH_S)
        except Exception as error:  # noqa: BLE001  whatever it is, the writer of the facts is told
            self._fail(error)
        for loop, waiter in waiters:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits any more
                loop.call_soon_threadsafe(_settle, waiter)

    def _write(self, entries: Sequence[_Entry]) -> None:
        lines = [line_of(fact, epoch, self._bodies.put) for fact, epoch in entries]
        self._bodies.flush()  # first: a fact never names a body that is not there
        places = self._segment.append(lines)
        for entry, place in zip(entries, places, strict=True):
            key = (entry[0].name, entry[0].kind)
            if self._index.get(key) is entry:
                self._index[key] = place

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._queue.clear()
        _log.error("Run %s: its record ends here, %s cannot be written: %s", self.run_id, self._segment.path, error)


def _settle(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run whose record this process owns."""

    directory: RunDirectory
    journal: FileJournal


def open_run(home: Path, run_id: str, *, writer: str | None = None, origin: str = "") -> OpenRun:
    """Begin, or continue, the record of a run as its owner.

    Args:
        home: Directory that holds `runs/ID/`.
        run_id: The run's id.
        writer: Names this writer's files.
        origin: Where the definition came from: a YAML path, `module:attribute`, or nothing.

    Raises:
        RunExistsError: a run of that id is running.
        RecordError: the directory cannot be written.
        ValidationError: the id cannot name a directory.
    """
    directory = RunDirectory.own(home, run_id, origin=origin)
    try:
        return OpenRun(directory=directory, journal=FileJournal(directory.path, run_id, writer=writer))
    except BaseException:
        directory.release()
        raise


async def close_run(journal: Journal, directory: RunDirectory | None, state: RunState) -> None:
    """Close a run's record and say how the run ended; whatever fails here, the run has no owner any more.

    Raises:
        RecordError: the disk refused what was appended, or the state.
    """
    try:
        await journal.close()
        if directory is not None:
            directory.write_state(state)
    finally:
        if directory is not None:
            directory.release()


def join_run(home: Path, run_id: str, *, writer: str | None = None) -> FileJournal:
    """Write to the record of a run that another process owns; an agent's process does.

    Raises:
        RecordError: the directory cannot be written.
        ValidationError: the id cannot name a directory.
    """
    return FileJournal(RunDirectory(home, run_id).path, run_id, writer=writer)
