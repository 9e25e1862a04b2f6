"""The units of a recorded run. Package: record. Pure.

In: the recorded stimuli, then the plan and the outputs by instance. Out: what became of the units, why those failed that did, and what
the user's code answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.record.source import RecordedStimuli
from ensemble_ray.record.units.ended import EndedUnits
from ensemble_ray.record.units.replayed import (
    PredicateAnswer,
    ReplayedUnits,
    replay_units,
    verdicts_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import RunResumed, StimulusRecorded
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.values.task_output import TaskOutput

__all__ = ["RecordedUnits"]


class RecordedUnits:
    """What the facts of a run tell of its units, as far as they were taken."""

    def __init__(self) -> None:
        self._stimuli = RecordedStimuli()
        self._replayed: ReplayedUnits | None = None

    def apply(self, fact: Fact[StimulusRecorded]) -> None:
        """Take the next stimulus."""
        self._stimuli.apply(fact)
        self._replayed = None

    def resume(self, fact: Fact[RunResumed]) -> None:
        """Apply a resumption of the run."""
        self._stimuli.resume(fact)
        self._replayed = None

    def collect_ends(self, plan: Plan, outputs: Mapping[str, TaskOutput]) -> EndedUnits:
        """Return what became of the units of the recorded plan."""
        if self._replayed is None:
            self._replayed = replay_units(plan, self._stimuli.groups)
        replayed = self._replayed
        return EndedUnits(plan=plan, results=replayed.results, failures=replayed.failures, outputs=outputs)

    def verdicts(self) -> Sequence[PredicateAnswer]:
        """Return what the user's predicates and conditions answered, in order."""
        return tuple(verdicts_of(self._stimuli.groups))
