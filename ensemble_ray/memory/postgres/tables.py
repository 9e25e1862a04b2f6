"""PostgresTables: entries, vectors and facts in a PostgreSQL database. Package: memory.

In: entries with their vectors, policies of eviction. Out: entries; with pgvector those that are nearest to a vector, found by
the server. A change is one transaction, and changes of a scope come one after the other.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray.memory.tables import StoredEntry
from ensemble_ray.values.memory import MemoryEntry
from ensemble_ray.values.trace import jsonable

if TYPE_CHECKING:
    from ensemble_ray.memory.postgres.database import MemoryDatabase
    from ensemble_ray.memory.postgres.schema import Connection

__all__ = ["PostgresTables"]

_LOCK_SCOPE = "SELECT pg_advisory_xact_lock(1835363693, hashtext(%s))"
_DELETE = "DELETE FROM ensemble_ray_memory.entries WHERE scope = %s AND id = ANY(%s)"


class PostgresTables:
    """The tables of one database. Fulfils `MemoryTables`."""

    def __init__(self, database: MemoryDatabase) -> None:
        self._database = database

    @property
    def location(self) -> str:
        """The database, without user and password."""
        return self._database.location

    def close(self) -> None:
        """Close its connections; they are opened again when they are needed."""
        self._database.close()

    # Entries.

    def add(self, scope: str, entry: MemoryEntry, vector: bytes | None) -> None:
        """Add an entry; one whose id the scope took before is left out."""
        text = _entry_text(entry)

        def adding(connection: Connection) -> None:
            query = f"SELECT ensemble_ray_memory.add_entry(%s, %s, %s, {self._vector_mark})"
            connection.execute(query.encode(), [scope, entry.entry_id, text, self._as_stored(vector)])

        # Without an id nobody can tell whether a lost server has it.
        self._database.run(adding, is_repeatable=bool(entry.entry_id))

    def newest(self, scope: str, most: int) -> list[MemoryEntry]:
        """Return the newest entries of a scope, the oldest of them first."""
        rows = self._all(
            "SELECT entry FROM ensemble_ray_memory.entries WHERE scope = %s ORDER BY id DESC LIMIT %s", scope, most
        )
        return [_entry_of(text) for (text,) in reversed(rows)]

    def entries(self, scope: str) -> list[StoredEntry]:
        """Return all entries of a scope, in storing order."""
        rows = self._all("SELECT id, entry FROM ensemble_ray_memory.entries WHERE scope = %s ORDER BY id", scope)
        return [StoredEntry(int(row), _entry_of(text)) for row, text in rows]

    def entries_of(self, rows: Sequence[int]) -> list[MemoryEntry]:
        """Return the entries of these rows, in this order; those that are gone are left out."""
        query = "SELECT id, entry FROM ensemble_ray_memory.entries WHERE id = ANY(%s)"
        found: dict[int, str] = dict(self._all(query, list(rows)))
        return [_entry_of(found[row]) for row in rows if row in found]

    def replace(self, scope: str, old: Sequence[int], new: Sequence[tuple[MemoryEntry, bytes | None]]) -> bool:
        """Delete rows of a scope, and add entries behind the others; False: nothing, since some of the rows were gone."""
        texts = [_entry_text(entry) for entry, _ in new]

        def replacing(connection: Connection) -> bool:
            with connection.transaction() as transaction:
                connection.execute(_LOCK_SCOPE, [scope])
                deleted = connection.execute(_DELETE, [scope, list(old)]).rowcount
                if new and deleted != len(old):
                    from psycopg import Rollback

                    raise Rollback(transaction)
                query = f"INSERT INTO ensemble_ray_memory.entries (scope, entry, vector) VALUES (%s, %s, {self._vector_mark})"  # noqa: S608  a type of ours
                for text, (_, vector) in zip(texts, new, strict=True):
                    connection.execute(query.encode(), [scope, text, self._as_stored(vector)])
                return True
            return False

        return self._database.run(replacing)

    def clear(self, scope: str) -> None:
        """Delete the entries of a scope, and what ids it took."""

        def clearing(connection: Connection) -> None:
            with connection.transaction():
                connection.execute(_LOCK_SCOPE, [scope])
                connection.execute("DELETE FROM ensemble_ray_memory.entries WHERE scope = %s", [scope])
                connection.execute("DELETE FROM ensemble_ray_memory.taken WHERE scope = %s", [scope])

        self._database.run(clearing)

    def scopes(self) -> Mapping[str, int]:
        """Return how many entries each scope has, by name."""
        rows = self._all(
            'SELECT scope, count(*) FROM ensemble_ray_memory.entries GROUP BY scope ORDER BY scope COLLATE "C"'
        )
        return {str(scope): int(count) for scope, count in rows}

    # Vectors.

    def nearest(self, scope: str, vector: bytes, most: int) -> list[MemoryEntry] | None:
        """Return the entries nearest to a vector, none beyond a right angle, nearest first; None: without pgvector."""
        database = self._database

        def searching(connection: Connection) -> list[tuple[Any, ...]] | None:
            if (schema := database.vector_schema) is None:
                return None
            # Vectors have the length 1: the inner product is the cosine. The operator gives it with the other sign.
            query = (
                f"SELECT entry FROM (SELECT id, entry, vector OPERATOR({schema}.<#>) {self._vector_mark} AS away"  # noqa: S608  names of ours
                " FROM ensemble_ray_memory.entries WHERE scope = %s AND vector IS NOT NULL) AS found"
                " WHERE away <= 0 ORDER BY away, id LIMIT %s"
            )
            return connection.execute(query.encode(), [self._as_stored(vector), scope, most]).fetchall()

        rows = database.run(searching)
        return None if rows is None else [_entry_of(text) for (text,) in rows]

    def extent(self, scope: str) -> tuple[int, int]:
        """Return how many vectors a scope has and the newest one's row: two that are equal have the same vectors."""
        ((count, newest),) = self._all(
            "SELECT count(*), coalesce(max(id), 0) FROM ensemble_ray_memory.entries WHERE scope = %s AND vector IS NOT NULL",
            scope,
        )
        return int(count), int(newest)

    def vectors(self, scope: str, after: int) -> list[tuple[int, bytes]]:
        """Return rows and vectors of a scope, of the rows behind that one."""
        rows = self._all(
            "SELECT id, vector FROM ensemble_ray_memory.entries WHERE scope = %s AND id > %s AND vector IS NOT NULL ORDER BY id",
            scope,
            after,
        )
        return [(int(row), bytes(vector)) for row, vector in rows]

    def without_vector(self, scope: str) -> list[StoredEntry]:
        """Return the entries that were stored without a model."""
        rows = self._all(
            "SELECT id, entry FROM ensemble_ray_memory.entries WHERE scope = %s AND vector IS NULL ORDER BY id", scope
        )
        return [StoredEntry(int(row), _entry_of(text)) for row, text in rows]

    def set_vectors(self, vectors: Sequence[tuple[bytes, int]]) -> None:
        """Add the vectors of rows that have none."""

        def giving(connection: Connection) -> None:
            query = (
                f"UPDATE ensemble_ray_memory.entries SET vector = {self._vector_mark} WHERE id = %s AND vector IS NULL"  # noqa: S608  a type of ours
            )
            with connection.transaction(), connection.cursor() as cursor:
                cursor.executemany(query.encode(), [(self._as_stored(vector), row) for vector, row in vectors])

        self._database.run(giving)

    def embedding(self, model: str, dimensions: int) -> tuple[str, int]:
        """Return the model and the length of the vectors; these, where there are none yet."""
        self._change(
            "INSERT INTO ensemble_ray_memory.embedding VALUES (1, %s, %s) ON CONFLICT DO NOTHING", model, dimensions
        )
        found = self.embedding_model()
        return (model, dimensions) if found is None else found

    def embedding_model(self) -> tuple[str, int] | None:
        """Return the model and the length of the vectors; None where there are none."""
        rows = self._all("SELECT model, dimensions FROM ensemble_ray_memory.embedding")
        return cast("tuple[str, int]", rows[0]) if rows else None

    # Facts about entities.

    def put_fact(self, name: str, fact: str) -> None:
        """Keep a fact, in place of an earlier one of that name."""
        self._change(
            "INSERT INTO ensemble_ray_memory.entities (name, fact) VALUES (%s, %s)"
            " ON CONFLICT (name) DO UPDATE SET fact = excluded.fact",
            name,
            _json_text(fact),
        )

    def fact(self, name: str) -> str | None:
        """Return a fact; None where none is known."""
        rows = self._all("SELECT fact FROM ensemble_ray_memory.entities WHERE name = %s", name)
        return cast("str", json.loads(rows[0][0])) if rows else None

    def facts(self) -> dict[str, str]:
        """Return all facts by name, in order of first put."""
        rows = self._all("SELECT name, fact FROM ensemble_ray_memory.entities ORDER BY id")
        return {str(name): cast("str", json.loads(fact)) for name, fact in rows}

    def has_facts(self) -> bool:
        """Return whether there is any."""
        return bool(self._all("SELECT 1 FROM ensemble_ray_memory.entities LIMIT 1"))

    def remove_fact(self, name: str) -> None:
        """Delete a fact."""
        self._change("DELETE FROM ensemble_ray_memory.entities WHERE name = %s", name)

    # How values travel.

    @property
    def _vector_mark(self) -> str:
        """What stands for a vector in a statement."""
        schema = self._database.vector_schema
        return "%s::bytea" if schema is None else f"%s::{schema}.vector"

    def _as_stored(self, vector: bytes | None) -> object:
        """Return a vector as the tables take it."""
        if vector is None or self._database.vector_schema is None:
            return vector
        return f"[{','.join(map(repr, array('f', vector)))}]"

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        def reading(connection: Connection) -> list[tuple[Any, ...]]:
            return connection.execute(query.encode(), values).fetchall()

        return self._database.run(reading)

    def _change(self, query: str, *values: object) -> None:
        def changing(connection: Connection) -> None:
            connection.execute(query.encode(), values)

        self._database.run(changing)


def _entry_text(entry: MemoryEntry) -> str:
    structured = entry.structured_content
    data = {
        "content": entry.content,
        "structured": None if structured is None else jsonable(structured),
        "stored_at": None if entry.stored_at is None else entry.stored_at.isoformat(),
        "metadata": dict(entry.metadata),
        "entry_id": entry.entry_id,
    }
    return _json_text(data)


def _json_text(data: object) -> str:
    """Return data as JSON that any UTF-8 database takes: NUL is always escaped in it, halves of surrogate pairs where there are any."""
    text = json.dumps(data, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(data)
    return text


def _entry_of(text: str) -> MemoryEntry:
    data = cast("dict[str, Any]", json.loads(text))
    at = cast("str | None", data["stored_at"])
    return MemoryEntry(
        content=data["content"],
        structured_content=data["structured"],
        stored_at=None if at is None else datetime.fromisoformat(at),
        metadata=data["metadata"],
        entry_id=data["entry_id"],
    )
