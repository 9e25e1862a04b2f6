"""A definition's factories, as they are called in its run.

In: items, or outputs that come together. Out: tasks. A reduce factory gets stand-ins for the tasks whose outputs it
brings together: their description is the text of the output (S-MR-47, S-MR-115). They are made for the call and kept by
nobody; what the reduce is told of an output comes from the output itself (S-MR-48).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, cast

from ensemble_ray.definition.task import Task
from ensemble_ray.errors import IllegalStateError, ValidationError
from ensemble_ray.plan.map_reduce_factories import (
    FactoryFailure,
    ItemLoop,
    Made,
    make_direct_in_run,
    make_maps_in_run,
    make_reduce_in_run,
)
from ensemble_ray.text.foreign_text import whole_text

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
    from ensemble_ray.values.task_output import TaskOutput

#: A task must say something; what its reader sees is the output's own text, which may be empty.
_EMPTY = "(empty)"


class DefinitionFactories:
    """Factories of a map, or of a map-reduce."""

    def __init__(self, definition: MapDefinition) -> None:
        self._definition = definition

    async def maps(self, items: Sequence[object]) -> Sequence[Task | ItemLoop | FactoryFailure]:
        """Make a task for each item, or tell why its factory could not (S-MR-154).

        Raises:
            ValidationError: one has a context.
            Exception: what a factory raised, where a failed item ends the run.
        """
        results = await make_maps_in_run(self._definition, items)
        return [_check(each) for each in results]

    async def reduce(self, outputs: Sequence[TaskOutput]) -> tuple[Task, Sequence[int]]:
        """Return a task that reduces these outputs, and the positions of those that it wants as context, in its order.

        Raises:
            ValidationError: its context has others than these.
        """
        stand_ins = [_stand_in(output) for output in outputs]
        places = {stand_in.object_id: index for index, stand_in in enumerate(stand_ins)}
        task, _ = await make_reduce_in_run(cast("MapReduceDefinition", self._definition), stand_ins)
        for entry in task.context:
            if entry.object_id not in places:
                raise ValidationError(
                    f"Reduce task '{task.description}' has the context task '{entry.description}', which is none of its "
                    "group. Give it context=chunk_tasks"
                )
        return task, [places[entry.object_id] for entry in task.context]


class DirectFactory:
    """The factory of the short-circuit: its one item is all items (S-MR-81)."""

    def __init__(self, definition: MapReduceDefinition) -> None:
        self._definition = definition

    async def maps(self, items: Sequence[object]) -> Sequence[Task | ItemLoop | FactoryFailure]:
        """Return the one task."""
        (all_items,) = items
        task, _ = await make_direct_in_run(self._definition, cast("Sequence[object]", all_items))
        return (_alone(task),)

    async def reduce(self, outputs: Sequence[TaskOutput]) -> tuple[Task, Sequence[int]]:
        """Never asked for: one output needs no reduce."""
        raise IllegalStateError(f"the short-circuit reduces nothing, and was given {len(outputs)} outputs")


def _check(made: Made) -> Task | ItemLoop | FactoryFailure:
    if isinstance(made, FactoryFailure):
        return made
    if isinstance(made, ItemLoop):
        if made.loop.context:
            raise ValidationError(
                f"Loop '{made.loop.name}' has the context '{made.loop.context[0].description}': the loop of an item has no "
                "context. Put what it needs into the item"
            )
        return made
    return _alone(made[0])


def _alone(task: Task) -> Task:
    """Return the task of an item, which nothing comes before (S-MR-30)."""
    if task.context:
        raise ValidationError(
            f"Task '{task.description}' has the context task '{task.context[0].description}': the task of an item has no "
            "context. Put what it needs into the item"
        )
    return task


def _stand_in(output: TaskOutput) -> Task:
    """Return a task whose description is the text of an output; a copy, since checking all fields takes many times as long."""
    text = output.raw if output.raw.strip() else _EMPTY
    return _empty_task().duplicated(description=whole_text(text))


@cache
def _empty_task() -> Task:
    return Task(description=_EMPTY, expected_output=_EMPTY)
