"""Messages about iterations of loops and steps of graphs. Package: record. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble_ray.events import messages
from ensemble_ray.plan.units import GraphUnit, LoopUnit
from ensemble_ray.schedule.instructions import IterationEnded
from ensemble_ray.values.ids import instance_of, node_key

if TYPE_CHECKING:
    from ensemble_ray.events.messages import Message
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.schedule.instructions import StepEnded

__all__ = ["render_round"]


def render_round(what: IterationEnded | StepEnded, plan: Plan, texts: Mapping[str, str]) -> tuple[int, Message]:
    """Return the number of an iteration or a step, and the message about it (S-LOOP-107, S-GRAPH-75).

    Args:
        what: What ended.
        plan: Has the units.
        texts: What tasks gave, by instance.
    """
    key = what.unit.rpartition("/")[2]
    unit = next((each for each in plan.units if each.key == key), None)
    if isinstance(what, IterationEnded):
        names = dict(zip(unit.body, unit.body_names, strict=True)) if isinstance(unit, LoopUnit) else {}
        outputs = {names.get(node_key(each), node_key(each)): texts.get(each, "") for each in what.instances}
        return what.iteration, messages.loop_iteration_completed(
            name=unit.name if isinstance(unit, LoopUnit) else key,
            number=what.iteration,
            most=unit.max_iterations if isinstance(unit, LoopUnit) else 0,
            outputs=outputs,
            duration_s=what.duration_s,
            instance=instance_of(what.unit, occurrence=what.iteration - 1),
        )
    return what.step, messages.graph_state_completed(
        name=unit.name if isinstance(unit, GraphUnit) else key,
        state=what.state,
        number=what.step,
        most=unit.max_steps if isinstance(unit, GraphUnit) else 0,
        output="\n\n".join(texts.get(each, "") for each in what.output.instances),
        next_state=what.next_state,
        duration_s=what.duration_s,
        instance=instance_of(what.unit, occurrence=what.step - 1),
    )
