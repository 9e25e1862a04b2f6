"""What every source is: the port that a coordinator asks. Package: schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ensemble_ray.schedule.instructions import Instruction
    from ensemble_ray.schedule.stimuli import Stimulus
    from ensemble_ray.schedule.unit import HistoryEntry

__all__ = ["PlanSource", "Source"]


class Source(Protocol):
    """The machine of one kind of work: what is ready, what follows from a result, is it over?"""

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Take facts, give what is to be done now, in order."""
        ...


class PlanSource(Source, Protocol):
    """The source of a plan, with what a run that goes on has to know."""

    @property
    def running(self) -> tuple[str, ...]:
        """Return the tasks that were handed out and have not been reported."""
        ...

    def is_running(self, instance: str) -> bool:
        """Whether that was handed out and has not been reported."""
        ...

    def is_waiting(self, instance: str) -> bool:
        """Whether that was put down, and is started again when the run goes on."""
        ...

    def is_cancelling(self, instance: str) -> bool:
        """Whether that is running and was asked to stop."""
        ...

    def list_unanswered(self) -> list[Instruction]:
        """Return what was wanted and has no answer yet, of a task what was wanted last: what a run that goes on does first."""
        ...

    def history_of(self, unit: str) -> Sequence[HistoryEntry]:
        """Return what the predicates of a unit are shown, by its path; it only grows."""
        ...
