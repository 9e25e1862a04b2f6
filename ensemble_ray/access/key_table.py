"""KeyTable: the keys of endpoints in the database that records lie in, so that a lost head node loses none. Package: access.

In: keys. Out: the same, to every process that reaches the database. Once made they stay there, also without a key: an endpoint that
had keys never opens again by itself, and one whose keys are still in a file lets nobody in until its operator has decided.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from ensemble_ray.access.endpoint_database import EndpointDatabase
from ensemble_ray.access.key_document import read_document, with_key, without_key, write_document
from ensemble_ray.access.key_file import KeyFile
from ensemble_ray.access.keys import ApiKey
from ensemble_ray.errors import EnsembleError, ValidationError

if TYPE_CHECKING:
    from ensemble_ray.access.endpoint_database import Connection

__all__ = ["KeyTable"]

T = TypeVar("T")


class KeyTable:
    """The keys of a database.

    Args:
        url: The database.
        file: Where they would be without it.
    """

    def __init__(self, url: str, *, file: KeyFile) -> None:
        self._url = url
        self._file = file

    @cached_property
    def _database(self) -> EndpointDatabase:
        return EndpointDatabase(self._url)  # a wrong URL is an error of whoever asks first

    @property
    def location(self) -> str:
        """Where the keys are."""
        return self._database.location

    def stamp(self) -> tuple[int, ...] | None:
        """Return what changes whenever the keys do; see `KeyStore.stamp`."""
        found = self._database.run(_version)
        if found is None:
            self._check_file()
            return None
        return (found,)

    def read(self) -> Sequence[ApiKey] | None:
        """Return the keys, the oldest first; see `KeyStore.read`."""
        found = self._database.run(_content)
        if found is None:
            self._check_file()
            return None
        return self._keys_of(found)

    def add(self, key: ApiKey) -> None:
        """Keep a key; see `KeyStore.add`."""
        self._change(lambda keys: (None, with_key(keys, key)))

    def revoke(self, name: str) -> ApiKey:
        """Let go of a key; see `KeyStore.revoke`."""
        return self._change(lambda keys: without_key(keys, name, location=self.location))

    def _change(self, change: Callable[[Sequence[ApiKey]], tuple[T, list[ApiKey]]]) -> T:
        """Change the keys in one transaction; others that change them wait for it."""

        def operation(connection: Connection) -> T:
            connection.execute("LOCK TABLE ensemble_ray_endpoint.keys IN SHARE ROW EXCLUSIVE MODE")
            found = _content(connection)
            value, keys = change([] if found is None else self._keys_of(found))
            connection.execute(
                "INSERT INTO ensemble_ray_endpoint.keys AS k VALUES (1, 1, %s) "
                "ON CONFLICT (id) DO UPDATE SET version = k.version + 1, content = excluded.content",
                [write_document(keys)],
            )
            return value

        return self._database.run(operation, is_repeatable=False)

    def _keys_of(self, content: str) -> list[ApiKey]:
        try:
            return read_document(content)
        except (ValueError, ValidationError) as error:
            raise EnsembleError(
                f"The keys in {self.location} cannot be read: they are damaged ({type(error).__name__}). What to do: bring "
                "them back from a backup of the database, or empty the table ensemble_ray_endpoint.keys and make them anew"
            ) from None

    def _check_file(self) -> None:
        """Refuse to go on without keys where there are some in a file, which hold no more.

        Raises:
            EnsembleError: there is such a file.
        """
        if self._file.stamp() is not None:
            raise EnsembleError(
                f"No key was made in {self.location} yet, and those in {self._file.location} hold no more, since runs are recorded in "
                "that database. What to do: make keys with ensemble-ray keys add NAME --teams TEAM,..., and remove the file"
            )


def _version(connection: Connection) -> int | None:
    """Return how often the keys were changed; None: none was ever made."""
    row = connection.execute("SELECT version FROM ensemble_ray_endpoint.keys").fetchone()
    return None if row is None else int(row[0])


def _content(connection: Connection) -> str | None:
    row = connection.execute("SELECT content FROM ensemble_ray_endpoint.keys").fetchone()
    return None if row is None else str(row[0])
