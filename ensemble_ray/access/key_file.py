"""KeyFile: the keys of the endpoints of one home, in one file that only its owner may read. Package: access.

In: keys. Out: the same, to every process that reads the file. It gets its content in one step, so that no reader sees half of it, and
two that write wait for each other. Once made it stays, also without a key: an endpoint that had keys never opens again by itself.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from ensemble_ray.access.key_document import read_document, with_key, without_key, write_document
from ensemble_ray.access.keys import ApiKey
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.process.private_files import read_private_file, replace_private_file
from ensemble_ray.record.ownership import Ownership

__all__ = ["KeyFile"]

_MOST_BYTES = 1_048_576
#: How often, and after which pause, s, a file is asked for that another process is writing.
_TRIES, _PAUSE_S = 50, 0.1


class KeyFile:
    """The keys of a home.

    Args:
        home: Directory of the records (`ENSEMBLE_RAY_HOME`).
    """

    def __init__(self, home: Path) -> None:
        self.path = home / "endpoint" / "keys.json"

    @property
    def location(self) -> str:
        """Where the keys are."""
        return str(self.path)

    def stamp(self) -> tuple[int, int, int] | None:
        """Return what changes whenever the file does; None: there is none."""
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> Sequence[ApiKey] | None:
        """Return the keys, the oldest first; None: none was ever made here.

        Raises:
            EnsembleError: the file cannot be used: it is damaged, or not its owner's alone.
        """
        try:
            content = read_private_file(self.path, most_bytes=_MOST_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise EnsembleError(f"The keys in {self.path} cannot be read: {error.strerror}") from error
        try:
            return read_document(content)
        except (ValueError, ValidationError) as error:
            raise EnsembleError(
                f"The keys in {self.path} cannot be read: the file is damaged ({type(error).__name__}). "
                "What to do: bring it back from a backup, or remove it and make the keys anew"
            ) from None

    def add(self, key: ApiKey) -> None:
        """Keep a key; see `KeyStore.add`."""
        with self._lock():
            self._write(with_key(self.read() or [], key))

    def revoke(self, name: str) -> ApiKey:
        """Let go of a key; see `KeyStore.revoke`."""
        with self._lock():
            gone, left = without_key(self.read() or [], name, location=self.location)
            self._write(left)
        return gone

    def _write(self, keys: Sequence[ApiKey]) -> None:
        replace_private_file(self.path, write_document(keys).encode())

    @contextlib.contextmanager
    def _lock(self) -> Generator[None]:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = Ownership(self.path.with_suffix(".lock"))
        for _ in range(_TRIES):
            if lock.acquire():
                break
            time.sleep(_PAUSE_S)
        else:
            raise EnsembleError(f"{self.path} is being written by {lock.owner() or 'another process'}: try again")
        try:
            yield
        finally:
            lock.release()
