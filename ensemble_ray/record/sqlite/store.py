"""Store the runs of a home directory in SQLite, one file per run. Adapter of `RunStore`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
import time
from collections.abc import AsyncGenerator, Awaitable, Collection, Coroutine, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import LossAccepted, ReviewDecided
from ensemble_ray.ports import OfferedAnswer
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.journal import body_digest, text_of
from ensemble_ray.record.open_reviews import END_KINDS, Gate, Obstacle, ends_of_open, fold_gates, obstacle_at
from ensemble_ray.record.runs import RunDirectory, existing_run, find_run, list_runs
from ensemble_ray.record.sqlite.answers import index_of
from ensemble_ray.record.sqlite.file import (
    SqliteFile,
    cannot_write,
    facts_in,
    last_seq,
    loss_in,
    read_answer,
    read_content,
    read_from,
    read_instance,
    read_page,
)
from ensemble_ray.record.sqlite.journal import COMMIT_LOCK, PATIENCE_S, CommitLock, SqliteJournal
from ensemble_ray.record.sqlite.losses import RECORD, keep_log
from ensemble_ray.record.stores import PAGE, GatesOfRun, OwnedRun, RecordedRun, pages
from ensemble_ray.values.ids import OWNER_STEP, RUN
from ensemble_ray.values.outputs import RunState

_log = bounded_logger(__name__)
#: Same condition as in the file's index of gates, so that SQLite uses the index.
_OF_GATES = "WHERE kind IN ('review', 'review_decision') ORDER BY seq"


def _read_gates(directory: RunDirectory) -> list[Fact]:
    run_id, path = directory.run_id, directory.path / RECORD

    def read(connection: sqlite3.Connection) -> list[Fact]:
        found = facts_in(connection, run_id, path, _OF_GATES)
        for instance, name in ends_of_open(found):
            where = f"WHERE instance = ? AND name = ? AND kind IN ({', '.join('?' * len(END_KINDS))})"
            found += facts_in(connection, run_id, path, where, (instance, name, *END_KINDS), has_data=False)
        return found

    return read_from(directory.path, read, [])


def _record_decision(
    directory: RunDirectory, gate: str, decision: ReviewDecided, *, patience_s: float
) -> tuple[Gate, Obstacle] | None:
    lock = CommitLock(directory.path / COMMIT_LOCK)
    try:
        lock.acquire_or_raise(patience_s)
        # A claim of the run needs this lock too: if the run has no owner now, its next owner reads this decision.
        is_owned = directory.ownership.is_held()
        fact = Fact(run=directory.run_id, name=gate, at=time.time(), data=decision)
        return _record(directory, fact, is_owned=is_owned)
    except (OSError, sqlite3.Error) as error:
        raise cannot_write(directory.path / RECORD, error) from error
    finally:
        lock.close()


def _record(directory: RunDirectory, fact: Fact, *, is_owned: bool) -> tuple[Gate, Obstacle] | None:
    bodies: dict[str, str] = {}

    def keep(text: str) -> str:
        digest = body_digest(text)
        bodies[digest] = text
        return digest

    data = text_of(fact.data.to_data(), keep)
    file = SqliteFile(directory.path)
    try:
        with file.transaction(is_synced=True):
            (gate,) = fold_gates(file.facts_named(directory.run_id, fact.instance, fact.name))
            obstacle = obstacle_at(gate, at=fact.at, is_owned=is_owned)
            if obstacle is not None:
                return gate, obstacle
            epochs = file.epochs()
            epoch = max(epochs.get(RUN, 0), epochs.get(fact.fence, 0))
            file.add_in_transaction([(fact.kind, fact.name, fact.fence, fact.at, epoch, data)], bodies)
    finally:
        file.close()
    return None


T = TypeVar("T")


class _Acquired(NamedTuple):
    file: SqliteFile
    epoch: int


class SqliteStore:
    def __init__(self, home: Path, *, patience_s: float = PATIENCE_S) -> None:
        self._home = home
        self._patience_s = patience_s
        self._ended: dict[str, tuple[int, RecordedRun]] = {}  # runs that had ended when they were last listed

    async def begin(
        self, run_id: str, *, origin: str = "", is_buffered: bool = False, state: RunState = RunState.PENDING
    ) -> OwnedRun:
        directory = RunDirectory(self._home, run_id)
        acquired = await _hold(directory, threads.run(self._begin, directory, origin, state))
        return self._own(directory, acquired, is_buffered=is_buffered)

    async def claim(
        self, run_id: str, *, is_buffered: bool = False, by_force: bool = False, state: RunState = RunState.PENDING
    ) -> OwnedRun:
        directory = existing_run(run_id, self._home)
        acquired = await _hold(directory, threads.run(self._claim, directory, state, by_force=by_force))
        return self._own(directory, acquired, is_buffered=is_buffered)

    async def accept_loss(self, run_id: str, *, by_force: bool = False) -> bool:
        directory = existing_run(run_id, self._home)
        return await _hold(directory, threads.run(self._accept_loss, directory, by_force=by_force))

    async def join(self, run_id: str, *, writer: str, is_buffered: bool = False) -> SqliteJournal:  # noqa: ARG002  a file needs no names of writers
        directory = RunDirectory(self._home, run_id)
        if not directory.path.is_dir():
            raise RecordError(
                f"Cannot write the run's record: there is no {directory.path}. "
                "Is ENSEMBLE_RAY_HOME the same in all processes?",
                str(directory.path),
            )
        return self._journal(directory, is_buffered=is_buffered)

    async def facts(self, run_id: str, *, is_partial: bool = False) -> list[Fact]:
        return await threads.run(RunDirectory(self._home, run_id).facts, is_partial=is_partial)

    def read(
        self,
        run_id: str,
        *,
        after: int = 0,
        kinds: Collection[str] | None = None,
        has_data: bool = True,
        is_partial: bool = False,
    ) -> AsyncGenerator[Sequence[Fact]]:
        path = RunDirectory(self._home, run_id).path

        def page(position: int) -> Awaitable[Sequence[Fact]]:
            return threads.run(
                read_page, path, run_id, position, PAGE, kinds=kinds, has_data=has_data, is_partial=is_partial
            )

        return pages(lambda: threads.run(last_seq, path, kinds, is_partial=is_partial), page, run_id, after=after)

    async def facts_of(self, run_id: str, instance: str) -> list[Fact]:
        return await threads.run(read_instance, RunDirectory(self._home, run_id).path, run_id, instance)

    async def read_content(self, run_id: str, sha256: str) -> bytes | None:
        return await threads.run(read_content, RunDirectory(self._home, run_id).path, sha256)

    async def summary(self, run_id: str) -> RecordedRun | None:
        directory = RunDirectory(self._home, run_id)
        return await threads.run(directory.summary) if directory.path.is_dir() else None

    async def runs(self) -> list[RecordedRun]:
        return await threads.run(list_runs, self._home, self._ended)

    async def find(self, text: str) -> RecordedRun:
        found = await threads.run(find_run, text, self._home)
        return await threads.run(found.summary)

    async def ask_cancel(self, run_id: str) -> None:
        existing_run(run_id, self._home).ask_cancel()

    async def gates(self) -> list[GatesOfRun]:
        return await threads.run(self._gates)

    async def gates_of(self, run_id: str) -> list[Fact]:
        return await threads.run(_read_gates, RunDirectory(self._home, run_id))

    async def decide(self, run_id: str, gate: str, decision: ReviewDecided) -> tuple[Gate, Obstacle] | None:
        directory = existing_run(run_id, self._home)
        return await threads.run(_record_decision, directory, gate, decision, patience_s=self._patience_s)

    async def find_answer(self, digest: str, *, since: float, run_id: str) -> Fact[ModelAnswered] | None:
        return await threads.run(self._find_answer, digest, since, run_id)

    async def offer_answers(self, run_id: str, answers: Sequence[OfferedAnswer]) -> None:
        await threads.run(index_of(self._home).add, run_id, answers)

    async def delete(self, run_id: str) -> None:
        await threads.run(existing_run(run_id, self._home).delete)
        await threads.run(index_of(self._home).drop, run_id)

    def _find_answer(self, digest: str, since: float, run_id: str) -> Fact[ModelAnswered] | None:
        found = index_of(self._home).find(digest, since, run_id)
        if found is None:
            return None
        answer = read_answer(RunDirectory(self._home, found[0]).path, *found)
        # The run may have been removed, and another run may have its id.
        return answer if answer is not None and answer.data.reuse_digest == digest else None

    def _gates(self) -> list[GatesOfRun]:
        found: list[GatesOfRun] = []
        for run in reversed(list_runs(self._home, self._ended)):
            if run.state.is_final:
                continue
            try:
                if facts := _read_gates(RunDirectory(self._home, run.run_id)):
                    found.append(GatesOfRun(run, facts))
            except RecordError as error:
                _log.warning("The review gates of run %s are not listed: %s", run.run_id, error)
        return found

    def _journal(self, directory: RunDirectory, *, is_buffered: bool, file: SqliteFile | None = None) -> SqliteJournal:
        return SqliteJournal(
            directory.path, directory.run_id, is_buffered=is_buffered, file=file, patience_s=self._patience_s
        )

    def _own(self, directory: RunDirectory, acquired: _Acquired, *, is_buffered: bool) -> OwnedRun:
        journal = self._journal(directory, is_buffered=is_buffered, file=acquired.file)
        return _OwnedRun(directory, journal, acquired.epoch)

    def _begin(self, directory: RunDirectory, origin: str, state: RunState) -> _Acquired:
        """Create the run, and open its file here, so that the first commit does not wait for that."""
        directory.begin(origin, state)
        with self._locked(directory) as lock:
            lock.acquire_or_raise(self._patience_s)
            return _Acquired(SqliteFile(directory.path), 0)

    def _claim(self, directory: RunDirectory, state: RunState, *, by_force: bool) -> _Acquired:
        with self._owning(directory, state, by_force=by_force):
            file = SqliteFile(directory.path)
            try:
                with file.transaction():
                    epoch = _raised_epoch(file)
            except BaseException:
                file.close()
                raise
        return _Acquired(file, epoch)

    def _accept_loss(self, directory: RunDirectory, *, by_force: bool) -> bool:
        """Record the loss, atomically for other processes, keep a copy of the log, and release the run."""
        if loss_in(directory.path, has_texts=True) is None:
            return False
        with self._owning(directory, RunState.PENDING, by_force=by_force):
            loss = loss_in(directory.path, has_texts=True)
            if loss is None:
                directory.ownership.release()
                return False
            if not loss.last:
                raise loss.error()
            kept = keep_log(loss.path)
            data = loss.accept(None if kept is None else kept.name).to_data()
            file = SqliteFile(directory.path, allows_loss=True)
            try:
                with file.transaction():
                    epoch = _raised_epoch(file)
                    row = (LossAccepted.KIND, RUN, LossAccepted.FENCE, time.time(), epoch, json.dumps(data))
                    file.add_in_transaction([row], {})
                file.reset_count()
            finally:
                file.close()
        directory.write_state(RunState.INTERRUPTED)
        _log.warning("Run %s can be resumed without its lost facts: %s", directory.run_id, loss.describe())
        return True

    @contextlib.contextmanager
    def _owning(self, directory: RunDirectory, state: RunState, *, by_force: bool) -> Generator[None]:
        """Own the run as its only writer inside the block. If the block fails, release the run."""
        with self._locked(directory) as lock:
            (lock.seize if by_force else lock.acquire_or_raise)(self._patience_s)
            directory.own(state, by_force=by_force)
            yield

    @contextlib.contextmanager
    def _locked(self, directory: RunDirectory) -> Generator[CommitLock]:
        lock = CommitLock(directory.path / COMMIT_LOCK)
        try:
            yield lock
        except (OSError, sqlite3.Error) as error:
            directory.ownership.release()
            raise cannot_write(directory.path / RECORD, error) from error
        except BaseException:
            directory.ownership.release()
            raise
        finally:
            lock.close()


def _raised_epoch(file: SqliteFile) -> int:
    epoch: int = max(file.epochs().values(), default=0) + OWNER_STEP
    file.raise_epoch(RUN, epoch)
    return epoch


async def _hold(directory: RunDirectory, work: Coroutine[Any, Any, T]) -> T:
    """Acquire the run. If the caller is cancelled, close the file and release the run after it."""

    async def release() -> None:
        try:
            acquired = await job
            if isinstance(acquired, _Acquired):
                await threads.run(acquired.file.close)
        finally:
            directory.ownership.release()

    job = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(job)
    except asyncio.CancelledError:
        releasing = asyncio.ensure_future(release())
        releasing.add_done_callback(lambda done: None if done.cancelled() else done.exception())
        raise


class _OwnedRun:
    def __init__(self, directory: RunDirectory, journal: SqliteJournal, epoch: int) -> None:
        self._directory = directory
        self.journal = journal
        self.epoch = epoch

    async def write_state(self, state: RunState) -> None:
        if self.journal.has_short_commits:  # the change of threads would take longer
            self._directory.write_state(state)
        else:
            await threads.run(self._directory.write_state, state)

    async def is_cancel_asked(self) -> bool:
        return self._directory.is_cancel_asked()

    async def close(self, state: RunState) -> None:
        try:
            await self.journal.close()
            await self.write_state(state)
        finally:
            self._directory.ownership.release()
