"""What a definition means for the machine, the window and the reader of one map-reduce.

In: a definition, and how many processes a kind of agents may get. Out: the machine's rules; the items, or the one item
that stands for all of them where the short-circuit is taken (S-MR-80 to S-MR-83).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble_ray.definition.fields import ParallelErrorStrategy
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.items.pulling import ItemReader, ListReader, Pulled, RefusedItem
from ensemble_ray.plan.map_reduce_factories import input_tokens
from ensemble_ray.process.forks import threads
from ensemble_ray.schedule.map_reduce_groups import Grouping, MapReduceRules

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.items.pulling import ItemEntry

#: Tasks in flight per process where nothing limits them (S-MR-140).
_PER_PROCESS = 256
#: Where places are limited, so many more tasks wait in the processes: a place that becomes free is not to wait for a message.
_AHEAD = 1.25
#: Items pulled at a time while it is not known whether all of them fit the budget.
_PROBE = 256


def window_of(definition: MapDefinition, most_processes: int | None) -> int:
    """How many tasks may be in flight (S-MR-140).

    Args:
        definition: What is to be run.
        most_processes: How many processes a kind of agents may get; None: this one.
    """
    if definition.max_parallel_tasks is not None:
        return definition.max_parallel_tasks
    processes = 1 if most_processes is None else definition.replicas or most_processes
    if definition.max_concurrency is not None:
        return math.ceil(definition.max_concurrency * processes * _AHEAD)
    return _PER_PROCESS * processes


def rules_of(definition: MapDefinition, *, window: int, is_direct: bool) -> MapReduceRules:
    """Return what the source goes by."""
    fails_on_item = definition.item_policy == "fail" or is_direct
    fails_on_reduce = definition.parallel_error_strategy is ParallelErrorStrategy.FAIL_FAST
    if is_direct or not isinstance(definition, MapReduceDefinition):
        return MapReduceRules(
            grouping=Grouping.NONE, window=window, fails_on_item=fails_on_item, fails_on_reduce=fails_on_reduce
        )
    is_adaptive = definition.is_adaptive
    return MapReduceRules(
        grouping=Grouping.BUDGET if is_adaptive else Grouping.CHUNK,
        capacity=definition.capacity,
        max_levels=definition.max_reduce_levels if is_adaptive else None,
        is_pipelined=definition.is_pipelined,
        is_ordered=definition.ordered,
        window=window,
        fails_on_item=fails_on_item,
        fails_on_reduce=fails_on_reduce,
    )


async def open_items(definition: MapDefinition) -> tuple[ItemReader, bool]:
    """Open the items: return the reader of a run's items, and whether all of them are one task (S-MR-81).

    Raises:
        ValidationError: the items are an iterator that was consumed, or an estimator gave no text.
        Exception: what the source or the estimator raised.
    """
    reader = definition.item_source.open()
    if not isinstance(definition, MapReduceDefinition) or definition.direct_task is None or definition.budget is None:
        return reader, False
    try:
        return await _probe(definition, reader, definition.budget)
    except BaseException:
        await reader.close()
        raise


async def _probe(definition: MapReduceDefinition, reader: ItemReader, budget: int) -> tuple[ItemReader, bool]:
    """Read until it is known whether all items fit the budget."""
    entries: list[ItemEntry] = []
    total, is_exhausted = 0, False
    while not is_exhausted and total <= budget:
        pulled = await reader.next(_PROBE)
        entries.extend(pulled.items)
        is_exhausted = pulled.is_exhausted
        if any(isinstance(entry, RefusedItem) for entry in pulled.items):
            return _Again(entries, reader, is_exhausted=is_exhausted), False  # such a line is dealt with item by item
        items = [entry[1] for entry in pulled.items if not isinstance(entry, RefusedItem)]
        total += await threads.run(_tokens, definition, items)
    if total > budget or not entries:
        return _Again(entries, reader, is_exhausted=is_exhausted), False
    await reader.close()
    return ListReader([[entry[1] for entry in entries if not isinstance(entry, RefusedItem)]]), True


def _tokens(definition: MapReduceDefinition, items: Sequence[object]) -> int:
    return sum(input_tokens(definition, item) for item in items)


class _Again:
    """A reader that first gives what was read already."""

    def __init__(self, entries: Sequence[ItemEntry], rest: ItemReader, *, is_exhausted: bool) -> None:
        self._entries = list(reversed(entries))
        self._rest = rest
        self._is_exhausted = is_exhausted

    async def next(self, count: int) -> Pulled:
        """Return the next entries."""
        if not self._entries:
            return Pulled((), is_exhausted=True) if self._is_exhausted else await self._rest.next(count)
        entries = [self._entries.pop() for _ in range(min(count, len(self._entries)))]
        return Pulled(entries, is_exhausted=self._is_exhausted and not self._entries)

    async def close(self) -> None:
        """Let the source go."""
        await self._rest.close()
