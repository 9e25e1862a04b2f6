"""The units of a recorded run. Pure.

In: the recorded stimuli, then the plan and the outputs by instance. Out: what became of the units, also of those that had not ended when
the record did, why those failed that did, and what the user's code answered.
Never: a question asked again, since its answer is a stimulus.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.record.source import RecordedStimuli, relevant
from ensemble_ray.record.units.ended import EndedUnits
from ensemble_ray.schedule.instructions import EdgeMatches, UntilHolds
from ensemble_ray.schedule.nested import NestedSource, make_machine
from ensemble_ray.schedule.stimuli import Evaluated, Stimulus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.values.task_output import TaskOutput


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


class RecordedUnits:
    """What the facts of a run tell of its units, as far as they were taken."""

    def __init__(self) -> None:
        self._stimuli = RecordedStimuli()
        #: None: stimuli have come since it was replayed
        self._source: NestedSource | None = None

    def apply(self, facts: Sequence[Fact]) -> None:
        """Take the next facts of the run."""
        self._stimuli.take(facts)
        self._source = None

    def collect_ends(self, plan: Plan, outputs: Mapping[str, TaskOutput]) -> EndedUnits:
        """Return what became of the units of the recorded plan."""
        if self._source is None:
            self._source = NestedSource(plan, make_machine)
            for group in self._stimuli.groups:
                self._source.handle(*relevant(self._source, group))
        source = self._source
        return EndedUnits(plan=plan, results=source.results(), failures=source.failures(), outputs=outputs)

    def verdicts(self) -> Sequence[PredicateAnswer]:
        """Return what the user's predicates and conditions answered, in order."""
        return tuple(verdicts_of(self._stimuli.groups))


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
