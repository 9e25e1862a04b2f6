"""The index of answers that later runs may reuse: one SQLite file for all runs of a home. All functions block.

It has no texts: an entry names a model call in the record of a run.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import cast

from ensemble_ray.errors import RecordError
from ensemble_ray.ports import OfferedAnswer
from ensemble_ray.process.concurrency import abandon, new_lock, no_fork, track, was_quiet
from ensemble_ray.record.sqlite.file import BUSY_S

FILE = "answers.sqlite"
_TABLES = """
PRAGMA journal_mode=WAL;
CREATE TABLE IF NOT EXISTS answers (digest TEXT PRIMARY KEY, run TEXT NOT NULL, name TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS answers_of_run ON answers (run);
"""


class AnswerIndex:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = new_lock()
        self._connection: sqlite3.Connection | None = None
        track(self)

    def add(self, run_id: str, answers: Sequence[OfferedAnswer]) -> None:
        rows = [(digest, run_id, name, at) for digest, name, at in answers]
        with self._using() as connection:
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", rows)
            connection.execute("COMMIT")

    def find(self, digest: str, since: float, run_id: str) -> tuple[str, str] | None:
        """Return run and name of the model call; None if there is none of another run."""
        if self._connection is None and not self.path.exists():
            return None
        query = "SELECT run, name FROM answers WHERE digest = ? AND at >= ? AND run <> ?"
        with self._using() as connection:
            return cast("tuple[str, str] | None", connection.execute(query, (digest, since, run_id)).fetchone())

    def drop(self, run_id: str) -> None:
        if self.path.exists():
            with self._using() as connection:
                connection.execute("DELETE FROM answers WHERE run = ?", (run_id,))

    def after_fork(self) -> None:
        """Drop the connection of the parent; close it only if it was idle."""
        if was_quiet() and self._connection is not None:
            self._connection.close()
        else:
            abandon(self._connection)
        self._connection = None

    @contextmanager
    def _using(self) -> Generator[sqlite3.Connection]:
        with self._lock, no_fork():
            try:
                if self._connection is None or not self.path.exists():
                    self._connection = self._open()
                yield self._connection
            except (OSError, sqlite3.Error) as error:
                if self._connection is not None:
                    self._connection.close()  # rolls back
                    self._connection = None
                raise RecordError(
                    f"Cannot use the index of reusable answers {self.path}: {error}. "
                    "Runs do not need it: it can be removed with its -wal and -shm files while no run is active",
                    str(self.path),
                ) from error

    def _open(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.touch(mode=0o600)
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            connection.executescript(_TABLES)
            connection.execute("PRAGMA synchronous=NORMAL")  # a power failure may lose the last entries
        except BaseException:
            connection.close()
            raise
        return connection


@lru_cache(maxsize=16)
def index_of(home: Path) -> AnswerIndex:
    return AnswerIndex(home / FILE)
