"""What an endpoint accepted, and what came of it: one SQLite file beside the records.

In: requests, as they are accepted. Out: the same after a restart, lists for clients, results of runs that ended. What happened inside a
run is in the run's record alone. Every call blocks for a moment: it is for threads. Never: two processes that have it open, and would
both drive its runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble_ray import RunExistsError
from ensemble_ray.access.key_store import EndpointDatabase
from ensemble_ray.record.postgres.journal import text_of_name
from ensemble_ray.record.stores import Ownership
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
#: How often, and after which pause, s, a ledger is asked for that a process which is ending still has.
_TRIES, _PAUSE_S = 50, 0.2
#: In the order in which `entry_of` takes them.
COLUMNS = "seq, run_id, key, digest, ensemble, request, tags, tasks, workflow, status, created_at, ended_at, outcome"
#: States that a run stays in.
FINAL = tuple(each.value for each in RunStatus if each.is_final)


class LedgerLostError(RunExistsError):
    """A process had a ledger, and another one has it now: it drives the runs from now on (S-SRV-46)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerEntry:
    """A run that was accepted."""

    seq: int = 0
    run_id: str
    #: the client's name for the request; None: it gave none
    key: str | None
    #: of the request but for its run id; tells whether another request is the same
    digest: str
    ensemble: str
    #: None once the run ended
    request: NewRun | None
    tags: Mapping[str, str]
    tasks: int | None
    workflow: str
    status: RunStatus
    created_at: datetime
    ended_at: datetime | None = None
    #: result and error; None as long as the run goes on
    outcome: RunDetail | None = None


class Ledger:
    """The runs of one endpoint."""

    def __init__(self, path: Path | None) -> None:
        """Open the file, or make it.

        Args:
            path: Where it lies; None: in memory, for an endpoint whose runs end with its process.

        Raises:
            RunExistsError: another process has it open, and does not end.
        """
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
        """Keep a run that is accepted; when this returns it survives the process, and a loss of power."""
        assert entry.request is not None  # noqa: S101  an entry without one has ended
        values = (
            entry.run_id,
            entry.key,
            entry.digest,
            entry.ensemble,
            entry.request.model_dump_json(),
            json.dumps(dict(entry.tags)),
            entry.tasks,
            entry.workflow,
            entry.status.value,
            text_of(entry.created_at),
        )
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
        """Note how a run stands that has not ended; it may be lost with the machine's power, and is noted again then."""
        with self._lock:
            self._connection.execute("PRAGMA synchronous=NORMAL")
            try:
                self._connection.execute("UPDATE runs SET status = ? WHERE run_id = ?", (status.value, run_id))
            finally:
                self._connection.execute("PRAGMA synchronous=FULL")

    def end(self, run_id: str, outcome: RunDetail, *, kept: int) -> None:
        """Note what became of a run; its request is kept no more.

        Args:
            run_id: The run's id.
            outcome: Its last state.
            kept: How many runs that ended are kept.
        """
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

    def find(self, run_id: str) -> LedgerEntry | None:
        """Return the run of that id; None when there is none."""
        return self._one("run_id = ?", run_id)

    def find_key(self, key: str) -> LedgerEntry | None:
        """Return the run that was asked for under that key; None when there is none."""
        return self._one("key = ?", key)

    def list_unfinished(self) -> Sequence[LedgerEntry]:
        """Return the runs that have not ended, oldest first."""
        marks = ", ".join("?" * len(FINAL))
        return self._select(f"status NOT IN ({marks}) ORDER BY seq", FINAL)

    def page(self, wanted: RunFilter, *, before: int | None, size: int) -> Sequence[LedgerEntry]:
        """Return runs, newest first.

        Args:
            wanted: Which ones.
            before: Only those with a smaller `seq`; None: from the newest on.
            size: How many at most.
        """
        where, values = ["1"], list[object]()
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
            where.append(f"ensemble IN ({', '.join('?' * len(wanted.ensembles))})")
            values += sorted(wanted.ensembles)
        for name, value in wanted.tags.items():
            where.append("seq IN (SELECT seq FROM tags WHERE name = ? AND value = ?)")
            values += [name, value]
        return self._select(f"{' AND '.join(where)} ORDER BY seq DESC LIMIT ?", (*values, size))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._connection.close()
        if self._ownership is not None:
            self._ownership.release()

    def _one(self, where: str, value: str) -> LedgerEntry | None:
        return next(iter(self._select(where, (value,))), None)

    def _select(self, where: str, values: Sequence[object]) -> list[LedgerEntry]:
        query = f"SELECT {COLUMNS} FROM runs WHERE {where}"  # noqa: S608  conditions of ours, with marks
        with self._lock:
            rows = self._connection.execute(query, tuple(values)).fetchall()
        return [entry_of(row) for row in rows]


