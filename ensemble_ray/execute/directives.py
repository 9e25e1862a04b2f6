"""Which directives a task's prompt shows: those that were active when it started first. Package: execute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.facts.directives import DirectivesShown
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.values.ids import effect_name

if TYPE_CHECKING:
    from ensemble_ray.execute.scope import TaskScope

__all__ = ["recall_directives"]

#: End of the name of the effect.
_DIRECTIVES = "directives"


async def recall_directives(scope: TaskScope) -> tuple[str, ...]:
    """Return the directives that the task is told; one that goes on is told what it was told before (S-CTL-6)."""
    instance, directives = scope.order.instance, scope.order.directives
    if not directives and not scope.recorded_facts:  # as a rule
        return ()
    name = effect_name(instance, 0, _DIRECTIVES)
    shown = scope.find_recorded(name, DirectivesShown)
    if shown is not None:
        return shown.data.texts
    if not directives or scope.find_recorded(effect_name(instance, 0), ModelAnswered) is not None:
        return ()  # its model was asked before they were given
    await scope.note(name, DirectivesShown(texts=directives))
    return directives
