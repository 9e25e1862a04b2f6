"""Which numbers were seen: eight bytes each, since there may be millions. Package: items. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left

__all__ = ["NumberSet"]

#: Numbers are spread over so many sorted lists, by their remainder: of a million, a thousand are moved aside for one.
_LISTS = 1024


class NumberSet:
    """A set of numbers below 2**64, such as hashes, which only grows. An ordinary one takes ten times the memory."""

    def __init__(self) -> None:
        self._lists: dict[int, array[int]] = {}
        self._count = 0

    def __contains__(self, number: int) -> bool:
        found = self._lists.get(number % _LISTS)
        if found is None:
            return False
        position = bisect_left(found, number)
        return position < len(found) and found[position] == number

    def __len__(self) -> int:
        return self._count

    def add(self, number: int) -> bool:
        """Put it in; whether it was not in yet.

        Raises:
            OverflowError: it is negative, or 2**64 or more.
        """
        found = self._lists.setdefault(number % _LISTS, array("Q"))
        position = bisect_left(found, number)
        if position < len(found) and found[position] == number:
            return False
        found.insert(position, number)
        self._count += 1
        return True
