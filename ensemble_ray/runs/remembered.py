"""Memory of a run that goes on: what its earlier processes recorded of what tasks gave and were shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.execute.effects import typed_output
from ensemble_ray.facts.ends import OutputRecorded
from ensemble_ray.facts.fact import kinds_of
from ensemble_ray.facts.memory import MemoryStored
from ensemble_ray.facts.reflection import ReflectionRecalled

if TYPE_CHECKING:
    from ensemble_ray.runs.launching import RunScope
    from ensemble_ray.runs.ports import RunRequest


async def restore_reflections(request: RunRequest, scope: RunScope) -> None:
    """Tell a run's reflections what its tasks were shown before it was interrupted: later ones see the same (S-REFL-2)."""
    if request.reflections is None or not scope.is_named or scope.store_address is None:
        return
    async for page in scope.store.read(scope.run_id, kinds=kinds_of(ReflectionRecalled)):
        for fact in page:
            if isinstance(fact.data, ReflectionRecalled):
                request.reflections.restore(fact.data.key, fact.data.recalled)


async def restore_short_term(request: RunRequest, scope: RunScope) -> None:
    """Put into a run's short-term memory what its record tells of its completed tasks, in their order (S-MEM-112).

    A task whose output is not recorded yet is done again on its record, and leaves its note itself.
    """
    if request.memory is None or request.context.memory is None or not request.context.memory.has_short_term:
        return
    if not scope.is_named or scope.store_address is None:
        return
    noted: set[str] = set()
    async for page in scope.store.read(scope.run_id, kinds=kinds_of(MemoryStored, OutputRecorded)):
        for fact in page:
            if isinstance(fact.data, MemoryStored):
                noted.add(fact.instance)
            elif isinstance(fact.data, OutputRecorded) and fact.instance in noted:
                request.memory.restore(fact.instance, typed_output(fact.data.output_data()))
