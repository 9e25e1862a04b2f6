"""Ray's errors as ours: one table. No Ray class escapes from `run()` (S-CONV-32)."""

from __future__ import annotations

import ray
import ray.exceptions

from ensemble_ray.errors import EnsembleError, IllegalStateError, message_of
from ensemble_ray.record.resume.advice import resume_advice

__all__ = ["last_line", "ours"]


def ours(error: BaseException, run_id: str, origin: str) -> BaseException:
    """Return the error that a caller of `run()` should see for an error of a call to an actor; `origin`: of `resume_advice`."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EnsembleError | IllegalStateError):
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        lost = EnsembleError(
            f"Run {run_id}: the scheduler's process died ({_first_line(error)}). "
            f"What was recorded is kept; continue the run: {resume_advice(run_id, origin)}"
        )
        lost.run_id = run_id
        return lost
    if isinstance(error, ray.exceptions.RayError):
        text = message_of(cause) if isinstance(cause, BaseException) else _first_line(error)
        broken = EnsembleError(
            f"Run {run_id}: the cluster failed: {text}. What was recorded is kept: {resume_advice(run_id, origin)}"
        )
        broken.run_id = run_id
        return broken
    return error


def last_line(error: BaseException) -> str:
    """Return what Ray says in the end; what stands before it is its own stack."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _first_line(error: BaseException) -> str:
    return next(iter(message_of(error).strip().splitlines()), type(error).__name__)
