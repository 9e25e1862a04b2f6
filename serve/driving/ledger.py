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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, cast

from msgspec import Struct

from ensemble_ray import RunExistsError
from ensemble_ray.access.key_store import RUN_COLUMNS, EndpointDatabase
from ensemble_ray.process.postgres_server import Connection, value_of
from ensemble_ray.record.postgres.journal import text_of_name
from ensemble_ray.record.stores import Ownership, StoreAddress
from ensemble_ray.serve.schemas import NewRun, RunDetail, RunFilter, RunStatus

_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(map(" ".join, RUN_COLUMNS.items()))}, UNIQUE (run_id), UNIQUE (key)
);
CREATE TABLE IF NOT EXISTS tags (
    seq INTEGER NOT NULL REFERENCES runs (seq) ON DELETE CASCADE,
    name TEXT NOT NULL,
    value TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS tags_by_value ON tags (name, value, seq);
CREATE INDEX IF NOT EXISTS runs_by_status ON runs (status, seq);
CREATE TABLE IF NOT EXISTS documents (kind TEXT NOT NULL, name TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (kind, name));
"""
_DOCUMENTS = b"""
CREATE TABLE ensemble_ray_endpoint.documents (
    endpoint text NOT NULL REFERENCES ensemble_ray_endpoint.endpoints (name) ON DELETE CASCADE,
    kind text NOT NULL,
    name text COLLATE "C" NOT NULL,
    text text NOT NULL,
    PRIMARY KEY (endpoint, kind, name)
)
"""
#: Attempts and pause, s, for a ledger that an ending process still owns.
_TRIES, _PAUSE_S = 50, 0.2
#: A server needs about 15 s to notice the loss of a machine.
_SERVER_TRIES, _SERVER_PAUSE_S = 100, 0.5
FINAL = tuple(each.value for each in RunStatus if each.is_final)
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('ensemble_ray_endpoint:' || %s, 0))"
_CLAIM = """
INSERT INTO ensemble_ray_endpoint.endpoints AS e VALUES (%s, 1, %s)
ON CONFLICT (name) DO UPDATE SET epoch = e.epoch + 1, driver = excluded.driver RETURNING epoch
"""
#: The epoch of the owner. A new owner waits for the lock of this row.
_FENCE = "SELECT epoch FROM ensemble_ray_endpoint.endpoints WHERE name = %s FOR SHARE"
#: Runs a statement, and returns the number of rows that it changed.
Execute = Callable[[str, Sequence[object]], int]


class LedgerLostError(RunExistsError):
    """Another process owns the ledger now, and drives the runs (S-SRV-46)."""


class LedgerEntry(Struct, frozen=True, kw_only=True):
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

    @property
    def version(self) -> str | None:
        """Version of the team's file with which the run was accepted; None: the team had no file."""
        known = self.request or self.outcome
        return None if known is None else known.version


class Document(Struct, frozen=True, kw_only=True):
    """State of an endpoint beside its runs, such as a schedule, by kind and name."""

    kind: str
    name: str
    #: JSON; None deletes the document
    text: str | None


class RunLedger(Protocol):
    """The accepted runs and the documents of one endpoint. Calls block.

    They raise `LedgerLostError` if another process owns the ledger now, and `EnsembleError` if it cannot be reached.
    """

    def add(self, entry: LedgerEntry, *documents: Document) -> None:
        """Store a run and documents in one step, so that they survive a crash and a loss of power."""
        ...

    def note(self, run_id: str, status: RunStatus) -> None: ...

    def end(self, run_id: str, outcome: RunDetail, *documents: Document, kept: int) -> None:
        """Store the end of a run, without its request, and documents. Only the newest `kept` ended runs remain."""
        ...

    def put(self, *documents: Document) -> None:
        """Store, replace or delete documents in one step, so that they survive a loss of power."""
        ...

    def documents(self, kind: str, *, prefix: str = "") -> Mapping[str, str]:
        """Return the texts of a kind by name, sorted by name. With `prefix`, only of names that begin with it."""
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
    """The statements of both ledgers. Their tables are in the schema `main`, and `?` marks a value."""

    #: columns and values of the runs of this endpoint
    _own: Mapping[str, str] = MappingProxyType({})

    def add(self, entry: LedgerEntry, *documents: Document) -> None:
        values = {**self._own, **self._values(entry)}
        columns, identity = ", ".join(values), ", ".join([*self._own, "run_id"])
        # A repetition after a lost answer adds nothing.
        add = f"INSERT INTO main.runs ({columns}) VALUES ({_marks(values)}) ON CONFLICT ({identity}) DO NOTHING"  # noqa: S608  columns of ours
        tag = f"INSERT INTO main.tags SELECT seq, ?, ? FROM main.runs WHERE {self._where('run_id = ?')}"  # noqa: S608  columns of ours
        tags = [[self._tag_text(name), self._tag_text(value)] for name, value in entry.tags.items()]

        def operation(execute: Execute) -> None:
            if execute(add, list(values.values())):
                for each in tags:
                    execute(tag, [*each, *self._named(entry.run_id)])
            self._put(execute, documents)

        self._write(operation)

    def note(self, run_id: str, status: RunStatus) -> None:
        query = f"UPDATE main.runs SET status = ? WHERE {self._where('run_id = ?')}"  # noqa: S608  columns of ours
        # After a loss of power, the resumed run stores it again.
        self._write(lambda execute: execute(query, [status.value, *self._named(run_id)]), is_synced=False)

    def end(self, run_id: str, outcome: RunDetail, *documents: Document, kept: int) -> None:
        run, ended = self._where("run_id = ?"), self._where(f"status IN ({_marks(FINAL)})")
        end = f"UPDATE main.runs SET status = ?, ended_at = ?, outcome = ?, request = '' WHERE {run}"  # noqa: S608  columns of ours
        ended_at = text_of(outcome.ended_at or outcome.created_at)
        delete = (
            f"DELETE FROM main.runs WHERE seq IN (SELECT seq FROM main.runs WHERE {ended} ORDER BY seq DESC "  # noqa: S608  marks only
            "LIMIT 9223372036854775807 OFFSET ?)"  # SQLite has no offset without a limit
        )

        def operation(execute: Execute) -> None:
            execute(end, [outcome.status, ended_at, outcome.model_dump_json(), *self._named(run_id)])
            execute(delete, [*self._own.values(), *FINAL, kept])
            self._put(execute, documents)

        self._write(operation)

    def put(self, *documents: Document) -> None:
        self._write(lambda execute: self._put(execute, documents))

    def documents(self, kind: str, *, prefix: str = "") -> Mapping[str, str]:
        where = self._where("kind = ? AND substr(name, 1, ?) = ? ORDER BY name")
        query = f"SELECT name, text FROM main.documents WHERE {where}"  # noqa: S608  conditions of ours, with marks
        start = self._name_text(prefix)
        rows = self._rows(query, [*self._own.values(), kind, len(start), start])
        return dict(rows)

    def _put(self, execute: Execute, documents: Iterable[Document]) -> None:
        identity = [*self._own, "kind", "name"]
        delete = f"DELETE FROM main.documents WHERE {self._where('kind = ? AND name = ?')}"  # noqa: S608  columns of ours
        put = (
            f"INSERT INTO main.documents ({', '.join(identity)}, text) VALUES ({_marks([*identity, 'text'])}) "  # noqa: S608  columns of ours
            f"ON CONFLICT ({', '.join(identity)}) DO UPDATE SET text = excluded.text"
        )
        for each in documents:
            values = [*self._own.values(), each.kind, self._name_text(each.name)]
            if each.text is None:
                execute(delete, values)
            else:
                execute(put, [*values, each.text])

    def find(self, run_id: str) -> LedgerEntry | None:
        return next(iter(self._select("run_id = ?", [self._name_text(run_id)])), None)

    def find_key(self, key: str) -> LedgerEntry | None:
        return next(iter(self._select("key = ?", [self._name_text(key)])), None)

    def list_unfinished(self) -> Sequence[LedgerEntry]:
        return self._select(f"status NOT IN ({_marks(FINAL)}) ORDER BY seq", FINAL)

    def page(self, wanted: RunFilter, *, before: int | None, size: int) -> Sequence[LedgerEntry]:
        where, values = ["true"], list[object]()
        if before is not None:
            where.append("seq < ?")
            values.append(before)
        if wanted.status is not None:
            where.append("status = ?")
            values.append(wanted.status.value)
        if wanted.since is not None:
            where.append("created_at >= ?")
            values.append(text_of(wanted.since))
        if wanted.ensembles is not None:
            if not wanted.ensembles:
                return []
            where.append(f"ensemble IN ({_marks(wanted.ensembles)})")
            values += [self._name_text(each) for each in sorted(wanted.ensembles)]
        for name, value in wanted.tags.items():
            where.append("seq IN (SELECT seq FROM main.tags WHERE name = ? AND value = ?)")
            values += [self._tag_text(name), self._tag_text(value)]
        return self._select(f"{' AND '.join(where)} ORDER BY seq DESC LIMIT ?", [*values, size])

    def _values(self, entry: LedgerEntry) -> dict[str, object]:
        """Return columns and values of a new row."""
        assert entry.request is not None  # noqa: S101  an entry without one has ended
        return {
            "run_id": self._name_text(entry.run_id),
            "key": None if entry.key is None else self._name_text(entry.key),
            "digest": entry.digest,
            "ensemble": self._name_text(entry.ensemble),
            "request": entry.request.model_dump_json(),
            "tags": json.dumps(dict(entry.tags)),
            "tasks": entry.tasks,
            "workflow": entry.workflow,
            "status": entry.status.value,
            "created_at": text_of(entry.created_at),
        }

    def _where(self, condition: str) -> str:
        """Return a condition for the runs of this endpoint."""
        return " AND ".join([*(f"{column} = ?" for column in self._own), condition])

    def _named(self, run_id: str) -> list[object]:
        return [*self._own.values(), self._name_text(run_id)]

    def _select(self, where: str, values: Sequence[object]) -> list[LedgerEntry]:
        query = f"SELECT seq, {', '.join(RUN_COLUMNS)} FROM main.runs WHERE {self._where(where)}"  # noqa: S608  conditions of ours, with marks
        return [entry_of(row) for row in self._rows(query, [*self._own.values(), *values])]

    def _name_text(self, name: str) -> str:
        return name

    def _tag_text(self, text: str) -> str:
        return text

    @abstractmethod
    def _rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]: ...

    @abstractmethod
    def _write(self, operation: Callable[[Execute], object], *, is_synced: bool = True) -> None:
        """Change the ledger in a transaction."""


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))


