"""What became of the units of a recorded run: its source is told again what it was told. Package: record. Pure.

In: the plan and the stimuli of the record. Out: the results of its units, also of those that had not ended when the record did.
Never: a question asked again, since its answer is a stimulus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.plan.plan import Plan
from ensemble_ray.record.source import relevant
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import Announce, EdgeMatches, End, IterationEnded, StepEnded, UntilHolds
from ensemble_ray.schedule.results import GraphResult, LoopResult, StepResult, UnitFailure, UnitResult
from ensemble_ray.schedule.stimuli import Evaluated, Stimulus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


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
    source = machine_for(plan)
    end: End | None = None
    ended: list[UnitResult] = []
    iterations: dict[str, list[tuple[str, ...]]] = {}
    steps: dict[str, list[StepResult]] = {}
    for group in groups:
        for instruction in source.handle(*relevant(source, group)):
            match instruction:
                case End():
                    end = instruction
                case Announce(what=IterationEnded() as iteration):
                    iterations.setdefault(iteration.unit, []).append(iteration.instances)
                case Announce(what=StepEnded() as step):
                    result = StepResult(state=step.state, instance=step.instance, next_state=step.next_state)
                    steps.setdefault(step.unit, []).append(result)
                case _:
                    pass
    if end is not None:
        return ReplayedUnits(results=end.units, failures=end.unit_failures)
    ended = [
        LoopResult(unit=unit, iterations=tuple(found), termination_reason=None) for unit, found in iterations.items()
    ]
    ended += [GraphResult(unit=unit, steps=tuple(found), termination_reason=None) for unit, found in steps.items()]
    return ReplayedUnits(results=tuple(ended))


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
