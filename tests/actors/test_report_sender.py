"""Adapters of handles, with a handle that fails as Ray's do."""

from __future__ import annotations

import pytest
from ray.exceptions import ActorUnavailableError

from ensemble_ray.actors.link import reach
from ensemble_ray.actors.worker.task_host import send_reports


class Unreachable:
    """A scheduler that cannot be reached so often; then it takes reports."""

    def __init__(self, times: int) -> None:
        self._times = times
        self.taken: list[object] = []

    @property
    def report(self) -> Unreachable:
        """Its method."""
        return self

    async def remote(self, run_id: str, process: str, reports: object) -> None:
        """Call it."""
        if self._times:
            self._times -= 1
            raise ActorUnavailableError("out of reach", None)
        self.taken.append((run_id, process, reports))


async def test_report_is_not_given_up_when_the_scheduler_is_out_of_reach_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S-PAR-34: a run whose report is lost would never end."""
    monkeypatch.setattr(reach, "_PATIENT_PAUSES_S", (0.0, 0.0))
    scheduler = Unreachable(20)
    await send_reports(scheduler, "process-1", "run", [])
    assert scheduler.taken == [("run", "process-1", [])]
