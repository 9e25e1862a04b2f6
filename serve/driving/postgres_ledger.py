"""PostgresLedger: what an endpoint accepted, in the database that its records lie in.

In: requests, as they are accepted. Out: the same after a restart on any machine. One process at a time has it: it holds a lock that
the server lets go with its connection, and writes under an epoch, so that one that was cut off and comes back changes nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble_ray import RunExistsError
from ensemble_ray.access.key_store import EndpointDatabase
from ensemble_ray.record.postgres.group import text_of_name
from ensemble_ray.serve.driving.ledger import COLUMNS, FINAL, LedgerEntry, LedgerLostError, entry_of, text_of
from ensemble_ray.serve.run_schemas import RunDetail, RunFilter, RunStatus

if TYPE_CHECKING:
    from ensemble_ray.access.key_store import Connection

T = TypeVar("T")

#: How often, and after which pause, s, a ledger is asked for that another process has: a server notices within some 15 s that
#: a whole machine is gone.
_TRIES, _PAUSE_S = 100, 0.5
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
        for _ in range(_TRIES - 1):
            with contextlib.suppress(RunExistsError):
                return self._database.run(self._claim)
            time.sleep(_PAUSE_S)
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
