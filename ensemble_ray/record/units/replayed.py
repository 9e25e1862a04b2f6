"""What became of the units of a recorded run: its source is told again what it was told. Package: record. Pure.

In: the plan and the stimuli of the record. Out: the results of its units, also of those that had not ended when the record did.
Never: a question asked again, since its answer is a stimulus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ensemble_ray.errors import RecordError
from ensemble_ray.facts.runs import StimulusRecorded
from ensemble_ray.plan.plan import Plan
from ensemble_ray.record.resume.stimuli import is_undone
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import Announce, EdgeMatches, End, IterationEnded, StepEnded, UntilHolds
from ensemble_ray.schedule.results import GraphResult, LoopResult, StepResult, UnitFailure, UnitResult
from ensemble_ray.schedule.stimuli import Cancelled, Evaluated, Stimulus, decode_stimulus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ensemble_ray.facts.fact import Fact

__all__ = ["PredicateAnswer", "ReplayedUnits", "SourceStimuli", "recorded_plan", "replay_units", "verdicts_of"]


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


class SourceStimuli:
    """What a source was told, in the groups in which it was told."""

    def __init__(self) -> None:
        self._groups: list[list[Stimulus]] = []
        self._is_open = False

    def apply(self, fact: Fact[StimulusRecorded]) -> None:
        """Take the next stimulus; one that is unknown is left out."""
        try:
            stimulus = decode_stimulus(fact)
        except TypeError as error:
            raise RecordError(f"The record is damaged: stimulus {fact.seq}: {error}") from error
        if not self._is_open:
            self._groups.append([])
        if stimulus is not None:
            self._groups[-1].append(stimulus)
        self._is_open = bool(fact.data.more)

    def resume(self) -> None:
        """Forget what a run that goes on makes up for: that it was cancelled, or had spent its budget."""
        self._groups = [[each for each in group if not is_undone(each)] for group in self._groups]

    def groups(self) -> Sequence[Sequence[Stimulus]]:
        """Return what was told, in order."""
        return [group for group in self._groups if group]


def recorded_plan(data: Mapping[str, object]) -> Plan:
    """Return a recorded plan, without hidden ids.

    Raises:
        RecordError: it is damaged.
    """
    try:
        return Plan.from_dict(cast("Mapping[str, None]", data))
    except ValueError as error:
        raise RecordError(f"The record is damaged: its plan cannot be read: {error}") from error


def replay_units(plan: Plan, groups: Sequence[Sequence[Stimulus]]) -> ReplayedUnits:
    """Tell the plan's source what it was told, and return what became of its units."""
    source = machine_for(plan)
    end: End | None = None
    ended: list[UnitResult] = []
    iterations: dict[str, list[tuple[str, ...]]] = {}
    steps: dict[str, list[StepResult]] = {}
    for group in groups:
        told = [each for each in group if not isinstance(each, Cancelled) or source.is_cancelling(each.instance)]
        for instruction in source.handle(*told):
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
