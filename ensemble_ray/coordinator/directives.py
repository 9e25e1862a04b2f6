"""RunDirectives: what people told one run, as its coordinator keeps it. Package: coordinator.

In: directives, given or recorded. Out: the texts that a task is told which starts now. On record before any task is told.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.facts.directives import DirectiveGiven
from ensemble_ray.ports import Persistence
from ensemble_ray.values.ids import RUN

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.coordinator.run_journal import RunJournal
    from ensemble_ray.values.directives import Directive

__all__ = ["RunDirectives"]


class RunDirectives:
    """The directives of one run."""

    def __init__(self, journal: RunJournal, recorded: Sequence[DirectiveGiven] = ()) -> None:
        """Make them, with those that are recorded of a run that goes on."""
        self._journal = journal
        #: by text: one that is given again takes the place of the earlier one, so that asking twice does no harm
        self._given = {each.text: each for each in recorded}

    async def add(self, directive: Directive) -> None:
        """Put a directive on record; tasks that start from then on are told.

        Raises:
            RecordError, StaleEpochError: it cannot be, or the run is somebody else's now.
        """
        now = self._journal.now()
        expires_at = None if directive.ttl_s is None else now + directive.ttl_s
        given = DirectiveGiven(text=directive.text, expires_at=expires_at, given_by=directive.given_by)
        await self._journal.append(self._journal.fact(RUN, given, now), until=Persistence.COMMITTED)
        self._given[given.text] = given

    def active(self) -> tuple[str, ...]:
        """Return the texts that a task is told which starts now, in the order in which they were given."""
        if not self._given:
            return ()
        now = self._journal.now()
        return tuple(each.text for each in self._given.values() if each.is_active(now))
