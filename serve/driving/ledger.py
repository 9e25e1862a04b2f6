"""The accepted runs of an endpoint and their ends, in SQLite or PostgreSQL. Only one process may own a ledger."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ensemble_ray import RunExistsError
from ensemble_ray.access.key_store import EndpointDatabase
from ensemble_ray.record.postgres.journal import text_of_name
from ensemble_ray.record.stores import Ownership, StoreAddress
from ensemble_ray.serve.schemas import NewRun, RunDetail, RunFilter, RunStatus

if TYPE_CHECKING:
    from ensemble_ray.access.key_store import Connection

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run_id TEXT NOT NULL UNIQUE,
    key TEXT UNIQUE,
    digest TEXT NOT NULL,
    ensemble TEXT NOT NULL,
    request TEXT NOT NULL,
    tags TEXT NOT NULL,
    tasks INTEGER,
    workflow TEXT NOT NULL,
    status TEXT NOT NULL,
    created_at TEXT NOT NULL,
    ended_at TEXT,
    outcome TEXT
);
CREATE TABLE IF NOT EXISTS tags (
    seq INTEGER NOT NULL REFERENCES runs (seq) ON DELETE CASCADE,
    name TEXT NOT NULL,
    value TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS tags_by_value ON tags (name, value, seq);
CREATE INDEX IF NOT EXISTS runs_by_status ON runs (status, seq);
"""
#: Attempts and pause, s, for a ledger that an ending process still owns.
_TRIES, _PAUSE_S = 50, 0.2
#: A server needs about 15 s to notice the loss of a machine.
_SERVER_TRIES, _SERVER_PAUSE_S = 100, 0.5
COLUMNS = "seq, run_id, key, digest, ensemble, request, tags, tasks, workflow, status, created_at, ended_at, outcome"
FINAL = tuple(each.value for each in RunStatus if each.is_final)
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('ensemble_ray_endpoint:' || %s, 0))"
_CLAIM = """
INSERT INTO ensemble_ray_endpoint.endpoints AS e VALUES (%s, 1, %s)
ON CONFLICT (name) DO UPDATE SET epoch = e.epoch + 1, driver = excluded.driver RETURNING epoch
"""
#: A new owner waits for this lock.
_FENCE = "SELECT epoch FROM ensemble_ray_endpoint.endpoints WHERE name = %s FOR SHARE"
_ADD = """
INSERT INTO ensemble_ray_endpoint.runs
    (endpoint, run_id, key, digest, ensemble, request, tags, tasks, workflow, status, created_at)
VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (endpoint, run_id) DO NOTHING RETURNING seq
"""
_END = """
UPDATE ensemble_ray_endpoint.runs SET status = %s, ended_at = %s, outcome = %s, request = ''
WHERE endpoint = %s AND run_id = %s
"""
_DELETE_OLD = """
DELETE FROM ensemble_ray_endpoint.runs WHERE seq IN (
    SELECT seq FROM ensemble_ray_endpoint.runs WHERE endpoint = %s AND status = ANY(%s) ORDER BY seq DESC OFFSET %s
)
"""


