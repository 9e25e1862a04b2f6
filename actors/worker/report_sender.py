"""Reports of tasks on their way from a worker's process to the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ensemble_ray.actors.link.reach import patiently, reach

if TYPE_CHECKING:
    from ensemble_ray.actors.link.wire import WireResult

__all__ = ["ReportSender"]


class ReportSender:
    """Sends reports to the scheduler."""

    def __init__(self, scheduler: Any, source: str) -> None:
        self._scheduler = scheduler
        self._source = source

    async def report(self, run_id: str, reports: Sequence[WireResult]) -> None:
        """Return when the scheduler has them. It ignores what it has had already, so sending again does no harm.

        Never given up: a run whose report is lost never ends, and this process ends with the scheduler that made it.
        """
        await reach(lambda: self._scheduler.report.remote(run_id, self._source, list(reports)), patiently())