class Ledger(_SqlLedger):
    """The runs of one endpoint in a SQLite file, or in memory without a path."""

    def __init__(self, path: Path | None) -> None:
        self._ownership: Ownership | None = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600, exist_ok=True)
            self._ownership = _acquire(path)
        self._lock = threading.Lock()
        self._connection = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
        self._connection.executescript("PRAGMA journal_mode=WAL; PRAGMA foreign_keys=ON")
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        with self._lock:
            self._connection.close()
        if self._ownership is not None:
            self._ownership.release()

    def _rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        with self._lock:
            return self._connection.execute(query, values).fetchall()

    def _write(self, operation: Callable[[Execute], object], *, is_synced: bool = True) -> None:
        with self._lock:
            self._connection.execute(f"PRAGMA synchronous={'FULL' if is_synced else 'NORMAL'}")
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                operation(lambda query, values: self._connection.execute(query, values).rowcount)


def _acquire(path: Path) -> Ownership:
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


def entry_of(row: tuple[Any, ...]) -> LedgerEntry:
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

    def __init__(self, url: str, name: str) -> None:
        self._name = text_of_name(name)
        self._own = {"endpoint": self._name}
        self._epoch: int | None = None
        self._database = EndpointDatabase(url, greet=self._lock)
        for _ in range(_SERVER_TRIES - 1):
            with contextlib.suppress(RunExistsError):
                self._epoch = self._database.run(self._claim)
                return
            time.sleep(_SERVER_PAUSE_S)
        self._epoch = self._database.run(self._claim)

    def close(self) -> None:
        self._database.close()

    def _name_text(self, name: str) -> str:
        return text_of_name(name)

    def _tag_text(self, text: str) -> str:
        return json.dumps(text)

    def _rows(self, query: str, values: Sequence[object]) -> list[tuple[Any, ...]]:
        return self._database.rows(query, *values)

    def _write(self, operation: Callable[[Execute], object], *, is_synced: bool = True) -> None:  # noqa: ARG002  the server syncs all
        """Change the ledger in a transaction, unless another process owns it now."""

        def fenced(connection: Connection) -> None:
            if value_of(connection, _FENCE, self._name) != self._epoch:
                raise self._conflict(connection)
            operation(lambda query, values: connection.execute(self._database.translate(query), values).rowcount)

        self._database.transact(fenced)

    def _lock(self, connection: Connection) -> None:
        """Create what an earlier version lacks, and lock the ledger for a connection.

        Raises `TimeoutError` if the server has not noticed yet that our previous connection is lost.
        """
        self._database.create_once(connection, "documents", lambda made: made.execute(_DOCUMENTS))
        if value_of(connection, _LOCK, self._name):
            return
        if self._epoch is not None and value_of(connection, _FENCE, self._name) == self._epoch:
            raise TimeoutError("the server still holds the connection that was lost")
        raise self._conflict(connection)

    def _claim(self, connection: Connection) -> int:
        return cast("int", value_of(connection, _CLAIM, self._name, f"process {os.getpid()} on {socket.gethostname()}"))

    def _conflict(self, connection: Connection) -> RunExistsError:
        query = "SELECT driver FROM ensemble_ray_endpoint.endpoints WHERE name = %s"
        driver = value_of(connection, query, self._name)
        kind = RunExistsError if self._epoch is None else LedgerLostError
        return kind(
            f"Another endpoint of the name '{self._name}' ({driver or 'a process'}) drives its runs in "
            f"{self._database.location}: stop it, or choose another name"
        )
