"""Events of loops and graphs, made of what their machines announce. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from ensemble_ray.events import GraphStateCompletedEvent, LoopIterationCompletedEvent
from ensemble_ray.plan.plan import GraphUnit, LoopUnit
from ensemble_ray.schedule.instructions import IterationEnded
from ensemble_ray.values.ids import instance_of, node_key
from ensemble_ray.values.task_output import join_iterations

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import Unit
    from ensemble_ray.schedule.instructions import StepEnded
    from ensemble_ray.values.task_output import TaskOutput


def instances_of(what: IterationEnded | StepEnded) -> tuple[str, ...]:
    """Return whose outputs the event tells."""
    return what.instances if isinstance(what, IterationEnded) else what.output.instances


def build_announcement(
    run_id: str, unit: Unit, what: IterationEnded | StepEnded, outputs: Sequence[TaskOutput]
) -> LoopIterationCompletedEvent | GraphStateCompletedEvent:
    """Return the event (S-LOOP-108, S-GRAPH-75).

    Args:
        run_id: Whose.
        unit: The loop or the graph.
        what: What ended.
        outputs: Of `instances_of`, in their order.

    Raises:
        TypeError: the unit is of another kind.
    """
    if isinstance(what, IterationEnded) and isinstance(unit, LoopUnit):
        names = dict(zip(unit.body, unit.body_names, strict=True))
        given = zip(what.instances, outputs, strict=True)
        return LoopIterationCompletedEvent(
            run_id=run_id,
            instance=instance_of(what.unit, occurrence=what.iteration - 1),
            loop_name=unit.name,
            iteration_number=what.iteration,
            max_iterations=unit.max_iterations,
            iteration_outputs={names[node_key(instance)]: output for instance, output in given},
            iteration_duration=timedelta(seconds=what.duration_s),
        )
    if not isinstance(what, IterationEnded) and isinstance(unit, GraphUnit):
        output = join_iterations(outputs) if what.output.is_joined else outputs[-1]
        return GraphStateCompletedEvent(
            run_id=run_id,
            instance=instance_of(what.unit, occurrence=what.step - 1),
            graph_name=unit.name,
            state_name=what.state,
            step_number=what.step,
            max_steps=unit.max_steps,
            output=output,
            next_state=what.next_state,
            step_duration=timedelta(seconds=what.duration_s),
        )
    raise TypeError(f"{what} is nothing that {unit} does")
