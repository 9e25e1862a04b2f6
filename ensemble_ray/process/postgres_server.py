"""Connections to PostgreSQL: parameters, retries, and messages about failures without a password."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ensemble_ray.errors import ValidationError, message_of
from ensemble_ray.process.context import bounded_logger

T = TypeVar("T")

_log = bounded_logger(__name__)

BACKOFF_S = (0.05, 0.1, 0.2, 0.5, 1.0)  # between attempts to reach the server; the last one repeats
#: A dead peer is detected after about 15 s of silence, or 10 s with unacknowledged data.
_REACH = {
    "connect_timeout": "5",
    "keepalives_idle": "5",
    "keepalives_interval": "3",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
    "application_name": "ensemble_ray",
}
#: Commits are on disk. A client that freezes inside a transaction, or dies with its host, holds its locks for seconds;
#: TCP's defaults are hours.
SESSION: Mapping[str, str] = {
    "synchronous_commit": "on",
    "client_encoding": "UTF8",
    "idle_in_transaction_session_timeout": "10s",
    "lock_timeout": "10s",
    "tcp_keepalives_idle": "5",
    "tcp_keepalives_interval": "3",
    "tcp_keepalives_count": "3",
}
#: Parameters are names and values.
SET_SESSION = "SELECT set_config(name, value, false) FROM unnest(%s::text[], %s::text[]) AS s (name, value)"
#: SQLSTATE of temporary failures: lost connections, restarts, too many clients, deadlocks, lock timeouts.
_PASSING = ("08", "57P01", "57P02", "57P03", "53300", "40001", "40P01", "55P03", "25P03")
_ADVICE = {
    "53100": "The server's disk is full: free space there",
    "53200": "The server has no memory left",
    "25006": "The server only reads: use the URL of the primary",
}


def parameters_of(url: str, *, needed_by: str) -> dict[str, Any]:
    """`needed_by` starts the message about a missing driver."""
    try:
        importlib.import_module("psycopg")
    except ImportError as error:
        raise ValidationError(f"{needed_by} the package psycopg: pip install 'ensemble-ray[postgres]'") from error
    import psycopg
    from psycopg.conninfo import conninfo_to_dict

    try:
        given = {key: value for key, value in conninfo_to_dict(url).items() if value is not None}
    except psycopg.Error:
        # The driver's text contains the URL with its password.
        raise ValidationError(
            "The URL of the store cannot be read: write postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        ) from None
    return {**_REACH, **given}


def location_of(parameters: Mapping[str, Any]) -> str:
    host, name = str(parameters.get("host", "")), str(parameters.get("dbname", ""))
    if not host or host.startswith("/"):
        return f"postgresql:///{name}" + (f"?host={host}" if host else "")
    return f"postgresql://{host}:{parameters.get('port', '5432')}/{name}"


def is_passing(error: BaseException) -> bool:
    import psycopg

    if isinstance(error, TimeoutError):
        return True
    state = getattr(error, "sqlstate", None)
    if state is None:  # the server did not answer
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)
    return str(state).startswith(_PASSING)


def advice_for(error: BaseException, *, schema: str) -> str:
    if is_passing(error):
        return "Check that the server runs and that URL, user and password are right"
    state = str(getattr(error, "sqlstate", None) or "")
    if state == "42501":
        return f"The user needs the right to create the schema '{schema}', or to use its tables"
    return _ADVICE.get(state, "See the server's log")


def first_line(error: BaseException) -> str:
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
    """Call `attempt`, again after the server was lost. It blocks.

    `attempt` calls its argument when it has a connection. After that only repeatable work is retried, because the lost
    server may have committed the change.
    """
    import psycopg

    deadline = time.monotonic() + patience_s
    tries = 0
    while True:
        begun: list[bool] = []
        try:
            return attempt(lambda begun=begun: begun.append(True))  # type: ignore[misc]  # binds this attempt's list
        except (psycopg.Error, TimeoutError) as error:
            delay = BACKOFF_S[min(tries, len(BACKOFF_S) - 1)]
            may_repeat = is_repeatable or not begun
            if not is_passing(error) or not may_repeat or time.monotonic() + delay > deadline:
                raise failure(error) from error
            if not tries:
                _log.warning("Lost the database %s, trying again: %s", location, first_line(error))
        tries += 1
        time.sleep(delay)
