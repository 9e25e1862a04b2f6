"""Scheduling machines: stimuli in, instructions out, without I/O, clock, randomness, logging or async."""

from __future__ import annotations

from ensemble_ray.plan.plan import Plan
from ensemble_ray.schedule.machine import HierarchicalMachine, ParallelMachine, PlanSource, SequentialMachine

__all__ = ["machine_for"]


def machine_for(plan: Plan) -> PlanSource:
    if plan.units:
        from ensemble_ray.schedule.nested import NestedSource, make_machine  # with the machines of all units

        return NestedSource(plan, make_machine)
    match plan.workflow:
        case "parallel":
            return ParallelMachine(plan.nodes, error_strategy=plan.error_strategy, max_parallel=plan.max_parallel_tasks)
        case "hierarchical":
            return HierarchicalMachine(plan)
        case _:
            return SequentialMachine(plan.nodes)
