"""Groups of outputs for reduces: packing, numbering, and the groups of a record."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

import msgspec
from msgspec import Struct

from ensemble_ray.schedule.instructions import Position, ReduceGroup

_NUMBER_BITS = 40
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
#: No recorded group, or the final reduce, instead of a group's number.
_NO_GROUP = -1
_FINAL_GROUP = -2
#: The output has not arrived, will never arrive, or is in a recorded group: instead of a size.
_PENDING = -1
_LOST = -2
_GROUPED = -3


class Grouping(StrEnum):
    BUDGET = "budget"
    CHUNK = "chunk"
    NONE = "none"


class MapReduceRules(Struct, frozen=True, kw_only=True):
    grouping: Grouping
    #: in tokens (BUDGET) or outputs (CHUNK)
    capacity: int = 0
    #: below the final one (BUDGET); None: no cap
    max_levels: int | None = None
    is_pipelined: bool = False
    is_ordered: bool = False
    window: int
    fails_on_item: bool
    fails_on_reduce: bool

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window must be >= 1, got: {self.window}")
        if self.is_ordered and not self.is_pipelined:
            raise ValueError("is_ordered needs is_pipelined")
        if self.grouping is Grouping.CHUNK and self.capacity < 2:  # noqa: PLR2004  groups of one never become fewer
            raise ValueError(f"capacity of a chunk must be >= 2, got: {self.capacity}")
        if self.grouping is Grouping.BUDGET and (self.capacity < 1 or self.max_levels is None or self.max_levels < 1):
            raise ValueError(
                f"a budget needs capacity >= 1 and max_levels >= 1, got: {self.capacity} and {self.max_levels}"
            )


def code_of(level: int, number: int) -> int:
    return level << _NUMBER_BITS | number


def position_of(code: int) -> Position:
    return code >> _NUMBER_BITS, code & _NUMBER_MASK


class Group(Struct, frozen=True, kw_only=True):
    level: int
    number: int
    inputs: tuple[Position, ...]
    size: int
    is_final: bool


class Groups:
    """Makes groups, numbers them and queues them until their reduces start.

    A recorded group is made again as soon as its inputs have arrived, without inputs that fail this time (S-MR-161). There
    may be thousands of groups with thousands of outputs, so flat arrays store positions as integers: 8 bytes per queued
    input, 12 per recorded one.
    """

    def __init__(self, recorded: Iterable[ReduceGroup] = ()) -> None:
        #: without the final one; recorded groups count from the start
        self._group_counts: dict[int, int] = {}
        self._final: Group | None = None
        self._queue = _Queue()
        # The members of recorded group g are _members[_starts[g]:_starts[g + 1]].
        self._members = array("q")
        self._starts = array("q", [0])
        self._codes = array("q")
        self._missing = array("q")
        self._sizes = array("q")
        #: by level, then by number of the output
        self._owners: dict[int, array[int]] = {}
        self._recorded_final: ReduceGroup | None = None
        self._is_by_level = True
        self._final_sizes: dict[int, int] = {}
        for group in recorded:
            self._add_recorded(group)

    def __len__(self) -> int:
        return len(self._queue) + (self._final is not None)

    def group_count(self, level: int) -> int:
        return self._group_counts.get(level, 0)

    @property
    def recorded_final_level(self) -> int | None:
        return self._recorded_final.level if self._recorded_final else None

    @property
    def is_by_level(self) -> bool:
        """Whether the inputs of every recorded group are from the level below it."""
        return self._is_by_level

    def recorded_inputs(self, level: int) -> Iterator[Position]:
        for index, code in enumerate(self._codes):
            if position_of(code)[0] == level:
                for member in self._members[self._starts[index] : self._starts[index + 1]]:
                    yield position_of(member)

    def recorded_items_from(self, number: int) -> Iterator[int]:
        owners = self._owners.get(0, ())
        return (item for item in range(number, len(owners)) if owners[item] != _NO_GROUP)

    def place(self, level: int, number: int, size: int) -> bool:
        """Put an output into its recorded group; return False if the record has none."""
        index = self._owner(level, number)
        if index == _NO_GROUP:
            return False
        if index == _FINAL_GROUP:
            self._final_sizes[code_of(level, number)] = size
            return True
        self._sizes[index] += size
        self._count_down(index)
        return True

    def drop(self, level: int, number: int) -> Position | None:
        """Remove an output that will never arrive; return the reduce that has no input left."""
        index = self._owner(level, number)
        if index < 0:
            return None
        self._owners[level][number] = _NO_GROUP
        return position_of(self._codes[index]) if self._count_down(index) == 0 else None

    def make(self, inputs: Sequence[int], size: int) -> None:
        """Make a group one level above its highest input; inputs are codes (S-MR-112)."""
        level = position_of(max(inputs))[0] + 1
        number = self.group_count(level)
        self._group_counts[level] = number + 1
        self._queue.put(code_of(level, number), inputs, size)

    def make_final(self, inputs: Sequence[int], size: int) -> None:
        """Make the final group: its recorded inputs in their order, then the others."""
        recorded = [code_of(*each) for each in self._recorded_final.inputs] if self._recorded_final else []
        recorded = [code for code in recorded if code in self._final_sizes]
        positions = tuple(position_of(code) for code in (*recorded, *inputs))
        if not positions:
            return
        level = max(level for level, _ in positions) + 1
        self._final = Group(
            level=level,
            number=self.group_count(level),
            inputs=positions,
            size=size + sum(self._final_sizes.values()),
            is_final=True,
        )
        self._final_sizes.clear()

    def pop(self) -> Group:
        if len(self._queue):
            return self._queue.pop()
        final, self._final = self._final, None
        if final is None:
            raise LookupError("there is no group")
        return final

    def _add_recorded(self, group: ReduceGroup) -> None:
        name = f"recorded group {group.level}-{group.number}"
        if self._recorded_final is not None:
            raise ValueError(f"{name} follows the final one")
        if not group.inputs or group.level != max(level for level, _ in group.inputs) + 1:
            raise ValueError(f"{name} is not one level above its inputs {group.inputs}")
        if group.number != self.group_count(group.level):
            raise ValueError(f"{name}: the next number on that level is {self.group_count(group.level)}")
        index = _FINAL_GROUP if group.is_final else len(self._codes)
        self._is_by_level &= all(level == group.level - 1 for level, _ in group.inputs)
        for level, number in group.inputs:
            if level and number >= self.group_count(level):
                raise ValueError(f"{name} has the input {level}-{number}, which no group before it is")
            owners = self._owners.setdefault(level, array("i"))
            owners.extend([_NO_GROUP] * (number + 1 - len(owners)))
            if owners[number] != _NO_GROUP:
                raise ValueError(f"{name} has the input {level}-{number}, which an earlier one has")
            owners[number] = index
        if group.is_final:
            self._recorded_final = group
            return
        self._group_counts[group.level] = group.number + 1
        self._codes.append(code_of(group.level, group.number))
        self._members.extend(code_of(*each) for each in group.inputs)
        self._starts.append(len(self._members))
        self._missing.append(len(group.inputs))
        self._sizes.append(0)

    def _owner(self, level: int, number: int) -> int:
        owners = self._owners.get(level)
        return owners[number] if owners is not None and number < len(owners) else _NO_GROUP

    def _count_down(self, index: int) -> int | None:
        """Count an input that arrived or was dropped; after the last one queue the group and return its size."""
        self._missing[index] -= 1
        if self._missing[index]:
            return None
        members = self._members[self._starts[index] : self._starts[index + 1]]
        arrived = [member for member in members if self._owner(*position_of(member)) == index]
        if arrived:
            self._queue.put(self._codes[index], arrived, self._sizes[index])
        return len(arrived)


class _Queue:
    """Groups first in, first out. Popped groups are deleted when they outnumber the others."""

    def __init__(self) -> None:
        self._codes = array("q")
        self._sizes = array("q")
        self._inputs = array("q")
        self._counts = array("q")
        self._popped_groups = 0
        self._popped_inputs = 0

    def __len__(self) -> int:
        return len(self._codes) - self._popped_groups

    def put(self, code: int, inputs: Sequence[int], size: int) -> None:
        self._codes.append(code)
        self._sizes.append(size)
        self._inputs.extend(inputs)
        self._counts.append(len(inputs))

    def pop(self) -> Group:
        index, start = self._popped_groups, self._popped_inputs
        end = start + self._counts[index]
        level, number = position_of(self._codes[index])
        group = Group(
            level=level,
            number=number,
            inputs=tuple(position_of(code) for code in self._inputs[start:end]),
            size=self._sizes[index],
            is_final=False,
        )
        self._popped_groups, self._popped_inputs = index + 1, end
        if self._popped_groups > len(self):
            for each in (self._codes, self._sizes, self._counts):
                del each[: self._popped_groups]
            del self._inputs[: self._popped_inputs]
            self._popped_groups = self._popped_inputs = 0
        return group


def first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Pack items, largest first, each into the first bin with room, else into a new one (S-MR-70 to S-MR-73).

    O(n log n): a tournament tree over the free space of the bins, also of bins that are not open yet, finds the first one
    that fits. An item above the budget is alone.
    """
    leaf_count = 1 << (len(sizes) - 1).bit_length() if sizes else 1
    # The node n has the children 2n and 2n + 1; the bin b is the leaf leaf_count + b.
    free = [budget] * (2 * leaf_count)
    bins: list[list[int]] = []
    for position in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):  # stable, also in reverse
        size = sizes[position]
        node = leaf_count + len(bins)
        if size <= budget:
            node = 1
            while node < leaf_count:
                node *= 2
                if free[node] < size:
                    node += 1
        if node - leaf_count == len(bins):
            bins.append([])
        bins[node - leaf_count].append(position)
        free[node] -= size
        while node := node // 2:
            most_free = max(free[2 * node], free[2 * node + 1])
            if most_free == free[node]:
                break
            free[node] = most_free
    return bins


