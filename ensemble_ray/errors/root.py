"""The root of the error tree. Layer: above how errors travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.errors.travel import Portable

if TYPE_CHECKING:
    # A seam: errors carry values, and the modules of those values raise errors.
    from ensemble_ray.values.trace import ExecutionTrace

__all__ = ["EnsembleError"]


class EnsembleError(Portable):
    """Root of everything that `run()` raises by contract.

    Attributes:
        trace: The run's trace up to the failure; None where the run had not begun.
        run_id: The run's id; None where the run had not begun.
    """

    trace: ExecutionTrace | None = None
    run_id: str | None = None
