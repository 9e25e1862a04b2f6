"""Items and groups of a dynamic run as its record tells of them, a few bytes for each. Pure.

In: the facts of items and groups, in order. Out: which items were pulled, what they were, what came together.
Never: an object kept for an item.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import overload

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.items import GroupRecorded, ItemsRecorded
from ensemble_ray.record.identity.map_reduce import DIGEST_DIGITS, map_key, position_of
from ensemble_ray.schedule.instructions import ReduceGroup

#: Bytes of an item's hash.
_DIGEST = DIGEST_DIGITS // 2
#: In place of a hash: nothing to compare.
_NOT_COMPARED = bytes(_DIGEST)
#: A place further behind the last one than this is far out, and costs more than a byte.
_GAP = 1 << 16


class Codes:
    """A small number for each of many whole numbers, 0 at first. A byte each, except for a few far out."""

    def __init__(self) -> None:
        self._near = bytearray()
        self._far: dict[int, int] = {}

    def __getitem__(self, place: int) -> int:
        return self._near[place] if place < len(self._near) else self._far.get(place, 0)

    def __setitem__(self, place: int, code: int) -> None:
        if place >= len(self._near) + _GAP:
            self._far[place] = code
            return
        if place >= len(self._near):
            self._near += bytes(place + 1 - len(self._near))
            for far in [each for each in self._far if each <= place]:
                self._near[far] = self._far.pop(far)
        self._near[place] = code

    def count(self, code: int) -> int:
        """How many have that code; not asked for 0."""
        return self._near.count(code) + sum(each == code for each in self._far.values())

    def places(self, code: int) -> Iterator[int]:
        """Which have that code."""
        place = self._near.find(code)
        while place >= 0:
            yield place
            place = self._near.find(code, place + 1)
        yield from [far for far, each in self._far.items() if each == code]


class RecordedItems:
    """The items that a run pulled, as hashes, in the order in which it did.

    Attributes:
        are_all: Whether its source was seen to have no more.
    """

    def __init__(self) -> None:
        self.are_all = False
        self._digests = bytearray()
        #: index of each, unless they are 0, 1, 2, ...
        self._indices: array[int] | None = None
        #: with indices: which were pulled, and their places in the order of their indices, made when one is looked for
        self._pulled = Codes()
        self._by_index: array[int] | None = None

    @property
    def count(self) -> int:
        """How many there were."""
        return len(self._digests) // _DIGEST

    def index(self, number: int) -> int:
        """Return the index of the item before which so many were pulled."""
        return number if self._indices is None else self._indices[number]

    def number(self, index: int) -> int | None:
        """How many items were pulled before the one of that index; None when it was not pulled."""
        if self._indices is None:
            return index if 0 <= index < self.count else None
        if not self._pulled[index]:
            return None
        indices = self._indices
        if self._by_index is None:
            self._by_index = array("q", sorted(range(len(indices)), key=indices.__getitem__))
        return self._by_index[bisect_left(self._by_index, index, key=indices.__getitem__)]

    def digest(self, index: int) -> str | None:
        """Return what `item_digest` gave of the item of that index; None when it was not pulled."""
        number = self.number(index)
        if number is None:
            return None
        value = bytes(self._digests[number * _DIGEST : (number + 1) * _DIGEST])
        return "" if value == _NOT_COMPARED else value.hex()

    def apply(self, pulled: ItemsRecorded) -> None:
        """Take the next items.

        Raises:
            RecordError: their fact is damaged.
        """
        for index, digest in zip(pulled.places(), pulled.digests, strict=True):
            self._apply_item(index, digest)
        self.are_all = self.are_all or pulled.are_all

    def _apply_item(self, index: int, digest: str) -> None:
        try:
            value = bytes.fromhex(digest) or _NOT_COMPARED
        except ValueError:
            value = b""
        if len(value) != _DIGEST:
            raise RecordError(f"The record is damaged: '{digest}' is no hash of an item")
        number = self.number(index)
        if number is not None:  # a run that goes on with other items than before says so again
            self._digests[number * _DIGEST : (number + 1) * _DIGEST] = value
            return
        if self._indices is None and index != self.count:
            self._indices = array("q", range(self.count))
            for previous in self._indices:
                self._pulled[previous] = 1
        if self._indices is not None:
            self._indices.append(index)
            self._pulled[index] = 1
            self._by_index = None
        self._digests += value


class RecordedGroups(Sequence[ReduceGroup]):
    """The recorded groups in their order, each made when it is asked for; the numbers of maps are those of the machine."""

    def __init__(self, items: RecordedItems) -> None:
        self._items = items
        #: of each group: level, number, where its inputs begin; of each input: level and number
        self._levels, self._numbers, self._begins = array("q"), array("q"), array("q", [0])
        self._input_levels, self._input_numbers = array("q"), array("q")
        #: place of the final one
        self._final: int | None = None
        #: by level: which numbers are known
        self._recorded: dict[int, Codes] = {}

    @property
    def counts(self) -> Mapping[int, int]:
        """How many there are, by level."""
        return {level: recorded.count(1) for level, recorded in self._recorded.items()}

    @property
    def final(self) -> ReduceGroup | None:
        """The final reduce, if it is recorded."""
        return None if self._final is None else self[self._final]

    def apply(self, group: GroupRecorded) -> None:
        """Take the next group; one that is known stays as it is.

        Raises:
            RecordError: its fact is damaged.
        """
        inputs = [position_of(key) for key in group.inputs]
        level, number = group.level, group.number
        if level < 1 or number < 0 or not inputs:
            raise RecordError(f"The record is damaged: {group.to_data()} is no group")
        recorded = self._recorded.setdefault(level, Codes())
        if recorded[number]:
            return
        recorded[number] = 1
        for key, found in zip(group.inputs, inputs, strict=True):
            if found is None:
                raise RecordError(f"The record is damaged: '{key}' in a group is no map and no reduce")
            self._input_levels.append(found[0])
            self._input_numbers.append(found[1])
        if group.is_final:
            self._final = len(self._levels)
        self._levels.append(level)
        self._numbers.append(number)
        self._begins.append(len(self._input_levels))

    def __len__(self) -> int:
        return len(self._levels)

    @overload
    def __getitem__(self, place: int) -> ReduceGroup: ...
    @overload
    def __getitem__(self, place: slice) -> list[ReduceGroup]: ...
    def __getitem__(self, place: int | slice) -> ReduceGroup | list[ReduceGroup]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        where = range(len(self))[place]
        inputs = range(self._begins[where], self._begins[where + 1])
        return ReduceGroup(
            level=self._levels[where],
            number=self._numbers[where],
            inputs=tuple(map(self._input, inputs)),
            is_final=where == self._final,
        )

    def _input(self, place: int) -> tuple[int, int]:
        level, number = self._input_levels[place], self._input_numbers[place]
        if level == 0:
            pulled = self._items.number(number)
            if pulled is None:
                raise RecordError(f"The record is damaged: the item of '{map_key(number)}' in a group is not recorded")
            return 0, pulled
        return level, number
