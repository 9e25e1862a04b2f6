"""Outputs of a loop's iterations as one, for its output and for contexts. Layer: above outputs. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from ensemble_ray.values.task_output import TaskOutput

__all__ = ["join_iterations"]


def join_iterations(outputs: Sequence[TaskOutput]) -> TaskOutput:
    """Return what a task gave in all iterations as one output (S-LOOP-72, S-LOOP-73).

    Args:
        outputs: One of each iteration, in order; at least one.
    """
    first, *later = outputs
    texts = [f"\n\n--- iteration {number} ---\n\n{each.raw}" for number, each in enumerate(later, start=2)]
    return first.model_copy(update={"raw": "".join([first.raw, *texts]), "parsed_output": None})
