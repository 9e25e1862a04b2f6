"""Which tasks a recorded run has started, and which rounds of its units are over. Package: record. Pure.

In: a recorded plan and the stimuli, one by one. Out: what the run's source wanted then, since a source that is told the same wants the
same. So a task is known to have started before it recorded anything itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ensemble_ray.record.resume.stimuli import StimulusGroups
from ensemble_ray.record.units.replayed import recorded_plan
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import Announce, Start
from ensemble_ray.schedule.stimuli import Cancelled

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import RunResumed, StimulusRecorded
    from ensemble_ray.plan.plan import Plan
    from ensemble_ray.schedule.instructions import Instruction
    from ensemble_ray.schedule.source import PlanSource
    from ensemble_ray.schedule.stimuli import Stimulus

__all__ = ["ReplayedSource", "ReplayedStarts"]


class ReplayedSource:
    """The source of a recorded run, told what it was told.

    Attributes:
        plan: The recorded plan.
    """

    def __init__(self, data: Mapping[str, object]) -> None:
        """Begin with a recorded plan.

        Raises:
            RecordError: it is damaged.
        """
        self.plan: Plan = recorded_plan(data)
        self._source: PlanSource = machine_for(self.plan)
        self._told = StimulusGroups()

    def apply(self, fact: Fact[StimulusRecorded]) -> list[Instruction]:
        """Take the next stimulus, and return what the source wants after it; nothing in the middle of a group.

        Raises:
            RecordError: it is damaged.
        """
        self._told.apply(fact)
        return [] if fact.data.more else self._apply(self._told.numbered[-1])

    def resume(self, fact: Fact[RunResumed]) -> list[Instruction]:
        """Take notice that the run went on, and return what the source wants then.

        Where more than its owner's process was replaced, that is all that was wanted until now, once more, but for what the
        run makes up for.
        """
        count = len(self._told.numbered)
        self._told.resume(fact)
        if not fact.data.is_restart:
            count, self._source = 0, machine_for(self.plan)
        return [each for group in self._told.numbered[count:] for each in self._apply(group)]

    def _apply(self, group: Sequence[tuple[int, Stimulus]]) -> list[Instruction]:
        relevant = [
            each for _, each in group if not isinstance(each, Cancelled) or self._source.is_cancelling(each.instance)
        ]
        return self._source.handle(*relevant) if relevant else []


class ReplayedStarts:
    """Of what such a source wanted, the starts of tasks and the ends of rounds."""

    def __init__(self, data: Mapping[str, object]) -> None:
        """Begin with a recorded plan.

        Raises:
            RecordError: it is damaged.
        """
        self._replayed = ReplayedSource(data)

    @property
    def plan(self) -> Plan:
        """The recorded plan."""
        return self._replayed.plan

    def apply(self, fact: Fact[StimulusRecorded]) -> list[Start | Announce]:
        """Take the next stimulus; see `ReplayedSource.apply`."""
        return _starts(self._replayed.apply(fact))

    def resume(self, fact: Fact[RunResumed]) -> list[Start | Announce]:
        """Take notice that the run went on; see `ReplayedSource.resume`."""
        return _starts(self._replayed.resume(fact))


def _starts(wanted: Sequence[Instruction]) -> list[Start | Announce]:
    return [each for each in wanted if isinstance(each, Start | Announce)]
