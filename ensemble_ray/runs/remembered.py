"""Memory of a run that goes on: what its earlier processes recorded of what tasks gave and were shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.record.resume.remembered import read_recalled, read_stored

if TYPE_CHECKING:
    from ensemble_ray.runs.launching import RunScope
    from ensemble_ray.runs.ports import RunRequest


async def restore_reflections(request: RunRequest, scope: RunScope) -> None:
    """Tell a run's reflections what its tasks were shown before it was interrupted: later ones see the same (S-REFL-2)."""
    if request.reflections is None or not scope.is_named or scope.store_address is None:
        return
    async for key, recalled in read_recalled(scope.store, scope.run_id):
        request.reflections.restore(key, recalled)


async def restore_short_term(request: RunRequest, scope: RunScope) -> None:
    """Put into a run's short-term memory what its record tells of its completed tasks, in their order (S-MEM-112).

    A task whose output is not recorded yet is done again on its record, and leaves its note itself.
    """
    if request.memory is None or request.context.memory is None or not request.context.memory.has_short_term:
        return
    if not scope.is_named or scope.store_address is None:
        return
    async for instance, output in read_stored(scope.store, scope.run_id):
        request.memory.restore(instance, output)
