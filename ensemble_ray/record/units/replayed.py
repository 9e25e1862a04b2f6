"""What became of the units of a recorded run: its source is told again what it was told. Package: record. Pure.

In: the plan and the stimuli of the record. Out: the results of its units, also of those that had not ended when the record did.
Never: a question asked again, since its answer is a stimulus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.plan.plan import Plan
from ensemble_ray.record.source import relevant
from ensemble_ray.schedule.instructions import EdgeMatches, UntilHolds
from ensemble_ray.schedule.nested import NestedSource
from ensemble_ray.schedule.stimuli import Evaluated, Stimulus
from ensemble_ray.schedule.unit_machines import make_machine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ensemble_ray.schedule.results import UnitFailure, UnitResult

__all__ = ["PredicateAnswer", "ReplayedUnits", "replay_units", "verdicts_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedUnits:
    """What became of the units."""

    #: those that ended, in that order, then those that had begun
    results: tuple[UnitResult, ...] = ()
    failures: tuple[UnitFailure, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PredicateAnswer:
    """What the user's code answered after an iteration or a step."""

    #: `loop:refine#1`, `graph:triage#4`
    path: str
    #: position of the edge in its graph; None: the predicate of a loop
    edge: int | None
    #: None: it raised
    answer: bool | None
    at: float
    #: what it raised
    error: str = ""


def replay_units(plan: Plan, groups: Sequence[Sequence[Stimulus]]) -> ReplayedUnits:
    """Tell the plan's source what it was told, and return what became of its units."""
    source = NestedSource(plan, make_machine)
    for group in groups:
        source.handle(*relevant(source, group))
    return ReplayedUnits(results=source.results(), failures=source.failures())


def verdicts_of(groups: Sequence[Sequence[Stimulus]]) -> Iterator[PredicateAnswer]:
    """Return the recorded answers of predicates and conditions, in order."""
    for stimulus in (each for group in groups for each in group):
        if not isinstance(stimulus, Evaluated):
            continue
        question, answer = stimulus.question, stimulus.answer
        error = ": ".join(each for each in (stimulus.error_type, stimulus.message) if each)
        verdict = answer if isinstance(answer, bool) else None
        match question:
            case UntilHolds():
                path, edge = f"{question.unit}#{question.iteration - 1}", None
            case EdgeMatches():
                path, edge = f"{question.unit}#{question.step - 1}", question.edge
            case _:
                continue
        yield PredicateAnswer(path=path, edge=edge, answer=verdict, at=stimulus.at, error=error)
