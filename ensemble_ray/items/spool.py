"""Byte strings in a temporary file, and lazy sequences over them (S-MR-132).

The file has no name, so the system removes it with the process.
"""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.process.concurrency import new_lock
from ensemble_ray.values.value import LazySequence

T = TypeVar("T")

_MEMORY_BYTES = 8 * 1024 * 1024


class Spool:
    """An append-only store of byte strings, with 8 bytes of memory for each. Thread-safe."""

    def __init__(self, *, memory_bytes: int = _MEMORY_BYTES) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes, prefix="ensemble-ray-")  # noqa: SIM115  closed with this object
        self._ends = array("Q")  # ends of the bodies
        self._lock = new_lock()
        self._is_closed = False

    def put(self, body: bytes) -> int:
        """Store a body and return its slot, counted from 0. An OSError: the disk is full."""
        with self._lock:
            self._require_open()
            begin = self._ends[-1] if self._ends else 0
            self._file.seek(begin)  # overwrites a body that was written in part
            self._file.write(body)
            self._ends.append(begin + len(body))
            return len(self._ends) - 1

    def get(self, slot: int) -> bytes:
        """Return the body of a slot. An IndexError: there is no such slot."""
        with self._lock:
            self._require_open()
            if not 0 <= slot < len(self._ends):
                raise IndexError(f"slot {slot} of {len(self._ends)}")
            begin = self._ends[slot - 1] if slot else 0
            self._file.seek(begin)
            return self._file.read(self._ends[slot] - begin)

    def __len__(self) -> int:
        return len(self._ends)

    def close(self) -> None:
        """Delete the bodies, as garbage collection does."""
        with self._lock:
            self._is_closed = True
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
