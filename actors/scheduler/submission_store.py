"""Stores the submissions of active runs in the cluster's key-value store for a restarted scheduler (S-DUR-32).

A submission is a pickle and contains keys of models. So it is stored encrypted, never on disk, and loaded only if this
user's scheduler encrypted it (S-SEC-36, S-SEC-37).
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ray.experimental import internal_kv

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.packing import pack, unpack
from ensemble_ray.actors.link.wire import Submission
from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.config import home_directory
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.private_files import create_private_file, read_private_file
from ensemble_ray.record.stores import resume_advice

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

_log = bounded_logger(__name__)
KEY_NAME = "package.key"
_NAMESPACE = b"ensemble_ray"
_PREFIX = "run:"
#: Ray's own libraries use this store; its functions have only private names.
_put, _get, _delete, _list = (getattr(internal_kv, f"_internal_kv_{name}") for name in ("put", "get", "del", "list"))


class SubmissionStore:
    """Each call takes some milliseconds, in a thread."""

    def __init__(self, key_file: Path | None = None, *, scheduler: str = "") -> None:
        self._prefix = _PREFIX if scheduler in {"", spawn.SCHEDULER} else f"{scheduler}:{_PREFIX}"
        self._seal = Seal(home_directory() / KEY_NAME if key_file is None else key_file)

    async def keep(self, submission: Submission) -> None:
        def keep() -> None:
            sealed = self._seal.seal(submission.run_id, pack(submission))
            _put(f"{self._prefix}{submission.run_id}", sealed, overwrite=True, namespace=_NAMESPACE)

        await threads.run(keep)

    async def drop(self, run_id: str) -> None:
        await threads.run(_delete, f"{self._prefix}{run_id}", namespace=_NAMESPACE)

    async def load_unfinished(self) -> list[Submission]:
        """Drop submissions that were not sealed here, or have another version."""
        names = cast("list[bytes]", await threads.run(_list, self._prefix, namespace=_NAMESPACE))
        found = [await threads.run(self._open, name) for name in names]
        return [submission for submission in found if submission is not None]

    def _open(self, name: bytes) -> Submission | None:
        sealed = cast("bytes | None", _get(name, namespace=_NAMESPACE))
        if sealed is None:
            return None
        run_id = name.decode(errors="replace").removeprefix(self._prefix)
        try:
            body = self._seal.open(run_id, sealed)
            return unpack(body, Submission)  # sealed by this user's scheduler, as just checked
        except Exception as error:  # noqa: BLE001  one such run must not stop the others
            _log.error(
                "Run %s cannot resume by itself: its package in the cluster's store is refused: %s. Its record is kept: %s",
                ascii(run_id),
                message_of(error),
                resume_advice(ascii(run_id)[1:-1], None),
            )
            _delete(name, namespace=_NAMESPACE)
            return None


class Seal:
    """It reads the key file each time, so that a lost key is noticed."""

    def __init__(self, key_file: Path) -> None:
        self._key_file = key_file

    def seal(self, run_id: str, body: bytes) -> bytes:
        """Encrypt and authenticate the body for this run. Create the key if there is none."""
        # Imported here because drivers and agents do not need it, and it takes 10 ms.
        from cryptography.fernet import Fernet

        if not self._key_file.exists():
            create_private_file(self._key_file, Fernet.generate_key())
        return self._cipher().encrypt(_digest(run_id) + body)

    def open(self, run_id: str, sealed: bytes) -> bytes:
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
    # Of a fixed length, so that no id and body can be read as another id and another body.
    return hashlib.sha256(run_id.encode()).digest()
