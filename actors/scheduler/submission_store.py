"""Where the submissions of running runs lie, so that a scheduler that was started again finds them (S-DUR-32).

In the cluster's own key-value store: it lives as long as the cluster does and no longer, as a run's definition should;
what must survive the cluster is in the record. A submission holds keys of models and is a pickle, so it lies there sealed,
and nothing is loaded that this user's scheduler has not sealed (S-SEC-36, S-SEC-37). Never: a submission on disk.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ray.experimental import internal_kv

from ensemble_ray.actors import spawn
from ensemble_ray.actors.link.packing import dump_submission, load_submission
from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.process.config import home_directory
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import threads
from ensemble_ray.process.private_files import create_private_file, read_private_file
from ensemble_ray.record.stores import resume_advice

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

    from ensemble_ray.actors.link.wire import Submission


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


_log = bounded_logger(__name__)
#: Name of the key's file in the directory of the records.
KEY_NAME = "package.key"
_NAMESPACE = b"ensemble_ray"
_PREFIX = "run:"
#: The store that Ray's own libraries keep their state in; its functions have no other names.
_put, _get, _delete, _list = (getattr(internal_kv, f"_internal_kv_{name}") for name in ("put", "get", "del", "list"))


class SubmissionStore:
    """The submissions of a cluster's runs. Calls take some milliseconds each, in a thread."""

    def __init__(self, key_file: Path | None = None, *, scheduler: str = "") -> None:
        """Make one.

        Args:
            key_file: The key of the submissions; default: in the directory of this process's records.
            scheduler: Name of the one whose runs these are; a cluster may have several, and none goes on with another's.
        """
        self._prefix = _PREFIX if scheduler in {"", spawn.SCHEDULER} else f"{scheduler}:{_PREFIX}"
        self._seal = Seal(home_directory() / KEY_NAME if key_file is None else key_file)

    async def keep(self, submission: Submission) -> None:
        """Keep a run's submission until it is dropped."""
        await threads.run(self._keep, submission)

    async def drop(self, run_id: str) -> None:
        """Forget a run that has ended."""
        await threads.run(_delete, f"{self._prefix}{run_id}", namespace=_NAMESPACE)

    async def load_unfinished(self) -> list[Submission]:
        """Return the submissions of runs that have not ended. One that was not sealed here, or is of another version, is dropped."""
        names = cast("list[bytes]", await threads.run(_list, self._prefix, namespace=_NAMESPACE))
        found = [await threads.run(self._open, name) for name in names]
        return [submission for submission in found if submission is not None]

    def _keep(self, submission: Submission) -> None:
        sealed = self._seal.seal(submission.run_id, dump_submission(submission))
        _put(f"{self._prefix}{submission.run_id}", sealed, overwrite=True, namespace=_NAMESPACE)

    def _open(self, name: bytes) -> Submission | None:
        sealed = cast("bytes | None", _get(name, namespace=_NAMESPACE))
        if sealed is None:
            return None
        run_id = name.decode(errors="replace").removeprefix(self._prefix)
        try:
            body = self._seal.open(run_id, sealed)
            return load_submission(body)  # sealed by this user's scheduler, as just checked
        except Exception as error:  # noqa: BLE001  one such run must not keep the others from going on
            _log.error(
                "Run %s cannot go on by itself: its package in the cluster's store is refused: %s. What is recorded of "
                "the run is kept: %s",
                ascii(run_id),
                message_of(error),
                resume_advice(ascii(run_id)[1:-1], None),
            )
            _delete(name, namespace=_NAMESPACE)
            return None