def chunks(count: int, size: int) -> list[range]:
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def grouper_of(rules: MapReduceRules, groups: Groups) -> Grouper:
    if not rules.is_pipelined:
        return LevelGrouper(rules, groups)
    return OrderedGrouper(rules, groups) if rules.is_ordered else PoolGrouper(rules, groups)


class Grouper:
    def __init__(self, rules: MapReduceRules, groups: Groups) -> None:
        self._groups = groups
        self._is_by_tokens = rules.grouping is Grouping.BUDGET
        self._capacity = rules.capacity
        self._max_levels = rules.max_levels

    def set_item_count(self, count: int, *, are_all: bool) -> None:
        """Set how many items have arrived, and whether these are all."""

    def add(self, level: int, number: int, size: int) -> None:
        """Add an output."""
        raise NotImplementedError

    def discard(self, level: int, number: int) -> None:
        """Skip an output that will never arrive."""
        raise NotImplementedError

    def group_rest(self) -> None:
        """Make groups of the remaining outputs. No task runs, and no items are left."""
        raise NotImplementedError

    def _is_capped(self, level: int) -> bool:
        """Whether only the final reduce may read outputs of a level (S-MR-112)."""
        return self._max_levels is not None and level >= self._max_levels

    def _drop_recorded(self, level: int, number: int) -> None:
        dropped = self._groups.drop(level, number)
        if dropped is not None:
            self.discard(*dropped)


