"""What phases warn of. Package: schedule."""

from __future__ import annotations

from ensemble_ray.schedule.instructions import Warn
from ensemble_ray.schedule.phase_states import PhaseState, ScheduledPhase

__all__ = ["warn_of_acceptance", "warn_of_skip"]


def warn_of_acceptance(phase: ScheduledPhase, what: str) -> Warn:
    """Return what is said of an attempt that is accepted though its review wanted something else."""
    return Warn(text=f"Phase '{phase.unit.name}': its review {what}; the output is accepted as it is")


def warn_of_skip(phase: ScheduledPhase, before: ScheduledPhase, failed: ScheduledPhase) -> Warn:
    """Return what is said of a phase that will not run (S-PHASE-51)."""
    name, predecessor, cause = phase.unit.name, before.unit.name, failed.unit.name
    if before.state is PhaseState.FAILED:
        return Warn(text=f"Phase '{name}' is skipped: its predecessor '{predecessor}' failed")
    return Warn(text=f"Phase '{name}' is skipped: its predecessor '{predecessor}' was skipped, since '{cause}' failed")
