"""What the user's predicates and conditions are given. Package: values.

Views of what a loop or a graph has done so far. They are read-only and copy nothing: asking after the thousandth iteration
costs what it cost after the first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ensemble_ray.values.task_output import TaskOutput

__all__ = ["GraphRoutingContext", "LoopIterationContext"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopIterationContext:
    """What a loop's `until` is given after an iteration. Nothing outside of the loop is in it.

    Attributes:
        iteration_number: 1-based.
        last_iteration_outputs: Outputs of this iteration by body key, in body order; read-only.
        history: The same of all iterations, this one included; read-only.
        last_body_output: Output of the last task of the body in this iteration.
    """

    iteration_number: int
    last_iteration_outputs: Mapping[str, TaskOutput]
    history: Sequence[Mapping[str, TaskOutput]]
    last_body_output: TaskOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRoutingContext:
    """What the condition of a graph's edge is given after a step.

    Attributes:
        current_state: The state that was run.
        last_output: What it gave.
        step_number: 1-based.
        state_history: Outputs of each state that was visited, in the order of visits, this one included; read-only.
    """

    current_state: str
    last_output: TaskOutput
    step_number: int
    state_history: Mapping[str, Sequence[TaskOutput]]
