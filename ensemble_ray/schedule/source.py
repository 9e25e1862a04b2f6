"""What every scheduling machine is: the port that a coordinator asks. Package: schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ensemble_ray.schedule.instructions import Instruction
    from ensemble_ray.schedule.stimuli import Stimulus

__all__ = ["Source"]


class Source(Protocol):
    """The machine of one kind of work: what is ready, what follows from a result, is it over?"""

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Take facts, give what is to be done now, in order."""
        ...
