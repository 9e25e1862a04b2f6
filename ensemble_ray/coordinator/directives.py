"""RunDirectives: what people told one run, as its coordinator keeps it.

In: directives and choices of models, given or recorded. Out: the texts that a task is told which starts now, and which model it asks. On
record before any task is concerned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from ensemble_ray.facts.directives import DirectiveRecorded, ModelSwitched
from ensemble_ray.ports import Persistence
from ensemble_ray.record.resume.directives import GivenDirectives
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.reviews import Directive, ModelSwitch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.coordinator.run_journal import RunJournal
    from ensemble_ray.facts.directives import DirectiveFact
    from ensemble_ray.values.reviews import RunDirective


class RunDirectives:
    """The directives of one run."""

    def __init__(self, journal: RunJournal, recorded: Sequence[DirectiveFact] = ()) -> None:
        """Make them, with those that are recorded of a run that goes on."""
        self._journal = journal
        self._given = GivenDirectives(recorded)

    @property
    def switches(self) -> tuple[ModelSwitch, ...]:
        """Which models tasks ask that start now, where those are not their agents' own."""
        return self._given.switches

    async def add(self, directive: RunDirective) -> None:
        """Put a directive on record; tasks that start from then on follow it.

        Raises:
            RecordError, StaleEpochError: it cannot be, or the run is somebody else's now.
        """
        now = self._journal.now()
        data = _fact_of(directive, now)
        await self._journal.append(self._journal.fact(RUN, data, now), until=Persistence.COMMITTED)
        self._given.apply(data)

    def active(self) -> tuple[str, ...]:
        """Return the texts that a task is told which starts now, in the order in which they were given."""
        return self._given.active(self._journal.now())


def _fact_of(directive: RunDirective, now: float) -> DirectiveFact:
    match directive:
        case Directive(text=text, ttl_s=ttl_s, given_by=given_by):
            return DirectiveRecorded(text=text, expires_at=None if ttl_s is None else now + ttl_s, given_by=given_by)
        case ModelSwitch(model=model, agent=agent, given_by=given_by):
            return ModelSwitched(model=model, agent=agent, given_by=given_by)
        case _:
            assert_never(directive)