class LedgerLostError(RunExistsError):
    """Another process owns the ledger now, and drives the runs (S-SRV-46)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    seq: int = 0
    run_id: str
    key: str | None
    #: equal digests mean equal requests; the run id does not count
    digest: str
    ensemble: str
    request: NewRun | None
    tags: Mapping[str, str]
    tasks: int | None
    workflow: str
    status: RunStatus
    created_at: datetime
    ended_at: datetime | None = None
    #: None before the end
    outcome: RunDetail | None = None


class RunLedger(Protocol):
    """The accepted runs of one endpoint. Calls block.

    They raise `LedgerLostError` if another process owns the ledger now, and `EnsembleError` if it cannot be reached.
    """

    def add(self, entry: LedgerEntry) -> None:
        """Store a run, so that it survives a crash and a loss of power."""
        ...

    def note(self, run_id: str, status: RunStatus) -> None: ...

    def end(self, run_id: str, outcome: RunDetail, *, kept: int) -> None:
        """Store the end of a run without its request. Only the newest `kept` ended runs remain."""
        ...

    def find(self, run_id: str) -> LedgerEntry | None: ...

    def find_key(self, key: str) -> LedgerEntry | None: ...

    def list_unfinished(self) -> Sequence[LedgerEntry]: ...

    def page(self, wanted: RunFilter, *, before: int | None, size: int) -> Sequence[LedgerEntry]:
        """Return the newest runs with a `seq` below `before`."""
        ...

    def close(self) -> None: ...


def open_ledger(address: StoreAddress, name: str, namespace: str = "") -> RunLedger:
    """Return the ledger of the endpoint `name` next to the records at `address`.

    Raises:
        RunExistsError: another process owns it and does not end.
        EnsembleError: the database cannot be reached.
    """
    own = part_of_name(name)
    if not address.url:
        return Ledger(Path(address.home) / "endpoint" / namespace / f"{own}.sqlite")
    return PostgresLedger(address.url, f"{namespace}/{own}" if namespace else own)


def part_of_name(endpoint: str) -> str:
    """Escape a name for use between slashes.

    Examples:
        >>> part_of_name("shop"), part_of_name("shop/eu")
        ('shop', 'shop%2Feu')
    """
    return endpoint.replace("%", "%25").replace("/", "%2F")


class _SqlLedger(ABC):
    """The queries of both ledgers, with `%s` for values."""

    _TAGS: ClassVar[str]

    def find(self, run_id: str) -> LedgerEntry | None:
        return next(iter(self._select("run_id = %s", [self._name_text(run_id)])), None)

    def find_key(self, key: str) -> LedgerEntry | None:
        return next(iter(self._select("key = %s", [self._name_text(key)])), None)

    def list_unfinished(self) -> Sequence[LedgerEntry]:
        return self._select(f"status NOT IN ({_marks(FINAL)}) ORDER BY seq", FINAL)

    def page(self, wanted: RunFilter, *, before: int | None, size: int) -> Sequence[LedgerEntry]:
        where, values = ["true"], list[object]()
        if before is not None:
            where.append("seq < %s")
            values.append(before)
        if wanted.status is not None:
            where.append("status = %s")
            values.append(wanted.status.value)
        if wanted.since is not None:
            where.append("created_at >= %s")
            values.append(text_of(wanted.since))
        if wanted.ensembles is not None:
            if not wanted.ensembles:
                return []
            where.append(f"ensemble IN ({_marks(wanted.ensembles)})")
            values += [self._name_text(each) for each in sorted(wanted.ensembles)]
        for name, value in wanted.tags.items():
            where.append(f"seq IN (SELECT seq FROM {self._TAGS} WHERE name = %s AND value = %s)")  # noqa: S608  our tables
            values += [self._tag_text(name), self._tag_text(value)]
        return self._select(f"{' AND '.join(where)} ORDER BY seq DESC LIMIT %s", [*values, size])

    def _values(self, entry: LedgerEntry) -> list[object]:
        """Return the values of a new row, from `run_id` to `created_at`."""
        assert entry.request is not None  # noqa: S101  an entry without one has ended
        return [
            self._name_text(entry.run_id),
            None if entry.key is None else self._name_text(entry.key),
            entry.digest,
            self._name_text(entry.ensemble),
            entry.request.model_dump_json(),
            json.dumps(dict(entry.tags)),
            entry.tasks,
            entry.workflow,
            entry.status.value,
            text_of(entry.created_at),
        ]

    def _name_text(self, name: str) -> str:
        return name

    def _tag_text(self, text: str) -> str:
        return text

    @abstractmethod
    def _select(self, where: str, values: Sequence[object]) -> list[LedgerEntry]: ...


def _marks(values: Collection[object]) -> str:
    return ", ".join(["%s"] * len(values))


class Ledger(_SqlLedger):
    """The runs of one endpoint in a SQLite file, or in memory without a path."""

    _TAGS = "tags"

    def __init__(self, path: Path | None) -> None:
        self._ownership: Ownership | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600, exist_ok=True)
            self._ownership = _own(path)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        self._connection.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON")
        self._connection.executescript(_SCHEMA)

    def add(self, entry: LedgerEntry) -> None:
        values = self._values(entry)
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            added = self._connection.execute(
                "INSERT INTO runs (run_id, key, digest, ensemble, request, tags, tasks, workflow, status, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                values,
            )
            tags = [(added.lastrowid, name, value) for name, value in entry.tags.items()]
            self._connection.executemany("INSERT INTO tags VALUES (?, ?, ?)", tags)

    def note(self, run_id: str, status: RunStatus) -> None:
        # After a loss of power, the resumed run stores it again.
        with self._lock:
            self._connection.execute("PRAGMA synchronous=NORMAL")
            try:
                self._connection.execute("UPDATE runs SET status = ? WHERE run_id = ?", (status.value, run_id))
            finally:
                self._connection.execute("PRAGMA synchronous=FULL")

    def end(self, run_id: str, outcome: RunDetail, *, kept: int) -> None:
        with self._lock, self._connection:
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.execute(
                "UPDATE runs SET status = ?, ended_at = ?, outcome = ?, request = '' WHERE run_id = ?",
                (outcome.status, text_of(outcome.ended_at or outcome.created_at), outcome.model_dump_json(), run_id),
            )
            marks = ", ".join("?" * len(FINAL))
            self._connection.execute(
                f"DELETE FROM runs WHERE seq IN (SELECT seq FROM runs WHERE status IN ({marks}) "  # noqa: S608  marks only
                "ORDER BY seq DESC LIMIT -1 OFFSET ?)",
                (*FINAL, kept),
            )

    def close(self) -> None:
        with self._lock:
            self._connection.close()
        if self._ownership is not None:
            self._ownership.release()

    def _select(self, where: str, values: Sequence[object]) -> list[LedgerEntry]:
        query = f"SELECT {COLUMNS} FROM runs WHERE {where}".replace("%s", "?")  # noqa: S608  conditions of ours, with marks
        with self._lock:
            rows = self._connection.execute(query, tuple(values)).fetchall()
        return [entry_of(row) for row in rows]


def _own(path: Path) -> Ownership:
    """Acquire a ledger, and wait for a process that is ending."""
    ownership = Ownership(path.with_suffix(".lock"))
    for _ in range(_TRIES):
        if ownership.acquire():
            return ownership
        time.sleep(_PAUSE_S)
    raise RunExistsError(
        f"Another endpoint of that name ({ownership.owner() or 'a process'}) drives the runs of {path}: stop it, choose another "
        "name, or another ENSEMBLE_RAY_HOME"
    )


def entry_of(
    row: tuple[int, str, str | None, str, str, str, str, int | None, str, str, str, str | None, str | None],
) -> LedgerEntry:
    seq, run_id, key, digest, ensemble, request, tags, tasks, workflow, status, created_at, ended_at, outcome = row
    return LedgerEntry(
        seq=seq,
        run_id=run_id,
        key=key,
        digest=digest,
        ensemble=ensemble,
        request=NewRun.model_validate_json(request) if request else None,
        tags=json.loads(tags),
        tasks=tasks,
        workflow=workflow,
        status=RunStatus(status),
        created_at=datetime.fromisoformat(created_at),
        ended_at=None if ended_at is None else datetime.fromisoformat(ended_at),
        outcome=None if outcome is None else RunDetail.model_validate_json(outcome),
    )


def text_of(instant: datetime) -> str:
    """Return a text that sorts by time."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds")


