"""KeyFile: the keys of the endpoints of one home, in one file that only its owner may read. Package: access.

In: keys. Out: the same, to every process that reads the file. It gets its content in one step, so that no reader sees half of it, and
two that write wait for each other. Once made it stays, also without a key: an endpoint that had keys never opens again by itself.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Generator, Sequence
from datetime import datetime
from pathlib import Path

from ensemble_ray.access.keys import ApiKey
from ensemble_ray.access.rights import Right
from ensemble_ray.errors import EnsembleError, ValidationError
from ensemble_ray.process.private_files import read_private_file, replace_private_file
from ensemble_ray.record.ownership import Ownership
from ensemble_ray.values.rate_limit import RateLimit

__all__ = ["KeyFile"]

_VERSION = 1
#: Keys of one file, and what it may have; each is compared with what a request brings.
_MOST_KEYS, _MOST_BYTES = 1000, 1_048_576
#: How often, and after which pause, s, a file is asked for that another process is writing.
_TRIES, _PAUSE_S = 50, 0.1


class KeyFile:
    """The keys of a home.

    Args:
        home: Directory of the records (`ENSEMBLE_RAY_HOME`).
    """

    def __init__(self, home: Path) -> None:
        self.path = home / "endpoint" / "keys.json"

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
            return _keys_of(json.loads(content))
        except (ValueError, ValidationError) as error:
            raise EnsembleError(
                f"The keys in {self.path} cannot be read: the file is damaged ({type(error).__name__}). "
                "What to do: bring it back from a backup, or remove it and make the keys anew"
            ) from None

    def add(self, key: ApiKey) -> None:
        """Keep a key.

        Raises:
            ValidationError: there is one of that name, or there are too many.
            EnsembleError: the file cannot be used, or is being written by another process all the time.
        """

        def with_it(keys: Sequence[ApiKey]) -> Sequence[ApiKey]:
            if any(each.name == key.name for each in keys):
                raise ValidationError(f"There is a key '{key.name}' already: revoke it first, or choose another name")
            if len(keys) >= _MOST_KEYS:
                raise ValidationError(
                    f"There are {len(keys)} keys, and no more than {_MOST_KEYS} are kept: revoke some"
                )
            return [*keys, key]

        self._change(with_it)

    def revoke(self, name: str) -> ApiKey:
        """Let go of a key, and return what was kept of it.

        Raises:
            ValidationError: there is none of that name.
            EnsembleError: as in `add`.
        """
        gone: list[ApiKey] = []

        def without_it(keys: Sequence[ApiKey]) -> Sequence[ApiKey]:
            gone.extend(each for each in keys if each.name == name)
            if not gone:
                known = ", ".join(each.name for each in keys)
                raise ValidationError(f"There is no key '{name}' in {self.path}. Known: [{known}]")
            return [each for each in keys if each.name != name]

        self._change(without_it)
        return gone[0]

    def _change(self, change: Callable[[Sequence[ApiKey]], Sequence[ApiKey]]) -> None:
        with self._locked():
            keys = change(self.read() or [])
            data = {"version": _VERSION, "keys": [_data_of(each) for each in keys]}
            replace_private_file(self.path, json.dumps(data, indent=1).encode())

    @contextlib.contextmanager
    def _locked(self) -> Generator[None]:
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


def _data_of(key: ApiKey) -> dict[str, object]:
    rate = None if key.rate is None else {"requests": key.rate.requests, "period_s": key.rate.period.total_seconds()}
    return {
        "name": key.name,
        "sha256": key.digest,
        "last_four": key.last_four,
        "rights": sorted(key.rights),
        "teams": None if key.teams is None else sorted(key.teams),
        "rate": rate,
        "created_at": key.created_at.isoformat(),
    }


def _keys_of(data: object) -> list[ApiKey]:
    match data:
        case {"version": version, "keys": [*keys]} if version == _VERSION:
            return [_key_of(each) for each in keys]
        case _:
            raise ValueError("it has no keys of this version")


def _key_of(data: object) -> ApiKey:
    """Return a key; a field that is missing or of another type is an error, never a wider right."""
    match data:
        case {
            "name": str(name),
            "sha256": str(digest),
            "last_four": str(last_four),
            "rights": [*rights],
            "teams": None | [*_] as teams,
            "rate": None | {"requests": int(), "period_s": float()} as rate,
            "created_at": str(created_at),
        } if len(digest) == 64:  # noqa: PLR2004  hexadecimal digits of SHA-256
            return ApiKey(
                name=name,
                digest=digest,
                last_four=last_four,
                rights=frozenset(Right(str(each)) for each in rights),
                teams=None if teams is None else frozenset(str(each) for each in teams),
                rate=None if rate is None else RateLimit.of(rate["requests"], rate["period_s"]),
                created_at=datetime.fromisoformat(created_at),
            )
        case _:
            raise ValueError("a key lacks a field")
