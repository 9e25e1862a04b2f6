"""Count the completed tasks of a recorded run without reading any output."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ensemble_ray.facts.fact import as_sequence, kinds_of
from ensemble_ray.facts.runs import GroupRecorded, ItemOutputRecorded, ItemsRecorded, OutputRecorded, PlanRecorded
from ensemble_ray.record.identity.definition import is_direct, is_of_items
from ensemble_ray.values.ids import delegating_call, node_key

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RunStore


class RunProgress(NamedTuple):
    done: int  # tasks with an output; a repeated task counts once
    total: int  # all tasks of a plan, or the tasks that a dynamic run has made until now
    items_done: int  # maps, or the direct task
    executions: int


async def tasks_done(store: RunStore, run_id: str) -> RunProgress:
    total, is_dynamic = await _count_known(store, run_id)
    executions = items = 0
    keys: set[str] = set()
    ends = (OutputRecorded, GroupRecorded, ItemOutputRecorded) if is_dynamic else (OutputRecorded,)
    async for page in store.read(run_id, kinds=kinds_of(*ends), has_data=False):
        for fact in page:
            if isinstance(fact.data, GroupRecorded):
                total += 1
            # Delegated work has its own outputs, but is no task of the plan. So have tasks inside an item of several tasks.
            elif delegating_call(fact.name) is None and not (is_dynamic and "/" in fact.name):
                executions += 1
                items += is_of_items(fact.name)
                total += is_dynamic and is_direct(fact.name)
                keys.update(() if is_dynamic else (node_key(fact.name),))  # a dynamic run may have millions
    return RunProgress(executions if is_dynamic else len(keys), total, items, executions)


async def _count_known(store: RunStore, run_id: str) -> tuple[int, bool]:
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
