"""Which machine a unit has, and the run around all units. Package: schedule. The one place that knows every kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from ensemble_ray.plan.units import GraphUnit, LoopUnit, PhaseUnit, in_waiting_order, members_of
from ensemble_ray.schedule.graph import GraphMachine
from ensemble_ray.schedule.loop import LoopMachine
from ensemble_ray.schedule.parallel import ParallelMachine
from ensemble_ray.schedule.phases import PhasesMachine
from ensemble_ray.schedule.sequential import SequentialMachine
from ensemble_ray.schedule.unit import Execution, Member, UnitMachine
from ensemble_ray.values.ids import node_key

__all__ = ["make_machine"]


def make_machine(execution: Execution) -> UnitMachine:
    """Return the machine of one execution of a unit, or of the run."""
    if not execution.instance:
        phases = [unit for unit in execution.plan.units if isinstance(unit, PhaseUnit)]
        if phases:
            return PhasesMachine(phases, execution)
        return _machine_over(_top_members(execution), execution, execution.plan.workflow)
    unit = execution.units[node_key(execution.instance)]
    match unit:
        case LoopUnit():
            return LoopMachine(unit, execution)
        case PhaseUnit():
            return _machine_over([execution.members[key] for key in unit.members], execution, unit.workflow)
        case GraphUnit():
            return GraphMachine(unit, execution)
        case _:
            assert_never(unit)


def _machine_over(members: Sequence[Member], execution: Execution, workflow: str) -> UnitMachine:
    """Return the machine that runs members by a workflow; how many tasks run at once is the run's affair."""
    parent, changes = execution.instance, execution.changes
    if workflow == "parallel":
        strategy = execution.plan.error_strategy
        return ParallelMachine(members, error_strategy=strategy, parent=parent, changes=changes)
    return SequentialMachine(_in_order(members, execution), parent=parent, changes=changes)


def _in_order(members: Sequence[Member], execution: Execution) -> list[Member]:
    """Return members such that what waits for a unit stands behind it (S-LOOP-168).

    A task that names a later one as context stays where it is: it fails, and says so (S-ENG-11).
    """
    rank = {member.key: position for position, member in enumerate(members)}
    waits_for = {
        member.key: [
            key for key in member.context if key in execution.units or rank.get(key, len(rank)) < rank[member.key]
        ]
        for member in members
    }
    ordered = in_waiting_order([member.key for member in members], waits_for)
    return [execution.members[key] for key in ordered]


def _top_members(execution: Execution) -> list[Member]:
    """Return what is in no unit: the plain tasks, then the units, each in declared order (S-LOOP-120)."""
    inside = {key for unit in execution.plan.units for key in members_of(unit)}
    return [member for key, member in execution.members.items() if key not in inside]
