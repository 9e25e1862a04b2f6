"""How a PostgreSQL server is reached, what its sessions are told, and which of its failures pass.

In: a URL. Out: parameters of connections, texts for people. Never: a password in a text of ours; psycopg imported before a
database is asked for.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.process.context import bounded_logger

T = TypeVar("T")

_log = bounded_logger(__name__)

#: Waits between tries to reach the server again, s; the last one repeats.
BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)
#: How a dead peer is noticed, for what the URL leaves open: after about 15 s in silence, 10 s with data under way.
_REACH = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "application_name": "ensemble_ray",
}
#: What every session is told: commits are on the disk; a client that freezes inside a transaction, or dies with its
#: host, holds its locks for seconds, not for the hours of TCP's defaults.
SESSION: Mapping[str, str] = {
    "synchronous_commit": "on",
    "client_encoding": "UTF8",
    "idle_in_transaction_session_timeout": "10s",
    "lock_timeout": "10s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
}
#: Tells a session; takes names and values.
SET_SESSION = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS s (name, value)"
#: SQLSTATE of failures that pass: lost connections, restarts, too many clients, deadlocks, locks that took long.
_PASSING = ("08", "57P01", "57P02", "57P03", "53300", "40001", "40P01", "55P03", "25P03")
_ADVICE = {
    "53100": "The server's disk is full: free space there",
    "53200": "The server has no memory left",
    "25006": "The server only reads: use the URL of the primary",
}


def parameters_of(url: str, *, needed_by: str) -> dict[str, Any]:
    """Return the parameters of connections to the database of a URL.

    Args:
        url: The URL.
        needed_by: What needs the driver, for messages: `Records in PostgreSQL need`.

    Raises:
        ValidationError: the driver is not installed, or it is no URL of a database.
    """
    try:
        importlib.import_module("psycopg")
    except ImportError as error:
        msg = f"{needed_by} the package psycopg: pip install 'ensemble-ray[postgres]'"
        raise ValidationError(msg) from error
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        given = {key: value for key, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.Error:
        msg = "The URL of the store cannot be read: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        raise ValidationError(msg) from None  # the driver's text repeats the URL, with its password
    return {**_REACH, **given}


def location_of(parameters: Mapping[str, Any]) -> str:
    """Return the database for people: no user, no password."""
    host, port, name = (
        str(parameters.get("host", "")),
        str(parameters.get("port", "5432")),
        str(parameters.get("dbname", "")),
    )
    if not host or host.startswith("/"):
        return f"postgresql:///{name}" + (f"?host={host}" if host else "")
    return f"postgresql://{host}:{port}/{name}"


def is_passing(error: BaseException) -> bool:
    """Return whether trying again may help."""
    import psycopg

    if isinstance(error, TimeoutError):
        return True
    state = getattr(error, "sqlstate", None)
    if state is None:  # no answer of a server at all
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return str(state).startswith(_PASSING)


def advice_for(error: BaseException, *, schema: str) -> str:
    """Return what a person can do about a failure, who uses tables of that schema."""
    if is_passing(error):
        return "Check that the server runs and that URL, user and password are right"
    state = str(getattr(error, "sqlstate", None) or "")
    if state == "42501":
        return f"The user needs the right to create the schema '{schema}', or to use its tables"
    return _ADVICE.get(state, "The server's log may tell more")


def first_line(error: BaseException) -> str:
    """Return what a failure says, in one line without its full stop."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer"
    return message_of(error).strip().splitlines()[0].rstrip(".")


def try_patiently(
    attempt: Callable[[Callable[[], None]], T],
    *,
    location: str,
    patience_s: float,
    is_repeatable: bool,
    failure: Callable[[BaseException], Exception],
) -> T:
    """Do something with a server; where it is lost, again as soon as it is back. Blocks: it is for threads.

    Args:
        attempt: What is done; it calls its argument once it has a connection, before it changes anything.
        location: The database, for people.
        patience_s: How long a server that cannot be reached is waited for.
        is_repeatable: Whether doing it twice is the same as doing it once. Else it is not done again once it has begun: whether
            the server did it before it was lost, nobody knows.
        failure: Makes the error that is raised of the one that came last.
    """
    import psycopg

    deadline = time.monotonic() + patience_s
    tries = 0
    while True:
        begun: list[bool] = []
        try:
            return attempt(lambda begun=begun: begun.append(True))  # type: ignore[misc]  # that of this try
        except (psycopg.Error, TimeoutError) as error:
            delay = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            may_repeat = is_repeatable or not begun
            if not is_passing(error) or not may_repeat or time.monotonic() + delay > deadline:
                raise failure(error) from error
            if not tries:
                _log.warning("Lost the database %s, trying again: %s", location, first_line(error))
        tries += 1
        time.sleep(delay)
