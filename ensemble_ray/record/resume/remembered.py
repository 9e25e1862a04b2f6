"""What the earlier processes of a run remembered: notes that its tasks were shown, and outputs that are in its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.execute.effects import typed_output
from ensemble_ray.facts.ends import OutputRecorded
from ensemble_ray.facts.fact import kinds_of
from ensemble_ray.facts.memory import MemoryStored
from ensemble_ray.facts.reflection import ReflectionRecalled

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.values.memory import TaskReflection
    from ensemble_ray.values.task_output import TaskOutput


async def read_recalled(store: RunStore, run_id: str) -> AsyncIterator[tuple[str, TaskReflection | None]]:
    """Yield what tasks were shown of earlier runs, with the key that it is kept under.

    Raises:
        RecordError: the record is damaged.
    """
    async for page in store.read(run_id, kinds=kinds_of(ReflectionRecalled)):
        for fact in page:
            if isinstance(fact.data, ReflectionRecalled):
                yield fact.data.key, fact.data.recalled


async def read_stored(store: RunStore, run_id: str) -> AsyncIterator[tuple[str, TaskOutput]]:
    """Yield the outputs that were stored in the memory of a run, by instance, in their order.

    Raises:
        RecordError: the record is damaged.
    """
    noted: set[str] = set()
    async for page in store.read(run_id, kinds=kinds_of(MemoryStored, OutputRecorded)):
        for fact in page:
            if isinstance(fact.data, MemoryStored):
                noted.add(fact.instance)
            elif isinstance(fact.data, OutputRecorded) and fact.instance in noted:
                yield fact.instance, typed_output(fact.data.output_data())
