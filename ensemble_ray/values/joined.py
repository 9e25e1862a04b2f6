"""The outputs of a task's iterations as one. Layer: above outputs. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.values.outputs import TaskOutput

__all__ = ["join_iterations"]


def join_iterations(outputs: Sequence[TaskOutput]) -> TaskOutput:
    """Return one output for those of a task in iterations 1, 2, ...: their texts, each but the first under a header.

    Everything else is that of the first iteration, but there is no parsed output (S-LOOP-72, S-LOOP-73).
    """
    first = outputs[0]
    parts = [first.raw]
    for number, output in enumerate(outputs[1:], start=2):
        parts.append(f"\n\n--- iteration {number} ---\n\n{output.raw}")
    return first.model_copy(update={"raw": "".join(parts), "parsed_output": None})
