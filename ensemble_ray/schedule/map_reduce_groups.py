"""Groups of outputs that reduces are made of: their numbers, their queue and those of the record.

In come outputs by level, number and size (tokens, or 1); out come groups in the order in which they were made, each once. A group
that is in the queue is never changed, and no output is ever in two.

A map-reduce has groups of many thousand outputs, and many thousand groups. So a place is one integer here, and
what is kept stands in flat arrays: 8 bytes for each input that waits in the queue, 12 for each input of the record.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from ensemble_ray.schedule.instructions import Position, ReduceGroup

_NUMBER_BITS = 40
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1
#: Where the record says nothing of an output, and where it gives it to the final reduce.
_NO_GROUP = -1
_FINAL_GROUP = -2


def code_of(level: int, number: int) -> int:
    """Level and number as one integer."""
    return level << _NUMBER_BITS | number


def position_of(code: int) -> Position:
    """Level and number of such an integer."""
    return code >> _NUMBER_BITS, code & _NUMBER_MASK


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A reduce that may start."""

    level: int
    number: int
    inputs: tuple[Position, ...]
    #: of all inputs together
    size: int
    is_final: bool


class Groups:
    """Makes groups, numbers them and keeps them until their reduces start.

    Groups of the record are made again as soon as their inputs are there, whatever else would have been made of them
    (S-MR-161). An input that fails this time is left out of its group.

    Args:
        recorded: Groups of the record in its order, the final one perhaps among them.

    Raises:
        ValueError: the recorded groups contradict each other.
    """

    def __init__(self, recorded: Iterable[ReduceGroup] = ()) -> None:
        #: groups made, by level, the final one not counted; those of the record count from the start
        self._group_counts: dict[int, int] = {}
        self._final: Group | None = None
        self._queue = _Queue()
        # The record: the members of group g are _members[_starts[g]:_starts[g + 1]].
        self._members = array("q")
        self._starts = array("q", [0])
        self._codes = array("q")
        self._missing = array("q")
        self._sizes = array("q")
        #: by level: group of the record by number of the output
        self._owners: dict[int, array[int]] = {}
        self._recorded_final: ReduceGroup | None = None
        self._is_by_level = True
        #: sizes of outputs that the recorded final reduce gets
        self._final_sizes: dict[int, int] = {}
        for group in recorded:
            self._remember(group)

    # What may be asked.

    def __len__(self) -> int:
        return len(self._queue) + (self._final is not None)

    def group_count(self, level: int) -> int:
        """Return the number of groups made on that level and to be made because the record has them: their numbers are 0 to that less 1."""
        return self._group_counts.get(level, 0)

    @property
    def recorded_final_level(self) -> int | None:
        """Level of the final reduce of the record."""
        return self._recorded_final.level if self._recorded_final else None

    @property
    def is_by_level(self) -> bool:
        """Whether the inputs of every group of the record are of the level below it."""
        return self._is_by_level

    def recorded_inputs(self, level: int) -> Iterator[Position]:
        """Return what the groups of the record on that level are made of, group by group."""
        for index, code in enumerate(self._codes):
            if position_of(code)[0] == level:
                for member in self._members[self._starts[index] : self._starts[index + 1]]:
                    yield position_of(member)

    def recorded_items_from(self, number: int) -> Iterator[int]:
        """Numbers of recorded items from that one on."""
        owners = self._owners.get(0, ())
        return (item for item in range(number, len(owners)) if owners[item] != _NO_GROUP)

    # Making.

    def keep(self, level: int, number: int, size: int) -> bool:
        """Give an output the place that the record has for it.

        Returns:
            Whether there is one. Else the output is the caller's to group.
        """
        index = self._owner(level, number)
        if index == _NO_GROUP:
            return False
        if index == _FINAL_GROUP:
            self._final_sizes[code_of(level, number)] = size
            return True
        self._sizes[index] += size
        self._count_down(index)
        return True

    def lose(self, level: int, number: int) -> Position | None:
        """Leave an output that will never be there out of its recorded group.

        Returns:
            The reduce that will never be made since that was its last input; None: there is none.
        """
        index = self._owner(level, number)
        if index < 0:
            return None
        self._owners[level][number] = _NO_GROUP
        return position_of(self._codes[index]) if self._count_down(index) == 0 else None

    def make(self, inputs: Sequence[int], size: int) -> None:
        """Make a group of outputs, given as codes, one level above the highest of them (S-MR-112)."""
        level = position_of(max(inputs))[0] + 1
        number = self.group_count(level)
        self._group_counts[level] = number + 1
        self._queue.put(code_of(level, number), inputs, size)

    def make_final(self, inputs: Sequence[int], size: int) -> None:
        """Make the final group: what the record has there in its order, then what else is given."""
        kept = [code_of(*each) for each in self._recorded_final.inputs] if self._recorded_final else []
        kept = [code for code in kept if code in self._final_sizes]
        positions = tuple(position_of(code) for code in (*kept, *inputs))
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
        """Return the oldest group that is made and was not taken."""
        if len(self._queue):
            return self._queue.pop()
        final, self._final = self._final, None
        if final is None:
            raise LookupError("no group is made")
        return final

    # The record.

    def _remember(self, group: ReduceGroup) -> None:
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
        """One input less to wait for; how many a group has that waits for none."""
        self._missing[index] -= 1
        if self._missing[index]:
            return None
        members = self._members[self._starts[index] : self._starts[index + 1]]
        there = [member for member in members if self._owner(*position_of(member)) == index]
        if there:
            self._queue.put(self._codes[index], there, self._sizes[index])
        return len(there)

    def validate(self) -> None:
        """Check what holds between any two steps.

        Raises:
            AssertionError: it does not.
        """
        assert self._starts[-1] == len(self._members), "the record's groups cover their members"
        assert min(self._missing, default=0) >= 0, "no input of the record comes twice"
        self._queue.validate()


