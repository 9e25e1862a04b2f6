"""Which outputs come together: three orders of work. Package: schedule.

In come outputs as they are there or fail; groups are made of them in `Groups`. A grouper groups the rest when
nothing runs and no items are left: then it makes the groups of the next level or the final one, or nothing when no
output is left. Every output that is not lost gets into exactly one group.

- `LevelGrouper`: a level is grouped when the one before has ended (S-MR-41 to S-MR-46, S-MR-114).
- `PoolGrouper`: the outputs of each level are grouped as they come (S-MR-111, S-MR-112).
- `OrderedGrouper`: the outputs of each level are grouped in their order, as far as they are there (S-MR-113).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ensemble_ray.schedule.map_reduce_groups import Groups, code_of
from ensemble_ray.schedule.map_reduce_rules import Grouping, MapReduceRules
from ensemble_ray.schedule.packing import chunks, first_fit_decreasing

__all__ = ["Grouper", "LevelGrouper", "OrderedGrouper", "PoolGrouper", "grouper_of"]

#: What stands for a size where there is no output to group: not there yet, never there, in a group of the record.
_PENDING = -1
_LOST = -2
_KEPT = -3


class Grouper:
    """What the three share.

    Args:
        rules: How groups are made.
        groups: Where they are made.
    """

    def __init__(self, rules: MapReduceRules, groups: Groups) -> None:
        self._groups = groups
        self._is_by_tokens = rules.grouping is Grouping.BUDGET
        self._capacity = rules.capacity
        self._max_levels = rules.max_levels

    def know_items(self, count: int, *, are_all: bool) -> None:
        """Learn how many items there are up to now."""

    def add(self, level: int, number: int, size: int) -> None:
        """Take an output."""
        raise NotImplementedError

    def discard(self, level: int, number: int) -> None:
        """Learn that an output will never be there."""
        raise NotImplementedError

    def group_rest(self) -> None:
        """Make groups of what is left, now that nothing runs and no items are left."""
        raise NotImplementedError

    def validate(self) -> None:
        """Check what holds between any two steps.

        Raises:
            AssertionError: it does not.
        """

    def _is_capped(self, level: int) -> bool:
        """Whether outputs of that level are not grouped again (S-MR-112)."""
        return self._max_levels is not None and level >= self._max_levels

    def _leave_out(self, level: int, number: int) -> None:
        """Leave an output out of its recorded group, and what that was the last input of as well."""
        dropped = self._groups.lose(level, number)
        if dropped is not None:
            self.discard(*dropped)


class LevelGrouper(Grouper):
    """Level by level.

    Raises:
        ValueError: the record is of a run that was not level by level.
    """

    def __init__(self, rules: MapReduceRules, groups: Groups) -> None:
        super().__init__(rules, groups)
        if not groups.is_by_level:
            raise ValueError("The recorded groups are of a pipelined run, this one goes level by level")
        self._level = 0
        #: of the level that runs, by number
        self._sizes = array("q")

    def add(self, level: int, number: int, size: int) -> None:  # noqa: ARG002  all that runs is of one level
        """Take an output of the level that runs."""
        _put(self._sizes, number, size)

    def discard(self, level: int, number: int) -> None:
        """Nothing to do: what is not there when the level ends was lost."""

    def group_rest(self) -> None:
        """Begin the next level: groups of the record first, then what is packed of the rest."""
        sizes, self._sizes = self._sizes, array("q")
        above = self._level + 1
        is_grouped = self._groups.group_count(above) > 0
        for _, number in self._groups.recorded_inputs(above):
            self._group_recorded(sizes, number)
        left = array("q", (number for number, size in enumerate(sizes) if size >= 0))
        total = sum(sizes[number] for number in left)
        if not is_grouped and self._is_last(total, above):
            for number in left:
                if self._groups.keep(self._level, number, sizes[number]):
                    total -= sizes[number]
                    sizes[number] = _KEPT
            self._groups.make_final([code_of(self._level, n) for n in left if sizes[n] >= 0], total)
            return
        for bin_ in self._bins(sizes, left):
            codes = [code_of(self._level, left[index]) for index in bin_]
            self._groups.make(codes, sum(sizes[left[index]] for index in bin_))
        self._level = above

    def _is_last(self, total: int, above: int) -> bool:
        if self._groups.recorded_final_level is not None:
            return above >= self._groups.recorded_final_level
        return total <= self._capacity or self._is_capped(self._level)

    def _group_recorded(self, sizes: array[int], number: int) -> None:
        if number < len(sizes) and sizes[number] >= 0:
            self._groups.keep(self._level, number, sizes[number])
            sizes[number] = _KEPT
        else:
            self._groups.lose(self._level, number)  # what is dropped with it is not there when its level ends

    def _bins(self, sizes: array[int], left: array[int]) -> Iterable[Sequence[int]]:
        """Return groups of places in what is left."""
        if self._is_by_tokens:
            return first_fit_decreasing(array("q", (sizes[number] for number in left)), self._capacity)
        return chunks(len(left), self._capacity)


class PoolGrouper(Grouper):
    """Pipelined: a pool for each level, so that an output is reduced no more often than level by level (S-MR-111).

    One pool for all levels would mix what was reduced ten times with what never was, and be ten levels high as soon as
    maps take ten times as long as reduces.
    """

    def __init__(self, rules: MapReduceRules, groups: Groups) -> None:
        super().__init__(rules, groups)
        self._pools: list[_Arrivals] = [_Arrivals()]
        #: outputs of the highest level, which wait for the final reduce
        self._resting = _Arrivals()
        self._arrived = 0
        #: by level: how much ended, with an output or without
        self._ended: dict[int, int] = {}
        #: levels whose pools went up; pools below are empty
        self._closed = 0
        self._items = 0
        self._are_all = False

    def know_items(self, count: int, *, are_all: bool) -> None:
        """Give up items of the record that the source no longer has; perhaps the level of the items is complete."""
        self._items = count
        if are_all and not self._are_all:
            self._are_all = True
            for number in self._groups.recorded_items_from(count):
                self._leave_out(0, number)
            self._close_levels()

    def add(self, level: int, number: int, size: int) -> None:
        """Put an output into the pool of its level, and what was there before into a group if it does not fit."""
        self._ended[level] = self._ended.get(level, 0) + 1
        if not self._groups.keep(level, number, size):
            self._arrived += 1
            code = code_of(level, number)
            if self._is_capped(level):
                self._resting.add(code, size, self._arrived)
            else:
                self._put(max(level, self._closed), code, size, self._arrived)
        self._close_levels()

    def discard(self, level: int, number: int) -> None:
        """Leave it out of its recorded group."""
        self._ended[level] = self._ended.get(level, 0) + 1
        self._leave_out(level, number)
        self._close_levels()

    def group_rest(self) -> None:
        """Make the final group in the order of arrival."""
        everything = [*self._pools, self._resting]
        order = sorted(entry for each in everything for entry in zip(each.order, each.codes, strict=True))
        size = sum(each.size for each in everything)
        self._pools, self._resting = [_Arrivals()], _Arrivals()
        self._groups.make_final([code for _, code in order], size)

    def _put(self, index: int, code: int, size: int, order: int) -> None:
        while index >= len(self._pools):
            self._pools.append(_Arrivals())
        if size > self._capacity:
            self._groups.make([code], size)
            return
        if self._pools[index].size + size > self._capacity:
            pool, self._pools[index] = self._pools[index], _Arrivals()
            self._groups.make(pool.codes, pool.size)
        self._pools[index].add(code, size, order)

    def _close_levels(self) -> None:
        """Let what is in the pools of complete levels go up, as long as there is something above to go to."""
        while self._has_above(self._closed) and self._is_complete(self._closed):
            index = self._closed
            self._closed += 1
            if index < len(self._pools):
                pool, self._pools[index] = self._pools[index], _Arrivals()
                for code, size, order in zip(pool.codes, pool.sizes, pool.order, strict=True):
                    self._put(self._closed, code, size, order)

    def _has_above(self, index: int) -> bool:
        return self._groups.group_count(index + 1) > 0 or any(pool.codes for pool in self._pools[index + 1 :])

    def _is_complete(self, index: int) -> bool:
        """Whether nothing comes any more that would go into that pool or one below."""
        if not self._are_all or self._ended.get(0, 0) < self._items:
            return False
        return all(self._ended.get(level, 0) >= self._groups.group_count(level) for level in range(1, index + 1))

    def validate(self) -> None:
        """Check the pools."""
        assert all(pool.size <= self._capacity for pool in self._pools), "the pools fit"  # noqa: S101  invariants
        assert not any(pool.codes for pool in self._pools[: self._closed]), "closed pools are empty"  # noqa: S101


class OrderedGrouper(Grouper):
    """Pipelined: each level in its order, as far as it is there."""

    def __init__(self, rules: MapReduceRules, groups: Groups) -> None:
        super().__init__(rules, groups)
        self._levels = [_Sequence(is_split=groups.group_count(1) > 0)]
        self._items = 0
        self._are_all = False

    def know_items(self, count: int, *, are_all: bool) -> None:
        """Perhaps the level of the items is complete by that."""
        self._items = count
        if are_all:
            self._are_all = True
            for number in self._groups.recorded_items_from(count):
                self._leave_out(0, number)
            self._advance(0)

    def add(self, level: int, number: int, size: int) -> None:
        """Take an output, and group what it was waited for."""
        is_kept = self._groups.keep(level, number, size)
        _put(self._sequence(level).sizes, number, _KEPT if is_kept else size)
        self._advance(level)

    def discard(self, level: int, number: int) -> None:
        """Go on with the sequence without it."""
        self._leave_out(level, number)
        _put(self._sequence(level).sizes, number, _LOST)
        self._advance(level)

    def group_rest(self) -> None:
        """Make the final group of the level that is one group."""
        codes = [code for sequence in self._levels for code in sequence.open]
        size = sum(sequence.open_size for sequence in self._levels)
        for sequence in self._levels:
            sequence.reopen()
        self._groups.make_final(codes, size)

    def _sequence(self, level: int) -> _Sequence:
        while level >= len(self._levels):
            self._levels.append(_Sequence(is_split=self._groups.group_count(len(self._levels) + 1) > 0))
        return self._levels[level]

    def _advance(self, level: int) -> None:
        sequence = self._sequence(level)
        sizes = sequence.sizes
        while sequence.cursor < len(sizes) and sizes[sequence.cursor] != _PENDING:
            if sizes[sequence.cursor] >= 0:
                self._append(level, sequence.cursor, sizes[sequence.cursor])
            sequence.cursor += 1
        if self._is_complete(level):
            if sequence.is_split and sequence.open:  # else all of the level is one group, for the final reduce
                self._close(sequence)
            if self._groups.group_count(level + 1):
                self._advance(level + 1)

    def _append(self, level: int, number: int, size: int) -> None:
        sequence = self._levels[level]
        is_over = sequence.open_size + size > self._capacity
        if is_over and sequence.open and not self._is_capped(level):
            self._close(sequence)
        sequence.open.append(code_of(level, number))
        sequence.open_size += size

    def _close(self, sequence: _Sequence) -> None:
        self._groups.make(sequence.open, sequence.open_size)
        sequence.reopen()
        sequence.is_split = True

    def _is_complete(self, level: int) -> bool:
        """Whether all outputs of the level that will ever be are there."""
        if not level:
            return self._are_all and self._levels[0].cursor >= self._items
        below = self._is_complete(level - 1)
        return below and self._sequence(level).cursor >= self._groups.group_count(level)

    def validate(self) -> None:
        """Check the open groups."""
        for level, sequence in enumerate(self._levels):
            assert sequence.cursor <= len(sequence.sizes), "cursor"  # noqa: S101  invariants
            is_sound = sequence.open_size <= self._capacity or len(sequence.open) == 1 or self._is_capped(level)
            assert is_sound, "the open group fits"  # noqa: S101


@dataclass(slots=True, kw_only=True)
class _Sequence:
    """The outputs of a level in their order."""

    sizes: array[int] = field(default_factory=lambda: array("q"))
    #: everything before it is grouped, open or lost
    cursor: int = 0
    open: array[int] = field(default_factory=lambda: array("q"))
    open_size: int = 0
    #: a group was made of it
    is_split: bool

    def reopen(self) -> None:
        self.open = array("q")
        self.open_size = 0


@dataclass(slots=True)
class _Arrivals:
    """Outputs in the order of their arrival, with that order."""

    codes: array[int] = field(default_factory=lambda: array("q"))
    order: array[int] = field(default_factory=lambda: array("q"))
    sizes: array[int] = field(default_factory=lambda: array("q"))
    size: int = 0

    def add(self, code: int, size: int, order: int) -> None:
        self.codes.append(code)
        self.order.append(order)
        self.sizes.append(size)
        self.size += size


def grouper_of(rules: MapReduceRules, groups: Groups) -> Grouper:
    """Return the grouper for an order of work."""
    if not rules.is_pipelined:
        return LevelGrouper(rules, groups)
    return OrderedGrouper(rules, groups) if rules.is_ordered else PoolGrouper(rules, groups)


def _put(sizes: array[int], number: int, size: int) -> None:
    """Set the size of a number, which may be beyond the end."""
    missing = number + 1 - len(sizes)
    if missing > 0:
        sizes.extend([_PENDING] * missing)
    sizes[number] = size
