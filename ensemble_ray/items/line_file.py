"""A file that takes lines, each whole and each item's once, through kills and resumes.

In: lines with the index of their item. Out: a file that was appended to in whole lines.
Rules: what was torn by a kill is cut off before anything is appended; an item that has its line gets no second one, also
not where a process that was replaced while it was frozen wakes and appends to the same file. So whoever appends holds the
file's lock, and first reads what others have appended since.
Never: work on the event loop; callers are in a thread.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

from ensemble_ray.errors import IllegalStateError, RecordError, ValidationError, message_of
from ensemble_ray.items.pulling import IndexSet
from ensemble_ray.values.trace import jsonable

try:
    import fcntl
except ImportError:  # a system without file locks: then only one process may write a file
    fcntl = None  # type: ignore[assignment]


_INDEX_FIRST = re.compile(rb'\{"index": (\d+)[,}]')
#: How much of a file's end is looked at in one go for the last whole line.
_TAIL_BYTES = 64 * 1024
#: How long another process may hold the file, which takes it as long as one write, s.
_PATIENCE_S = 30.0
_PAUSE_S = 0.001


class LineFile:
    """Appends lines. Any thread may use it."""

    def __init__(
        self,
        path: Path,
        what: str,
        index_of: Callable[[bytes], int | None],
        *,
        is_resumed: bool = True,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Open it, made with its folders where it is not there.

        Args:
            path: The file.
            what: What it is, for errors.
            index_of: Which item a line stands for, None for lines that do not count.
            is_resumed: Whether lines that are there already are looked at.
            patience_s: How long another process that holds the file is waited for.

        Raises:
            RecordError: it cannot be written.
            ValidationError: raised by `index_of` for a line that is none.
        """
        self._path = path = path.absolute()
        self._what = what
        self._index_of = index_of
        self._patience_s = patience_s
        self._seen = IndexSet()
        #: how far the file is known
        self._indexed_bytes = 0
        self._lock = threading.Lock()
        self._descriptor = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
            with self._turn():
                self._indexed_bytes = _whole_bytes(path)
                os.ftruncate(self._descriptor, self._indexed_bytes)
                if is_resumed:
                    self._note()
        except OSError as error:
            self._close()
            raise self._make_error(error) from error
        except BaseException:
            self._close()
            raise

    def _note(self) -> None:
        with self._path.open("rb") as file:
            for line in file:
                index = self._index_of(line)
                if index is not None:
                    self._seen.add(index)

    def _note_since(self, size: int) -> None:
        """Note what other processes appended since the file was last looked at."""
        if size > self._indexed_bytes:
            for line in os.pread(self._descriptor, size - self._indexed_bytes, self._indexed_bytes).splitlines():
                try:
                    index = self._index_of(line)
                except ValidationError:  # no line of ours; who resumes the run is told of it
                    index = None
                if index is not None:
                    self._seen.add(index)
        self._indexed_bytes = size

    @contextmanager
    def _turn(self) -> Generator[None]:
        """Hold the file's lock; the system releases it with the process.

        Raises:
            RecordError: another process has held it all the time.
        """
        if fcntl is None:
            yield
            return
        deadline = time.monotonic() + self._patience_s
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    msg = (
                        f"{self._what} '{self._path}' cannot be written: another process has held its lock for "
                        f"{self._patience_s:.0f} s. Is it stopped? Let it go on, or end it"
                    )
                    raise RecordError(msg, str(self._path)) from None
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def __contains__(self, index: int) -> bool:
        return index in self._seen

    def append(self, lines: Iterable[tuple[int, Callable[[], bytes]]]) -> None:
        """Append the lines of those items that have none yet, in one write.

        Raises:
            RecordError: they cannot be written; none of them was.
            IllegalStateError: it is closed.
        """
        with self._lock:
            if self._descriptor < 0:
                raise IllegalStateError(f"{self._what} '{self._path}' is closed")
            with self._turn():
                self._append(lines)

    def _append(self, lines: Iterable[tuple[int, Callable[[], bytes]]]) -> None:
        size = os.fstat(self._descriptor).st_size
        self._note_since(size)
        new = IndexSet()
        fresh = [(index, line()) for index, line in lines if index not in self._seen and new.add(index)]
        if not fresh:
            return
        data = b"".join(line for _, line in fresh)
        try:
            _write_all(self._descriptor, data)
        except OSError as error:
            os.ftruncate(self._descriptor, size)
            raise self._make_error(error) from error
        self._indexed_bytes = size + len(data)
        for index, _ in fresh:
            self._seen.add(index)

    def close(self) -> None:
        """Close it; its lines are on the disk then."""
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise self._make_error(error) from error
            finally:
                self._close()

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _make_error(self, error: OSError) -> RecordError:
        return RecordError(f"{self._what} '{self._path}' cannot be written: {message_of(error)}", str(self._path))


def _write_all(descriptor: int, data: bytes) -> None:
    """Write it all: the system may take less than it gets at once."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def _whole_bytes(path: Path) -> int:
    """Return how long the file is up to the end of its last whole line."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            begin = max(0, end - _TAIL_BYTES)
            file.seek(begin)
            position = file.read(end - begin).rfind(b"\n")
            if position >= 0:
                return begin + position + 1
            end = begin
    return 0


def index_of_line(line: bytes) -> int | None:
    """Return the index that a line begins with, as `json_line` writes it; None where it does not."""
    found = _INDEX_FIRST.match(line)
    return int(found[1]) if found and line.rstrip().endswith(b"}") else None


def is_carried(value: object) -> bool:
    """Whether JSON can carry a value as it is."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def json_line(row: Mapping[str, object]) -> bytes:
    """Return a row as a line of JSON; what JSON cannot carry is its text."""
    try:
        text = json_text(row)
    except (TypeError, ValueError, RecursionError):
        text = json_text({name: value if is_carried(value) else _as_json(value) for name, value in row.items()})
    return f"{text}\n".encode()


def _as_json(value: object) -> object:
    """Return the JSON form of what JSON cannot carry; numbers that it does not have are their texts."""
    return json.loads(json.dumps(jsonable(value)), parse_constant=str)


def json_text(value: object) -> str:
    """Return the JSON text of a value, such as any file can hold.

    Raises:
        TypeError: JSON cannot carry it.
        ValueError: the same.
        RecursionError: the same.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair: models cut emoji in two
        return json.dumps(value)
    return text