class LevelGrouper(Grouper):
    """Groups level by level. A ValueError: the record is of a pipelined run."""

    def __init__(self, rules: MapReduceRules, groups: Groups) -> None:
        super().__init__(rules, groups)
        if not groups.is_by_level:
            raise ValueError("The recorded groups are of a pipelined run, this one goes level by level")
        self._level = 0
        #: of the current level
        self._sizes = array("q")

    def add(self, level: int, number: int, size: int) -> None:  # noqa: ARG002  all running tasks are of one level
        _put(self._sizes, number, size)

    def discard(self, level: int, number: int) -> None:
        pass  # an output without a size at the end of its level was lost

    def group_rest(self) -> None:
        """Begin the next level: recorded groups first, then new groups of the other outputs."""
        sizes, self._sizes = self._sizes, array("q")
        above = self._level + 1
        is_grouped = self._groups.group_count(above) > 0
        for _, number in self._groups.recorded_inputs(above):
            if number < len(sizes) and sizes[number] >= 0:
                self._groups.place(self._level, number, sizes[number])
                sizes[number] = _GROUPED
            else:
                self._groups.drop(self._level, number)  # a reduce without inputs will be absent at the end of its level
        left = array("q", (number for number, size in enumerate(sizes) if size >= 0))
        total = sum(sizes[number] for number in left)
        final_level = self._groups.recorded_final_level
        if final_level is not None:
            is_last = above >= final_level
        else:
            is_last = total <= self._capacity or self._is_capped(self._level)
        if not is_grouped and is_last:
            for number in left:
                if self._groups.place(self._level, number, sizes[number]):
                    total -= sizes[number]
                    sizes[number] = _GROUPED
            self._groups.make_final([code_of(self._level, n) for n in left if sizes[n] >= 0], total)
            return
        bins: Iterable[Sequence[int]] = chunks(len(left), self._capacity)
        if self._is_by_tokens:
            bins = first_fit_decreasing(array("q", (sizes[number] for number in left)), self._capacity)
        for bin_ in bins:
            codes = [code_of(self._level, left[index]) for index in bin_]
            self._groups.make(codes, sum(sizes[left[index]] for index in bin_))
        self._level = above


