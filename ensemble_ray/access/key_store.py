"""KeyStore: where the keys of callers are kept, and the one that an address names. Package: access.

Adapters: `KeyFile`, a file of a home; `KeyTable`, the database that records lie in.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ensemble_ray.access.key_file import KeyFile
from ensemble_ray.access.keys import ApiKey
from ensemble_ray.record.stores import StoreAddress

__all__ = ["KeyStamp", "KeyStore", "open_keys"]

#: Differs whenever the keys do.
KeyStamp = tuple[int, ...]


class KeyStore(Protocol):
    """The keys of the endpoints of one home, or of one database. Every call blocks for a moment."""

    @property
    def location(self) -> str:
        """Where they are, for people: a path, or a database without its password."""
        ...

    def stamp(self) -> KeyStamp | None:
        """Return what changes whenever the keys do; None: none was ever made.

        Raises:
            EnsembleError: they cannot be looked at.
        """
        ...

    def read(self) -> Sequence[ApiKey] | None:
        """Return the keys, the oldest first; None: none was ever made.

        Raises:
            EnsembleError: they cannot be used: they are damaged, or not their owner's alone.
        """
        ...

    def add(self, key: ApiKey) -> None:
        """Keep a key.

        Raises:
            ValidationError: there is one of that name, or there are too many.
            EnsembleError: as in `read`, or another process is writing all the time.
        """
        ...

    def revoke(self, name: str) -> ApiKey:
        """Let go of a key, and return what was kept of it.

        Raises:
            ValidationError: there is none of that name.
            EnsembleError: as in `add`.
        """
        ...


def open_keys(address: StoreAddress | None = None) -> KeyStore:
    """Return the keys that hold where runs are recorded at that address; nothing is opened before it is used.

    Args:
        address: Of the records; None: as the environment says.
    """
    address = address or StoreAddress.of()
    file = KeyFile(Path(address.home))
    if not address.url:
        return file
    from ensemble_ray.access.key_table import KeyTable

    return KeyTable(address.url, file=file)
