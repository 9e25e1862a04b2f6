"""What may be done with runs from the page: the port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ensemble_ray.studio.schemas.actions import Decision, NewFork, RunPreview
    from ensemble_ray.studio.schemas.runs import ReviewSchema


class StudioActions(Protocol):
    """Carries out what somebody asked for."""

    async def cancel(self, run_id: str) -> None:
        """Ask for the end of a run; it ends as soon as its owner looks.

        Raises:
            ValidationError: it has ended.
        """
        ...

    async def preview_resume(self, run_id: str) -> RunPreview:
        """Return what the run would take from its record, and what it would do again, if it went on."""
        ...

    async def preview_fork(self, run_id: str, from_step: str) -> RunPreview:
        """Return the same of a new run that does it again from a step on."""
        ...

    async def resume(self, run_id: str) -> str:
        """Let a run go on in a process of its own, and return its id.

        Raises:
            EnsembleError: it cannot go on.
        """
        ...

    async def fork(self, run_id: str, asked: NewFork) -> str:
        """Begin a fork in a process of its own, and return its id.

        Raises:
            EnsembleError: it cannot begin.
        """
        ...

    async def decide(self, run_id: str, gate_id: str, decision: Decision, *, by: str | None) -> ReviewSchema:
        """Decide at a gate, and return it.

        Raises:
            ReviewDecidedError: somebody was first.
            EnsembleError: nobody can decide there.
        """
        ...