class PoolGrouper(Grouper):
    """Groups in the order of arrival, with one pool per level.

    So an output is reduced no more often than level by level (S-MR-111). A single pool would be ten levels high if maps
    took ten times as long as reduces.
    """

    def __init__(self, rules: MapReduceRules, groups: Groups) -> None:
        super().__init__(rules, groups)
        self._pools: list[_Arrivals] = [_Arrivals()]
        #: of the highest level, for the final reduce
        self._resting = _Arrivals()
        self._arrived = 0
        #: number of ended tasks by level, with or without an output
        self._ended: dict[int, int] = {}
        #: levels whose outputs moved up
        self._closed = 0
        self._items = 0
        self._are_all = False

    def set_item_count(self, count: int, *, are_all: bool) -> None:
        self._items = count
        if are_all and not self._are_all:
            self._are_all = True
            for number in self._groups.recorded_items_from(count):  # the source no longer has them
                self._drop_recorded(0, number)
            self._close_levels()

    def add(self, level: int, number: int, size: int) -> None:
        self._ended[level] = self._ended.get(level, 0) + 1
        if not self._groups.place(level, number, size):
            self._arrived += 1
            code = code_of(level, number)
            if self._is_capped(level):
                self._resting.add(code, size, self._arrived)
            else:
                self._put(max(level, self._closed), code, size, self._arrived)
        self._close_levels()

    def discard(self, level: int, number: int) -> None:
        self._ended[level] = self._ended.get(level, 0) + 1
        self._drop_recorded(level, number)
        self._close_levels()

    def group_rest(self) -> None:
        pools = [*self._pools, self._resting]
        order = sorted(entry for each in pools for entry in zip(each.order, each.codes, strict=True))
        size = sum(each.size for each in pools)
        self._pools, self._resting = [_Arrivals()], _Arrivals()
        self._groups.make_final([code for _, code in order], size)

    def _put(self, index: int, code: int, size: int, order: int) -> None:
        """Add an output to a pool. If it does not fit, the pool becomes a group first."""
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
        """Move the pools of complete levels up, as long as a level above has outputs or groups."""
        while self._is_complete(index := self._closed):
            if not self._groups.group_count(index + 1) and not any(pool.codes for pool in self._pools[index + 1 :]):
                return
            self._closed += 1
            if index < len(self._pools):
                pool, self._pools[index] = self._pools[index], _Arrivals()
                for code, size, order in zip(pool.codes, pool.sizes, pool.order, strict=True):
                    self._put(self._closed, code, size, order)

    def _is_complete(self, index: int) -> bool:
        """Whether no more outputs will enter this pool or one below."""
        if not self._are_all or self._ended.get(0, 0) < self._items:
            return False
        return all(self._ended.get(level, 0) >= self._groups.group_count(level) for level in range(1, index + 1))