def _own(path: Path) -> Ownership:
    """Own a ledger, as soon as a process that is just ending has let it go.

    Raises:
        RunExistsError: it does not.
    """
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
    """Return the entry of a row of `COLUMNS`."""
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
    """Return an instant as text that sorts by time."""
    return instant.astimezone(UTC).isoformat(timespec="microseconds")


T = TypeVar("T")

#: How often, and after which pause, s, a ledger is asked for that another process has: a server notices within some 15 s that
#: a whole machine is gone.
_TRIES_POSTGRES_LEDGER, _PAUSE_S_POSTGRES_LEDGER = 100, 0.5
_LOCK = "SELECT pg_try_advisory_lock(hashtextextended('ensemble_ray_endpoint:' || %s, 0))"
_CLAIM = """
INSERT INTO ensemble_ray_endpoint.endpoints AS e VALUES (%s, 1, %s)
ON CONFLICT (name) DO UPDATE SET epoch = e.epoch + 1, driver = excluded.driver RETURNING epoch
"""
#: Held to the end of the transaction: whoever claims the ledger waits for what is being written.
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
_FORGET = """
DELETE FROM ensemble_ray_endpoint.runs WHERE seq IN (
    SELECT seq FROM ensemble_ray_endpoint.runs WHERE endpoint = %s AND status = ANY(%s) ORDER BY seq DESC OFFSET %s
)
"""


