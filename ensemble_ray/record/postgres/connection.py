"""The driver's connection, as the store's modules name it. Types only: the driver is an extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import psycopg

    #: rows are tuples of whatever the columns hold; that is how the driver types them
    Connection = psycopg.AsyncConnection[tuple[Any, ...]]