class OrderedGrouper(Grouper):
    """Groups neighbours of a level, in the order of their numbers."""

    def __init__(self, rules: MapReduceRules, groups: Groups) -> None:
        super().__init__(rules, groups)
        self._levels = [_Sequence(is_split=groups.group_count(1) > 0)]
        self._items = 0
        self._are_all = False

    def set_item_count(self, count: int, *, are_all: bool) -> None:
        self._items = count
        if are_all:
            self._are_all = True
            for number in self._groups.recorded_items_from(count):  # the source no longer has them
                self._drop_recorded(0, number)
            self._advance(0)

    def add(self, level: int, number: int, size: int) -> None:
        is_recorded = self._groups.place(level, number, size)
        _put(self._sequence(level).sizes, number, _GROUPED if is_recorded else size)
        self._advance(level)

    def discard(self, level: int, number: int) -> None:
        self._drop_recorded(level, number)
        _put(self._sequence(level).sizes, number, _LOST)
        self._advance(level)

    def group_rest(self) -> None:
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
            if (size := sizes[sequence.cursor]) >= 0:
                is_over = sequence.open_size + size > self._capacity
                if is_over and sequence.open and not self._is_capped(level):
                    self._close(sequence)
                sequence.open.append(code_of(level, sequence.cursor))
                sequence.open_size += size
            sequence.cursor += 1
        if self._is_complete(level):
            if sequence.is_split and sequence.open:  # else the whole level is one group, for the final reduce
                self._close(sequence)
            if self._groups.group_count(level + 1):
                self._advance(level + 1)

    def _close(self, sequence: _Sequence) -> None:
        self._groups.make(sequence.open, sequence.open_size)
        sequence.reopen()
        sequence.is_split = True

    def _is_complete(self, level: int) -> bool:
        if not level:
            return self._are_all and self._levels[0].cursor >= self._items
        below = self._is_complete(level - 1)
        return below and self._sequence(level).cursor >= self._groups.group_count(level)


class _Sequence(Struct, kw_only=True):
    sizes: array[int] = msgspec.field(default_factory=lambda: array("q"))
    cursor: int = 0
    open: array[int] = msgspec.field(default_factory=lambda: array("q"))
    open_size: int = 0
    is_split: bool

    def reopen(self) -> None:
        self.open = array("q")
        self.open_size = 0


class _Arrivals(Struct):
    codes: array[int] = msgspec.field(default_factory=lambda: array("q"))
    order: array[int] = msgspec.field(default_factory=lambda: array("q"))
    sizes: array[int] = msgspec.field(default_factory=lambda: array("q"))
    size: int = 0

    def add(self, code: int, size: int, order: int) -> None:
        self.codes.append(code)
        self.order.append(order)
        self.sizes.append(size)
        self.size += size


def _put(sizes: array[int], number: int, size: int) -> None:
    """Set the size of a number, which may be beyond the end."""
    missing = number + 1 - len(sizes)
    if missing > 0:
        sizes.extend([_PENDING] * missing)
    sizes[number] = size
