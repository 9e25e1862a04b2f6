"""What people told a run, as it counts for tasks that start now."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from ensemble_ray.facts.directives import DirectiveRecorded, ModelSwitched
from ensemble_ray.facts.fact import kinds_of
from ensemble_ray.record.view.directives import directives_in
from ensemble_ray.values.reviews import ModelSwitch, add_switch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ensemble_ray.facts.directives import DirectiveFact
    from ensemble_ray.record.stores import RunStore


class GivenDirectives:
    """The directives of one run.

    Attributes:
        switches: Which models tasks ask that start now, where those are not their agents' own.
    """

    def __init__(self, given: Iterable[DirectiveFact] = ()) -> None:
        self.switches: tuple[ModelSwitch, ...] = ()
        #: by text: one that is given again takes the place of the earlier one, so that asking twice does no harm
        self._texts: dict[str, DirectiveRecorded] = {}
        for each in given:
            self.apply(each)

    def apply(self, given: DirectiveFact) -> None:
        """Take the next one."""
        match given:
            case DirectiveRecorded(text=text):
                self._texts[text] = given
            case ModelSwitched(model=model, agent=agent):
                self.switches = add_switch(self.switches, ModelSwitch(model=model, agent=agent))
            case _:
                assert_never(given)

    def active(self, at: float) -> tuple[str, ...]:
        """Return the texts that count at a time, Unix time, s, in the order in which they were given."""
        return tuple(each.text for each in self._texts.values() if each.is_active(at))


async def read_switches(store: RunStore, run_id: str) -> tuple[ModelSwitch, ...]:
    """Return which models the tasks of a run were told to ask.

    Raises:
        RecordError: the record is damaged.
    """
    given = GivenDirectives()
    async for page in store.read(run_id, kinds=kinds_of(ModelSwitched)):
        for each in directives_in(page):
            given.apply(each)
    return given.switches
