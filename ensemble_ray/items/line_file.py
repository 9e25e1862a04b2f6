"""Files of lines, one per item, that survive kills and resumes, and outputs that a run keeps on disk. The calls block.

A writer holds the file's lock and first reads the lines of other processes, so an item never gets a second line.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeVar, cast, overload

from ensemble_ray.errors import IllegalStateError, RecordError, ValidationError, message_of
from ensemble_ray.items.pulling import IndexSet
from ensemble_ray.process.concurrency import new_lock
from ensemble_ray.values.trace import jsonable
from ensemble_ray.values.value import LazySequence

try:
    import fcntl
except ImportError:  # without file locks, only one process may write a file
    fcntl = None  # type: ignore[assignment]


_INDEX_FIRST = re.compile(rb'\{"index": (\d+)[,}]')
_TAIL_BYTES = 64 * 1024
_PATIENCE_S = 30.0  # another process needs the lock for one write
_PAUSE_S = 0.001


class LineFile:
    """Appends lines. Thread-safe."""

    def __init__(
        self,
        path: Path,
        what: str,
        index_of: Callable[[bytes], int | None],
        *,
        is_resumed: bool = True,
        patience_s: float = _PATIENCE_S,
    ) -> None:
        """Open or create the file and its folders; `what` names it in errors.

        `index_of` returns the item of a line that counts. Existing lines are read if the run `is_resumed`. `patience_s` is the longest
        wait for the lock.
        """
        self._path = path = path.absolute()
        self._what = what
        self._index_of = index_of
        self._patience_s = patience_s
        self._seen = IndexSet()
        self._indexed_bytes = 0  # the lines of this part are in `_seen`
        self._lock = threading.Lock()
        self._descriptor = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o644)
            with self._locked():
                self._indexed_bytes = _whole_bytes(path)
                os.ftruncate(self._descriptor, self._indexed_bytes)
                if is_resumed:
                    with path.open("rb") as file:
                        self._seen.update(index for line in file if (index := index_of(line)) is not None)
        except OSError as error:
            self._close()
            raise self._make_error(error) from error
        except BaseException:
            self._close()
            raise

    def __contains__(self, index: int) -> bool:
        return index in self._seen

    def append(self, lines: Iterable[tuple[int, Callable[[], bytes]]]) -> None:
        """Append, in one write, the lines of the items that have none yet. A RecordError: none was written."""
        with self._lock:
            if self._descriptor < 0:
                raise IllegalStateError(f"{self._what} '{self._path}' is closed")
            with self._locked():
                self._append(lines)

    def close(self) -> None:
        with self._lock:
            if self._descriptor < 0:
                return
            try:
                os.fsync(self._descriptor)
            except OSError as error:
                raise self._make_error(error) from error
            finally:
                self._close()

    def _append(self, lines: Iterable[tuple[int, Callable[[], bytes]]]) -> None:
        size = os.fstat(self._descriptor).st_size
        self._read_appended(size)
        new = IndexSet()
        fresh = [(index, line()) for index, line in lines if index not in self._seen and new.add(index)]
        if not fresh:
            return
        data = b"".join(line for _, line in fresh)
        try:
            left = memoryview(data)
            while left:  # one `write` may write only a part
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            os.ftruncate(self._descriptor, size)
            raise self._make_error(error) from error
        self._indexed_bytes = size + len(data)
        self._seen.update(index for index, _ in fresh)

    def _read_appended(self, size: int) -> None:
        if size > self._indexed_bytes:
            for line in os.pread(self._descriptor, size - self._indexed_bytes, self._indexed_bytes).splitlines():
                try:
                    index = self._index_of(line)
                except ValidationError:  # a foreign line, which the next resume reports
                    index = None
                if index is not None:
                    self._seen.add(index)
        self._indexed_bytes = size

    @contextmanager
    def _locked(self) -> Generator[None]:
        """The system releases the lock when the process ends."""
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
                        f"{self._patience_s:.0f} s. Is it stopped? Resume it, or end it"
                    )
                    raise RecordError(msg, str(self._path)) from None
            time.sleep(_PAUSE_S)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def _close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _make_error(self, error: OSError) -> RecordError:
        return RecordError(f"{self._what} '{self._path}' cannot be written: {message_of(error)}", str(self._path))


def _whole_bytes(path: Path) -> int:
    """Return the end of the last complete line."""
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
    found = _INDEX_FIRST.match(line)
    return int(found[1]) if found and line.rstrip().endswith(b"}") else None


def is_carried(value: object) -> bool:
    """Whether JSON can represent a value unchanged."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def json_line(row: Mapping[str, object]) -> bytes:
    """Return a row as a line of JSON. Values without a JSON form become texts."""
    try:
        text = json_text(row)
    except (TypeError, ValueError, RecursionError):
        # Also NaN and infinities, which JSON lacks.
        fallback = {name: value for name, value in row.items() if not is_carried(value)}
        texts = {name: json.loads(json.dumps(jsonable(each)), parse_constant=str) for name, each in fallback.items()}
        text = json_text({**row, **texts})
    return f"{text}\n".encode()