class PostgresLedger:
    """The runs of one endpoint, by its name; fulfils `RunLedger`.

    Args:
        url: The database.
        name: The endpoint's; those of one name share a ledger, one after the other.

    Raises:
        RunExistsError: another process has it, and does not end.
        EnsembleError: the database cannot be reached, or refuses.
    """

    def __init__(self, url: str, name: str) -> None:
        self._name = text_of_name(name)
        self._epoch: int | None = None
        self._database = EndpointDatabase(url, greet=self._lock)
        self._epoch = self._claim_patiently()

    def add(self, entry: LedgerEntry) -> None:
        """Keep a run that is accepted; when this returns it survives the process, and a loss of this machine."""
        assert entry.request is not None  # noqa: S101  an entry without one has ended
        values = [
            self._name,
            text_of_name(entry.run_id),
            None if entry.key is None else text_of_name(entry.key),
            entry.digest,
            text_of_name(entry.ensemble),
            entry.request.model_dump_json(),
            json.dumps(dict(entry.tags)),
            entry.tasks,
            entry.workflow,
            entry.status.value,
            text_of(entry.created_at),
        ]

        def operation(connection: Connection) -> None:
            added = connection.execute(_ADD, values).fetchone()
            for name, value in entry.tags.items() if added is not None else ():
                tag = [*(added or ()), json.dumps(name), json.dumps(value)]
                connection.execute("INSERT INTO ensemble_ray_endpoint.tags VALUES (%s, %s, %s)", tag)

        self._write(operation)

    def note(self, run_id: str, status: RunStatus) -> None:
        """Note how a run stands that has not ended."""
        query = "UPDATE ensemble_ray_endpoint.runs SET status = %s WHERE endpoint = %s AND run_id = %s"
        values = [status.value, self._name, text_of_name(run_id)]
        self._write(lambda connection: connection.execute(query, values))

    def end(self, run_id: str, outcome: RunDetail, *, kept: int) -> None:
        """Note what became of a run; see `RunLedger.end`."""
        ended_at = text_of(outcome.ended_at or outcome.created_at)
        values = [outcome.status, ended_at, outcome.model_dump_json(), self._name, text_of_name(run_id)]

        def operation(connection: Connection) -> None:
            connection.execute(_END, values)
            connection.execute(_FORGET, [self._name, list(FINAL), kept])

        self._write(operation)

    def find(self, run_id: str) -> LedgerEntry | None:
        """Return the run of that id; None when there is none."""
        return next(iter(self._select("run_id = %s", [text_of_name(run_id)])), None)

    def find_key(self, key: str) -> LedgerEntry | None:
        """Return the run that was asked for under that key; None when there is none."""
        return next(iter(self._select("key = %s", [text_of_name(key)])), None)

    def list_unfinished(self) -> Sequence[LedgerEntry]:
        """Return the runs that have not ended, oldest first."""
        return self._select("status <> ALL(%s) ORDER BY seq", [list(FINAL)])

    def page(self, wanted: RunFilter, *, before: int | None, size: int) -> Sequence[LedgerEntry]:
        """Return runs, newest first; see `Ledger.page`."""
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
            where.append("ensemble = ANY(%s)")
            values.append([text_of_name(each) for each in sorted(wanted.ensembles)])
        for name, value in wanted.tags.items():
            where.append("seq IN (SELECT seq FROM ensemble_ray_endpoint.tags WHERE name = %s AND value = %s)")
            values += [json.dumps(name), json.dumps(value)]
        return self._select(f"{' AND '.join(where)} ORDER BY seq DESC LIMIT %s", [*values, size])

    def close(self) -> None:
        """Let go of it, so that another process may have it."""
        self._database.close()

    def _select(self, where: str, values: Sequence[object]) -> list[LedgerEntry]:
        query = f"SELECT {COLUMNS} FROM ensemble_ray_endpoint.runs WHERE endpoint = %s AND {where}"  # noqa: S608  conditions of ours, with marks

        def operation(connection: Connection) -> list[Any]:
            return connection.execute(query.encode(), [self._name, *values]).fetchall()

        return [entry_of(row) for row in self._database.run(operation)]

    def _write(self, operation: Callable[[Connection], object]) -> None:
        """Change the ledger, as long as it is this process's.

        Raises:
            LedgerLostError: another process has it now.
        """

        def fenced(connection: Connection) -> None:
            if _epoch_of(connection, self._name) != self._epoch:
                raise self._conflict(connection)
            operation(connection)

        self._database.run(fenced)

    def _lock(self, connection: Connection) -> None:
        """Hold the ledger with a connection.

        Raises:
            RunExistsError: another process has it.
            TimeoutError: the server does not know yet that the connection is lost that had it before.
        """
        row = connection.execute(_LOCK, [self._name]).fetchone()
        if row is not None and row[0]:
            return
        if self._epoch is not None and _epoch_of(connection, self._name) == self._epoch:
            raise TimeoutError("the server still holds the connection that was lost")
        raise self._conflict(connection)

    def _claim_patiently(self) -> int:
        """Claim the ledger, as soon as a process that is just ending has let it go; return the epoch to write under."""
        for _ in range(_TRIES_POSTGRES_LEDGER - 1):
            with contextlib.suppress(RunExistsError):
                return self._database.run(self._claim)
            time.sleep(_PAUSE_S_POSTGRES_LEDGER)
        return self._database.run(self._claim)

    def _claim(self, connection: Connection) -> int:
        row = connection.execute(_CLAIM, [self._name, f"process {os.getpid()} on {socket.gethostname()}"]).fetchone()
        assert row is not None  # noqa: S101  what is inserted or updated is returned
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
    """Return the epoch of a ledger's owner, which stays until the transaction ends; None: it never had one."""
    row = connection.execute(_FENCE, [name]).fetchone()
    return None if row is None else int(row[0])
