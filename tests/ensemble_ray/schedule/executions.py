"""Executions of units, without a run around them."""

from __future__ import annotations

from ensemble_ray import Plan
from ensemble_ray.plan.plan import Unit
from ensemble_ray.schedule.unit import Execution, Scopes


def execution_of(*units: Unit, instance: str = "") -> Execution:
    """An execution of the run, or of one of these units; tasks have no context."""
    return Execution(
        instance=instance,
        plan=Plan(workflow="sequential", nodes=(), units=units),
        units={unit.key: unit for unit in units},
        members={},
        scopes=Scopes(),
    )
