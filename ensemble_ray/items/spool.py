"""Bodies in a temporary file, and sequences over them.

In: bytes. Out: the same bytes by slot, for as long as anybody holds the spool (S-MR-132). The file has no name: the
system removes it with the process, however that ends. Never: a body kept in memory beyond the first few megabytes, or what its owner says.
"""

from __future__ import annotations

import pickle
import tempfile
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.process.forks import new_lock
from ensemble_ray.values.value import LazySequence

T = TypeVar("T")

#: What is kept in memory before a file is made.
_MEMORY_BYTES = 8 * 1024 * 1024


class Spool:
    """An append-only store of bodies; 8 bytes of memory for each. Any thread may use it."""

    def __init__(self, *, memory_bytes: int = _MEMORY_BYTES) -> None:
        """Make one.

        Args:
            memory_bytes: What is kept in memory before a file is made.
        """
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes, prefix="ensemble-ray-")  # noqa: SIM115  lives as long as this object
        #: where each body ends; it begins where the one before ends
        self._ends = array("Q")
        self._lock = new_lock()
        self._is_closed = False

    def put(self, body: bytes) -> int:
        """Keep a body; its slot, from 0 in order.

        Raises:
            OSError: the disk is full.
            IllegalStateError: it is closed.
        """
        with self._lock:
            self._require_open()
            begin = self._ends[-1] if self._ends else 0
            self._file.seek(begin)  # past what is kept: a body that was written in part is overwritten
            self._file.write(body)
            self._ends.append(begin + len(body))
            return len(self._ends) - 1

    def get(self, slot: int) -> bytes:
        """Return the body of a slot.

        Raises:
            IndexError: there is no such slot.
            IllegalStateError: it is closed.
        """
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
        """Let the bodies go; done by itself when nobody holds the spool any more."""
        with self._lock:
            self._is_closed = True
            self._file.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise IllegalStateError("The spool is closed: what it kept is gone")


class SpooledSequence(LazySequence[T]):
    """Bodies of a spool in some order, as what they stand for; each is read when asked.

    It compares with any sequence, is pickled with its values, and is kept as it is by fields of values.
    """

    __slots__ = ("_load", "_order", "_spool", "_what")

    def __init__(self, spool: Spool, order: Sequence[int], load: Callable[[bytes], T], *, what: str = "values") -> None:
        """Read the bodies of these slots.

        Args:
            spool: Keeps the bodies.
            order: Slots in the order of the sequence; not copied, an `array('Q')` or `range` is small.
            load: Makes a value of a body.
            what: What the values are, in the plural, for people.
        """
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
    """Return the same sequence in another process, over a spool of its own."""
    spool = Spool()
    order = array("Q", (spool.put(pickle.dumps(value, protocol=5)) for value in values))
    return SpooledSequence(spool, order, _load, what=what)


def _load(body: bytes) -> Any:  # what it is, the sequence's type says
    return pickle.loads(body)  # noqa: S301  our own temporary file, which nobody else can open
