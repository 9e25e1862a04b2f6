"""Errors of loops and graphs that did not come to an end of their own. Layer: above the root of the error tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.errors.root import EnsembleError

if TYPE_CHECKING:
    from collections.abc import Sequence

    # A seam: errors carry values, and the modules of those values raise errors.
    from ensemble_ray.values.task_output import TaskOutput

__all__ = ["GraphNoEdgeMatchedError", "MaxGraphStepsExceededError", "MaxLoopIterationsExceededError"]

#: Characters of an output in a message (S-GRAPH-45).
_LONGEST_PREVIEW = 200


class MaxLoopIterationsExceededError(EnsembleError):
    """A loop's predicate never held, and its cap raises. Unrelated to the cap of an agent's tool loop."""

    def __init__(self, loop_name: str, max_iterations: int, completed_task_outputs: Sequence[TaskOutput] = ()) -> None:
        super().__init__(f"Loop '{loop_name}' did not converge after {max_iterations} iterations")
        self.loop_name = loop_name
        self.max_iterations = max_iterations
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)


class GraphNoEdgeMatchedError(EnsembleError):
    """No edge of a graph's state matched what the state gave.

    Attributes:
        output_preview: Text of the state's output, uncut.
        candidate_edges: The edges that were tried, in declared order.
    """

    def __init__(
        self,
        graph_name: str,
        current_state: str,
        output_preview: str,
        candidate_edges: Sequence[str] = (),
        completed_task_outputs: Sequence[TaskOutput] = (),
    ) -> None:
        shown = output_preview
        if len(shown) > _LONGEST_PREVIEW:
            shown = f"{shown[:_LONGEST_PREVIEW]}…"
        super().__init__(
            f"Graph '{graph_name}' state '{current_state}' has no matching outgoing edge for the produced output. "
            f"Candidate edges: {'; '.join(candidate_edges)} Output preview: {shown}"
        )
        self.graph_name = graph_name
        self.current_state = current_state
        self.output_preview = output_preview
        self.candidate_edges = tuple(candidate_edges)
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)


class MaxGraphStepsExceededError(EnsembleError):
    """A graph did not come to its end within its steps, and its cap raises."""

    def __init__(
        self,
        graph_name: str,
        max_steps: int,
        last_state: str,
        completed_task_outputs: Sequence[TaskOutput] = (),
    ) -> None:
        super().__init__(
            f"Graph '{graph_name}' did not reach a terminal state after {max_steps} step(s). "
            f"Last state: '{last_state}'."
        )
        self.graph_name = graph_name
        self.max_steps = max_steps
        self.last_state = last_state
        self.completed_task_outputs: Sequence[TaskOutput] = tuple(completed_task_outputs)
