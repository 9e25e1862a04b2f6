"""The team that `doctor` runs: one task without a model."""

from __future__ import annotations

from ensemble_ray.definition.task import Task
from ensemble_ray.ensemble import Ensemble


def _ready(context: object) -> str:
    """Do the task's whole work."""
    del context
    return "ready"


def probe() -> Ensemble:
    """Return the team."""
    return Ensemble(tasks=[Task(name="probe", description="Say ready", expected_output="ready", handler=_ready)])
