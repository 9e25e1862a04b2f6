"""Which machine a unit has, and the run around all units. Package: schedule. The one place that knows every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.units import GraphUnit, LoopUnit, PhaseUnit
from ensemble_ray.schedule.loop import LoopMachine
from ensemble_ray.schedule.parallel import ParallelMachine
from ensemble_ray.schedule.sequential import SequentialMachine
from ensemble_ray.schedule.unit import Execution, Member, UnitMachine
from ensemble_ray.values.ids import node_key

__all__ = ["make_machine"]


def make_machine(execution: Execution) -> UnitMachine:
    """Return the machine of one execution of a unit, or of the run.

    Raises:
        NotImplementedError: there is no machine of that kind.
    """
    if not execution.instance:
        return _machine_over(_top_members(execution), execution, execution.plan.workflow)
    unit = execution.units[node_key(execution.instance)]
    match unit:
        case LoopUnit():
            return LoopMachine(unit, execution)
        case PhaseUnit():
            return _machine_over([execution.members[key] for key in unit.members], execution, unit.workflow)
        case GraphUnit():
            raise NotImplementedError(f"no machine of graphs: {unit.key}")
        case _:
            assert_never(unit)


def _machine_over(members: Sequence[Member], execution: Execution, workflow: str) -> UnitMachine:
    """Return the machine that runs members by a workflow; how many tasks run at once is the run's affair."""
    parent, changes = execution.instance, execution.changes
    if workflow == "parallel":
        strategy = execution.plan.error_strategy
        return ParallelMachine(members, error_strategy=strategy, parent=parent, changes=changes)
    return SequentialMachine(members, parent=parent, changes=changes)


def _top_members(execution: Execution) -> list[Member]:
    """Return what is in no unit: the plain tasks, then the units, each in declared order (S-LOOP-120)."""
    inside = _keys_inside(execution.plan)
    return [member for key, member in execution.members.items() if key not in inside]


def _keys_inside(plan: Plan) -> frozenset[str]:
    inside: set[str] = set()
    for unit in plan.units:
        match unit:
            case LoopUnit():
                inside.update(unit.body)
            case PhaseUnit():
                inside.update(unit.members, () if unit.review is None else (unit.review,))
            case GraphUnit():
                inside.update(state.member for state in unit.states)
            case _:
                assert_never(unit)
    return frozenset(inside)