class PostgresLedger(_SqlLedger):
    """The runs of one endpoint in a database. Endpoints of the same name use it one after the other."""

    _TAGS = "ensemble_ray_endpoint.tags"

    def __init__(self, url: str, name: str) -> None:
        self._name = text_of_name(name)
        self._epoch: int | None = None
        self._database = EndpointDatabase(url, greet=self._lock)
        for _ in range(_SERVER_TRIES - 1):
            with contextlib.suppress(RunExistsError):
                self._epoch = self._database.run(self._claim)
                return
            time.sleep(_SERVER_PAUSE_S)
        self._epoch = self._database.run(self._claim)

    def add(self, entry: LedgerEntry) -> None:
        values = [self._name, *self._values(entry)]

        def operation(connection: Connection) -> None:
            added = connection.execute(_ADD, values).fetchone()
            for name, value in entry.tags.items() if added is not None else ():
                tag = [*(added or ()), json.dumps(name), json.dumps(value)]
                connection.execute("INSERT INTO ensemble_ray_endpoint.tags VALUES (%s, %s, %s)", tag)

        self._write(operation)

    def note(self, run_id: str, status: RunStatus) -> None:
        query = "UPDATE ensemble_ray_endpoint.runs SET status = %s WHERE endpoint = %s AND run_id = %s"
        values = [status.value, self._name, text_of_name(run_id)]
        self._write(lambda connection: connection.execute(query, values))

    def end(self, run_id: str, outcome: RunDetail, *, kept: int) -> None:
        ended_at = text_of(outcome.ended_at or outcome.created_at)
        values = [outcome.status, ended_at, outcome.model_dump_json(), self._name, text_of_name(run_id)]

        def operation(connection: Connection) -> None:
            connection.execute(_END, values)
            connection.execute(_DELETE_OLD, [self._name, list(FINAL), kept])

        self._write(operation)

    def close(self) -> None:
        self._database.close()

    def _name_text(self, name: str) -> str:
        return text_of_name(name)

    def _tag_text(self, text: str) -> str:
        return json.dumps(text)

    def _select(self, where: str, values: Sequence[object]) -> list[LedgerEntry]:
        query = f"SELECT {COLUMNS} FROM ensemble_ray_endpoint.runs WHERE endpoint = %s AND {where}"  # noqa: S608  conditions of ours, with marks
        found = [self._name, *values]
        rows: list[Any] = self._database.run(lambda connection: connection.execute(query.encode(), found).fetchall())
        return [entry_of(row) for row in rows]

    def _write(self, operation: Callable[[Connection], object]) -> None:
        """Change the ledger in a transaction, unless another process owns it now."""

        def fenced(connection: Connection) -> None:
            if _epoch_of(connection, self._name) != self._epoch:
                raise self._conflict(connection)
            operation(connection)

        self._database.run(fenced)

    def _lock(self, connection: Connection) -> None:
        """Lock the ledger for a connection.

        Raises `TimeoutError` if the server has not noticed yet that our previous connection is lost.
        """
        row = connection.execute(_LOCK, [self._name]).fetchone()
        if row is not None and row[0]:
            return
        if self._epoch is not None and _epoch_of(connection, self._name) == self._epoch:
            raise TimeoutError("the server still holds the connection that was lost")
        raise self._conflict(connection)

    def _claim(self, connection: Connection) -> int:
        row = connection.execute(_CLAIM, [self._name, f"process {os.getpid()} on {socket.gethostname()}"]).fetchone()
        assert row is not None  # noqa: S101  the statement always returns a row
        return int(row[0])

    def _conflict(self, connection: Connection) -> RunExistsError:
        query = "SELECT driver FROM ensemble_ray_endpoint.endpoints WHERE name = %s"
        row = connection.execute(query, [self._name]).fetchone()
        kind = RunExistsError if self._epoch is None else LedgerLostError
        return kind(
            f"Another endpoint of the name '{self._name}' ({'a process' if row is None else row[0]}) drives its runs in "
            f"{self._database.location}: stop it, or choose another name"
        )


def _epoch_of(connection: Connection, name: str) -> int | None:
    """Return the epoch of the owner and lock it for this transaction; None: there was no owner."""
    row = connection.execute(_FENCE, [name]).fetchone()
    return None if row is None else int(row[0])
