"""Which items were seen: a bit each, since there may be millions. Package: items. Pure."""

from __future__ import annotations

__all__ = ["IndexSet"]

#: An index further behind the others than so many bytes of bits is kept by itself; a damaged file may name any.
_GAP = 1 << 16


class IndexSet:
    """A set of indices from 0; it takes a bit for each index up to the highest, some few far out left aside."""

    def __init__(self) -> None:
        self._bits = bytearray()
        self._far: set[int] = set()
        self._count = 0

    def __contains__(self, index: int) -> bool:
        position = index >> 3
        return (position < len(self._bits) and bool(self._bits[position] & (1 << (index & 7)))) or index in self._far

    def __len__(self) -> int:
        return self._count

    def add(self, index: int) -> bool:
        """Put it in; whether it was not in yet."""
        if index in self:
            return False
        self._count += 1
        position = index >> 3
        if position >= len(self._bits) + _GAP:
            self._far.add(index)
            return True
        if position >= len(self._bits):
            self._bits.extend(bytes(position + 1 - len(self._bits)))
        self._bits[position] |= 1 << (index & 7)
        return True
