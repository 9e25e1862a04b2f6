"""Groups of outputs that reduces are made of: their numbers, their queue and those of the record. Package: schedule.

In come outputs by level, number and size (tokens, or 1); out come groups in the order in which they were made, each once. A group
that is in the queue is never changed, and no output is ever in two.

A map-reduce has groups of many thousand outputs, and many thousand groups. So a place is one integer here, and
what is kept stands in flat arrays: 8 bytes for each input that waits in the queue, 12 for each input of the record.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ensemble_ray.schedule.instructions import Position, ReduceGroup

__all__ = ["Group", "Groups", "code_of", "position_of"]

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
        assert self._starts[-1] == len(self._members), "the record's groups cover their members"  # noqa: S101  invariants
        assert min(self._missing, default=0) >= 0, "no input of the record comes twice"  # noqa: S101
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
        assert len(self._codes) == len(self._sizes) == len(self._counts), "queue"  # noqa: S101  invariants
        assert 0 <= self._popped_groups <= len(self._codes), "queue's start"  # noqa: S101
        waiting = sum(self._counts[self._popped_groups :])
        assert self._popped_inputs + waiting == len(self._inputs), "queue's inputs"  # noqa: S101
