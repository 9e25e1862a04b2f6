"""How many tasks of a recorded run are done.

In: a run's id. Out: a few numbers, at a cost that does not depend on what the tasks gave. Never: an output read for a list.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ensemble_ray.facts.fact import as_sequence, kinds_of
from ensemble_ray.facts.runs import GroupRecorded, ItemOutputRecorded, ItemsRecorded, OutputRecorded, PlanRecorded
from ensemble_ray.record.identity.map_reduce import is_direct, is_of_items
from ensemble_ray.values.ids import delegating_call, node_key

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore


class RunProgress(NamedTuple):
    """How far a run is."""

    #: tasks with an output; one that a loop, a phase or a graph does again counts once
    done: int
    #: tasks that are known of: all of a plan, of a dynamic run those that were made so far
    total: int
    #: those of `done` that are of items: maps, or the one task of all items
    items_done: int
    #: outputs of tasks: of one that is done again, all of them
    executions: int


async def tasks_done(store: RunStore, run_id: str) -> RunProgress:
    """How far a run is.

    Raises:
        RecordError: the record is damaged, or of a newer format.
    """
    total, is_dynamic = await _count_known(store, run_id)
    executions = items = 0
    keys: set[str] = set()
    ends = (OutputRecorded, GroupRecorded, ItemOutputRecorded) if is_dynamic else (OutputRecorded,)
    async for page in store.read(run_id, kinds=kinds_of(*ends), has_data=False):
        for fact in page:
            if isinstance(fact.data, GroupRecorded):
                total += 1
            # Work that was handed on has outputs of its own, and is no task of the plan.
            # So have the tasks of an item that is more than one; the item has a fact of its own.
            elif delegating_call(fact.name) is None and not (is_dynamic and "/" in fact.name):
                executions += 1
                items += is_of_items(fact.name)
                total += is_dynamic and is_direct(fact.name)
                keys.update(() if is_dynamic else (node_key(fact.name),))  # of a dynamic run there may be millions
    return RunProgress(executions if is_dynamic else len(keys), total, items, executions)


async def _count_known(store: RunStore, run_id: str) -> tuple[int, bool]:
    """Return how many tasks the plan and the items make, and whether tasks are made while the run goes on."""
    total, is_dynamic = 0, False
    async for page in store.read(run_id, kinds=kinds_of(PlanRecorded, ItemsRecorded)):
        for fact in page:
            match fact.data:
                case ItemsRecorded(digests=digests):
                    total += len(digests)
                case PlanRecorded(is_dynamic=True):
                    is_dynamic = True
                case PlanRecorded(plan=plan):
                    total = len(as_sequence((plan or {}).get("nodes")))
                case _:
                    pass
    return total, is_dynamic