class _Queue:
    """Groups first in, first out, in flat arrays. What was taken goes when it is more than what waits."""

    def __init__(self) -> None:
        self._codes = array("q")
        self._sizes = array("q")
        #: inputs of all groups, and how many each has
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
            self._drop_popped()
        return group

    def _drop_popped(self) -> None:
        for each in (self._codes, self._sizes, self._counts):
            del each[: self._popped_groups]
        del self._inputs[: self._popped_inputs]
        self._popped_groups = self._popped_inputs = 0

    def validate(self) -> None:
        assert len(self._codes) == len(self._sizes) == len(self._counts), "queue"
        assert 0 <= self._popped_groups <= len(self._codes), "queue's start"
        waiting = sum(self._counts[self._popped_groups :])
        assert self._popped_inputs + waiting == len(self._inputs), "queue's inputs"


def first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Pack largest first, each into the first bin where it fits, else into a new one (S-MR-70 to S-MR-73).

    Time is in proportion to n log n. A tournament over the bins' rooms finds the first one that fits: a node knows the
    largest room below it. A bin that is not open yet has all of its room, so that it is found when no open one fits.

    Args:
        sizes: Size of each position, >= 0.
        budget: What a bin may hold; one that a larger position has for itself takes nothing more, not even 0.

    Returns:
        Positions per bin, bins and their contents in the order in which they were placed.
    """
    leaf_count = 1 << (len(sizes) - 1).bit_length() if sizes else 1
    # The node n has the children 2n and 2n + 1; the bin b is the leaf leaf_count + b.
    free = [budget] * (2 * leaf_count)
    bins: list[list[int]] = []
    for position in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):  # stable, also in reverse
        size = sizes[position]
        node = _find_first_fit(free, leaf_count, size) if size <= budget else leaf_count + len(bins)
        if node - leaf_count == len(bins):
            bins.append([])
        bins[node - leaf_count].append(position)
        _reserve(free, node, size)
    return bins


def chunks(count: int, size: int) -> list[range]:
    """Positions 0 to count - 1 in order, `size` to a group; the last group may be smaller (S-MR-32)."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _find_first_fit(free: list[int], leaf_count: int, size: int) -> int:
    node = 1
    while node < leaf_count:
        node *= 2
        if free[node] < size:
            node += 1
    return node


def _reserve(free: list[int], node: int, size: int) -> None:
    free[node] -= size
    node //= 2
    while node:
        most_free = max(free[2 * node], free[2 * node + 1])
        if most_free == free[node]:
            return
        free[node] = most_free
        node //= 2


class Grouping(StrEnum):
    """How outputs come together."""

    #: as many as weigh no more than a budget of tokens
    BUDGET = "budget"
    #: so many
    CHUNK = "chunk"
    #: not at all: maps only
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class MapReduceRules:
    """What the machine goes by.

    Raises:
        ValueError: the rules contradict each other, or would let a run go on for ever.
    """

    grouping: Grouping
    #: of a group: tokens (BUDGET) or outputs (CHUNK)
    capacity: int = 0
    #: reduce levels below the final one (BUDGET); None: no cap
    max_levels: int | None = None
    is_pipelined: bool = False
    #: pipelined only: groups follow the order of the items
    is_ordered: bool = False
    #: tasks in flight at most
    window: int
    #: the first failed map ends the run; else it is left out
    fails_on_item: bool
    #: the first failed reduce ends the run; else it is left out
    fails_on_reduce: bool

    def __post_init__(self) -> None:
        """Refuse what cannot end."""
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
        assert all(pool.size <= self._capacity for pool in self._pools), "the pools fit"
        assert not any(pool.codes for pool in self._pools[: self._closed]), "closed pools are empty"


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
            assert sequence.cursor <= len(sequence.sizes), "cursor"
            is_sound = sequence.open_size <= self._capacity or len(sequence.open) == 1 or self._is_capped(level)
            assert is_sound, "the open group fits"


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
