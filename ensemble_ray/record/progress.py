"""How many tasks of a recorded run are done. Room: record.

In: a run's id. Out: a few numbers, at a cost that does not depend on what the tasks gave. Never: an output read for a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ensemble_ray.record.map_reduce_data import is_direct, is_fed, is_of_items
from ensemble_ray.record.task_fold import as_mapping, as_sequence
from ensemble_ray.values.ids import delegating_call

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore

__all__ = ["Progress", "tasks_done"]


class Progress(NamedTuple):
    """How far a run is."""

    #: tasks with an output
    done: int
    #: tasks that are known of: all of a plan, of a fed run those that were made so far
    total: int
    #: those of `done` that are of items: maps, or the one task of all items
    items_done: int


async def tasks_done(store: RunStore, run_id: str) -> Progress:
    """How far a run is.

    Raises:
        RecordError: the record is damaged, or of a newer format.
    """
    total, is_of_fed = 0, False
    async for page in store.read(run_id, kinds=("plan", "items")):
        for fact in page:
            if fact.kind == "items":
                total += len(as_sequence(fact.data.get("digests")))
            elif is_fed(fact.data):
                is_of_fed = True
            else:
                total = len(as_sequence(as_mapping(fact.data.get("plan")).get("nodes")))
    done = items = 0
    async for page in store.read(run_id, kinds=("output", "group") if is_of_fed else ("output",), has_data=False):
        for fact in page:
            if fact.kind == "group":
                total += 1
            # Work that was handed on has outputs of its own, and is no task of the plan.
            elif delegating_call(fact.name) is None:
                done += 1
                items += is_of_items(fact.name)
                total += is_of_fed and is_direct(fact.name)
    return Progress(done, total, items)
