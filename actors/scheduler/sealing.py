"""Submissions of runs as they lie in a cluster's store: encrypted and authenticated with a key of the scheduler's user.

In: bytes and the run's id. Out: bytes that say nothing to who has not the key, and cannot be altered, made or given another
run's name without it (AES-128-CBC and HMAC-SHA256, the Fernet format). Never: a pickle that is loaded before it is checked.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble_ray.errors import EnsembleError
from ensemble_ray.process.private_files import create_private_file, read_private_file

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

__all__ = ["Seal"]


class Seal:
    """Seals and opens submissions. The key is read anew for each: a run has one, and a lost key must show."""

    def __init__(self, key_file: Path) -> None:
        self._key_file = key_file

    def seal(self, run_id: str, body: bytes) -> bytes:
        """Return the body, encrypted and authenticated as that of this run; the key is created when there is none.

        Raises:
            EnsembleError: the key cannot be kept from others, or is damaged.
            OSError: it cannot be read or written.
        """
        # Imported where a run begins: drivers and agents seal nothing, and it takes 10 ms.
        from cryptography.fernet import Fernet

        if not self._key_file.exists():
            create_private_file(self._key_file, Fernet.generate_key())
        return self._cipher().encrypt(_digest(run_id) + body)

    def open(self, run_id: str, sealed: bytes) -> bytes:
        """Return the body that was sealed for this run.

        Raises:
            EnsembleError: it was not sealed with this key and for this run, or the key is lost or damaged.
            OSError: the key cannot be read.
        """
        from cryptography.fernet import InvalidToken

        try:
            opened = self._cipher().decrypt(sealed)
        except FileNotFoundError:
            raise EnsembleError(f"the key that it was sealed with is gone: {self._key_file}") from None
        except InvalidToken:
            raise EnsembleError(
                f"it was not sealed with the key of this cluster's owner ({self._key_file}), or was altered"
            ) from None
        digest = _digest(run_id)
        if not hmac.compare_digest(opened[: len(digest)], digest):
            raise EnsembleError("it was sealed for another run")
        return opened[len(digest) :]

    def _cipher(self) -> Fernet:
        from cryptography.fernet import Fernet

        key = read_private_file(self._key_file)
        try:
            return Fernet(key)
        except ValueError:
            raise EnsembleError(f"{self._key_file} holds no key. Remove it, and a new one is made") from None


def _digest(run_id: str) -> bytes:
    """Return a digest of one length, so that no id and body can be read as another id and another body."""
    return hashlib.sha256(run_id.encode()).digest()
