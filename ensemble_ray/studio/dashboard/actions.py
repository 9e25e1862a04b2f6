"""DashboardActions: what is done with runs from a dashboard's page. Fulfils `StudioActions`.

Gates at which this process asks are decided here; everything else is done with the records, as studio does it. On the library's loop.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.process.forks import SystemClock
from ensemble_ray.studio.local_actions import LocalActions
from ensemble_ray.studio.refusals import not_found
from ensemble_ray.studio.visitors import ANYBODY

if TYPE_CHECKING:
    from ensemble_ray.studio.actions import StudioActions
    from ensemble_ray.studio.dashboard.reviews import WebReviewHandler
    from ensemble_ray.studio.dashboard.shown_runs import ShownRuns
    from ensemble_ray.studio.reading import StudioReader
    from ensemble_ray.studio.schemas.actions import Decision, NewFork, RunPreview
    from ensemble_ray.studio.schemas.runs import ReviewSchema


class DashboardActions:
    """Actions over the runs that a dashboard shows."""

    def __init__(self, runs: ShownRuns, reviews: WebReviewHandler, reader: StudioReader) -> None:
        """Act on runs.

        Args:
            runs: Knows where they are recorded.
            reviews: Asks at gates of this process.
            reader: Shows what they are about.
        """
        self._runs = runs
        self._reviews = reviews
        self._reader = reader
        self._clock = SystemClock()

    async def cancel(self, run_id: str) -> None:
        """Ask for the end of a run."""
        await self._make_recorded(run_id).cancel(run_id)

    async def preview_resume(self, run_id: str) -> RunPreview:
        """Return what the run would take from its record, if it went on."""
        return await self._make_recorded(run_id).preview_resume(run_id)

    async def preview_fork(self, run_id: str, from_step: str) -> RunPreview:
        """Return the same of a fork."""
        return await self._make_recorded(run_id).preview_fork(run_id, from_step)

    async def resume(self, run_id: str) -> str:
        """Let a run go on in a process of its own."""
        return await self._make_recorded(run_id).resume(run_id)

    async def fork(self, run_id: str, asked: NewFork) -> str:
        """Begin a fork in a process of its own."""
        return await self._make_recorded(run_id).fork(run_id, asked)

    async def decide(self, run_id: str, gate_id: str, decision: Decision, *, by: str | None) -> ReviewSchema:
        """Decide at a gate, of this process or in the record, and return it.

        Raises:
            ReviewDecidedError: somebody was first.
            EnsembleError: nobody can decide there.
        """
        detail = await self._reader.run(run_id, ANYBODY)
        shown = next((each for each in detail.reviews if each.gate_id == gate_id), None)
        if shown is None or not self._reviews.decide(gate_id, decision.decision, decision.text):
            return await self._make_recorded(run_id).decide(run_id, gate_id, decision, by=by)
        change = {
            "decision": decision.decision,
            "text": decision.text if decision.decision == "edit" else None,
            "decided_by": type(self._reviews).__name__,
            "decided_at": round(self._clock.now() * 1000),
            "decidable": False,
        }
        return shown.model_copy(update=change)

    def _make_recorded(self, run_id: str) -> StudioActions:
        """Return what acts on a run's record.

        Raises:
            StudioRefusal: the run was not seen.
        """
        place = self._runs.place_of(run_id)
        if place is None:
            raise not_found("run", run_id)
        return LocalActions(place)