def json_text(value: object) -> str:
    """Return JSON text that UTF-8 can encode."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate: models cut emoji in two
        return json.dumps(value)
    return text


T = TypeVar("T")

_MEMORY_BYTES = 8 * 1024 * 1024
_BUFFER_BYTES = 64 * 1024  # in memory before a write, once there is a file


class Spool:
    """An append-only store of byte strings, with 8 bytes of memory for each. Thread-safe."""

    def __init__(self, *, memory_bytes: int = _MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes
        self._memory = bytearray()  # the last bodies, which are not in the file yet
        self._file: IO[bytes] | None = None
        self._file_bytes = 0
        self._ends = array("Q")  # ends of the bodies
        self._lock = new_lock()
        self._is_closed = False

    def put(self, body: bytes) -> int:
        """Store a body and return its slot, counted from 0. An OSError: the disk is full."""
        with self._lock:
            self._require_open()
            begin = self._ends[-1] if self._ends else 0
            self._memory += body
            if len(self._memory) > self._memory_bytes:
                try:
                    self._write()
                except OSError:
                    del self._memory[begin - self._file_bytes :]
                    raise
            self._ends.append(begin + len(body))
            return len(self._ends) - 1

    def get(self, slot: int) -> bytes:
        """Return the body of a slot. An IndexError: there is no such slot."""
        with self._lock:
            self._require_open()
            if not 0 <= slot < len(self._ends):
                raise IndexError(f"slot {slot} of {len(self._ends)}")
            begin, end = self._ends[slot - 1] if slot else 0, self._ends[slot]
            if self._file is None or begin >= self._file_bytes:
                return bytes(self._memory[begin - self._file_bytes : end - self._file_bytes])
            return os.pread(self._file.fileno(), end - begin, begin)

    def _write(self) -> None:
        """Move the bodies to the file; from then on, fewer of them stay in memory."""
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="ensemble-ray-", buffering=0)  # noqa: SIM115  closed with this object
            self._memory_bytes = min(self._memory_bytes, _BUFFER_BYTES)
        body, written = bytes(self._memory), 0
        while written < len(body):  # one call may write only a part; after an error all of it is written again
            written += os.pwrite(self._file.fileno(), memoryview(body)[written:], self._file_bytes + written)
        self._file_bytes += len(body)
        self._memory.clear()

    def __len__(self) -> int:
        return len(self._ends)

    def close(self) -> None:
        """Delete the bodies, as garbage collection does."""
        with self._lock:
            self._is_closed = True
            self._memory = bytearray()
            if self._file is not None:
                self._file.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise IllegalStateError("The spool is closed, and its content is deleted")


class SpooledSequence(LazySequence[T]):
    """A sequence over the bodies of a spool. Each access loads its value.

    It equals any sequence with the same values and is pickled with them.
    """

    __slots__ = ("_load", "_order", "_spool", "_what")

    def __init__(self, spool: Spool, order: Sequence[int], load: Callable[[bytes], T], *, what: str = "values") -> None:
        """`order` has slots and is not copied; `what` names the values for `repr`."""
        self._spool = spool
        self._order = order
        self._load = load
        self._what = what

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._load(self._spool.get(slot)) for slot in self._order[index]]
        return self._load(self._spool.get(self._order[index]))

    def __iter__(self) -> Iterator[T]:
        return (self._load(self._spool.get(slot)) for slot in self._order)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        several = cast("Sequence[object]", other)
        return len(self) == len(several) and all(mine == theirs for mine, theirs in zip(self, several, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))  # as the tuple that it equals

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self):,} {self._what}>"

    def __reduce__(self) -> tuple[object, ...]:
        return _restore, (list(self), self._what)


def _restore(values: list[T], what: str) -> SpooledSequence[T]:
    spool = Spool()
    order = array("Q", (spool.put(pickle.dumps(value, protocol=5)) for value in values))
    return SpooledSequence(spool, order, _load, what=what)


def _load(body: bytes) -> Any:
    return pickle.loads(body)  # noqa: S301  this process wrote the temporary file
