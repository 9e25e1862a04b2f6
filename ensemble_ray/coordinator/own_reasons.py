"""Why a planned run failed where none of its tasks is the reason, as the record of its end has it (S-ERR-66)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ensemble_ray.errors import ConstraintViolationError
from ensemble_ray.execute.effects import recorded_output
from ensemble_ray.facts.runs import RecordedError
from ensemble_ray.record.failures import error_of_unit
from ensemble_ray.record.units import EndedUnits
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.schedule.instructions import GraphResult, LoopResult

if TYPE_CHECKING:
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.ports import Journal
    from ensemble_ray.schedule.instructions import End
    from ensemble_ray.values.task_output import TaskOutput


class OwnReason(NamedTuple):
    """A reason, and when it came about, Unix time, s."""

    at: float
    error: RecordedError


async def unit_reasons(
    plan: Plan, ending: End, raised: Mapping[str, RecordedError], journal: Journal
) -> Sequence[OwnReason]:
    """Return why loops, phases and graphs failed.

    Args:
        plan: What ran.
        ending: How it ended.
        raised: By path of the unit: what its predicates and conditions raised.
        journal: Has the text of a state that no edge matched.
    """
    outputs = {
        instance: output
        for failure in ending.unit_failures
        if failure.reason == "no_edge"
        for instance in _instances_of_step(ending, failure.step)
        if (output := await _find_output(journal, instance)) is not None
    }
    ended = EndedUnits(plan=plan, results=ending.units, failures=ending.unit_failures, outputs=outputs)
    return [
        OwnReason(each.at, raised.get(each.unit) or RecordedError.of(error_of_unit(ended, each, None)))
        for each in ending.unit_failures
    ]


def constraint_reasons(plan: Plan, delegated_roles: Collection[str], at: float) -> Sequence[OwnReason]:
    """Return which constraints of a manager were not met, as one reason; none where it met all (S-HIER-50)."""
    violations = () if plan.hierarchy is None else violations_of(plan.hierarchy, delegated_roles)
    return [OwnReason(at, RecordedError.of(ConstraintViolationError(violations)))] if violations else []


def _instances_of_step(ending: End, number: int) -> Iterator[str]:
    """Return the instances that a step of the graph shows: one, or those of a loop."""
    steps = [step for each in ending.units if isinstance(each, GraphResult) for step in each.steps]
    shown = next((step.instance for step in steps if step.number == number), "")
    yield shown
    for each in ending.units:
        if isinstance(each, LoopResult) and each.unit == shown:
            yield from (instance for iteration in each.iterations for instance in iteration)


async def _find_output(journal: Journal, instance: str) -> TaskOutput | None:
    return recorded_output(await journal.lookup_recorded(instance), instance)
