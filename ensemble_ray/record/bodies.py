"""Where long texts lie, by the hash of their content. Room: record. Adapters of the `BodyStore` port.

In: texts. Out: their SHA-256, and the texts again. Never: the same text twice in one store.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from ensemble_ray.errors import RecordError
from ensemble_ray.record.files import LineFile, Place, read_line, whole_lines
from ensemble_ray.record.rendering import body_digest

__all__ = ["FileBodies", "MemoryBodies", "body_files"]

_PREFIX = "bodies-"


def body_files(directory: Path) -> list[Path]:
    """All writers' bodies of a run."""
    return sorted(directory.glob(f"{_PREFIX}*.jsonl"))


class MemoryBodies:
    """Texts in memory, gone with the process."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def put(self, body: str) -> str:
        """Keep a body; gives its SHA-256 in hex."""
        digest = body_digest(body)
        self._texts.setdefault(digest, body)
        return digest

    def get(self, digest: str) -> str:
        """A kept body.

        Raises:
            KeyError: none of that hash.
        """
        return self._texts[digest]


class FileBodies:
    """Texts of one writer in a file of its own, readable beside those of the run's other writers.

    `put` is for one thread; `get` may be called from others.
    """

    def __init__(self, directory: Path, writer: str | None = None) -> None:
        """Open a run's bodies.

        Args:
            directory: The run's directory.
            writer: Whose file new texts go to; None: only read.
        """
        self._places: dict[bytes, Place] = {}
        #: hashes in this writer's own file, which repeats what only other writers have: they may be on other machines
        self._own: set[bytes] = set()
        self._waiting: dict[bytes, str] = {}
        self._path = None if writer is None else directory / f"{_PREFIX}{writer}.jsonl"
        self._file: LineFile | None = None
        self._scan(body_files(directory))

    def put(self, body: str) -> str:
        """Keep a body, at the next `flush` in the file; gives its SHA-256 in hex."""
        digest = body_digest(body)
        key = bytes.fromhex(digest)
        if key not in self._own:
            self._own.add(key)
            self._waiting[key] = body
        return digest

    def get(self, digest: str) -> str:
        """A kept body.

        Raises:
            KeyError: none of that hash.
        """
        key = bytes.fromhex(digest)
        waiting = self._waiting.get(key)
        if waiting is not None:
            return waiting
        place = self._places.get(key)
        if place is None:
            raise KeyError(digest)
        return _body_of(read_line(place), place.path)[1]

    def flush(self) -> None:
        """Write what was put.

        Raises:
            OSError: it cannot be written.
        """
        if not self._waiting or self._path is None:
            return
        if self._file is None:
            self._file = LineFile(self._path)
        waiting = dict(self._waiting)
        lines = [_line(key.hex(), text) for key, text in waiting.items()]
        self._places.update(zip(waiting, self._file.append(lines), strict=True))
        for key in waiting:
            del self._waiting[key]

    def close(self) -> None:
        """Flush and let go of the file."""
        try:
            self.flush()
        finally:
            if self._file is not None:
                self._file.close()

    def _scan(self, paths: Iterable[Path]) -> None:
        for path in paths:
            for place, line in whole_lines(path):
                digest, _ = _body_of(line, place.path)
                self._places.setdefault(bytes.fromhex(digest), place)


def _line(digest: str, body: str) -> bytes:
    # ASCII escapes: a body may hold half of a surrogate pair, which UTF-8 cannot.
    return json.dumps({"sha256": digest, "body": body}).encode() + b"\n"


def _body_of(line: bytes, path: str) -> tuple[str, str]:
    try:
        read = cast("dict[str, str]", json.loads(line))
        return read["sha256"], read["body"]
    except (ValueError, KeyError, TypeError) as error:
        msg = f"The record is damaged: {path} holds a line that is no body"
        raise RecordError(msg, path) from error
