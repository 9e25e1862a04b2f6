"""A session of a planned run for tests: what was packed, who gets its reports, the orders of its plan."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from ensemble_ray import Ensemble, IllegalStateError, RayRuntime, RunOptions
from ensemble_ray.actors.driver.packing import pack_submission
from ensemble_ray.actors.link.wire import Submission, WireOrder, WireResult
from ensemble_ray.actors.scheduler.planned_run import body_of, opening_of
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.session import RunSession, SessionLimits
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.runs.ports import PlannedWork, RunRequest, SubmittedRun
from ensemble_ray.values.ids import instance_of


class Packing(RayRuntime):
    """A runtime that packs runs and begins none."""

    async def submit(self, request: RunRequest, work: PlannedWork) -> SubmittedRun:  # type: ignore[override]
        self.submission = pack_submission(request, work, keep="briefly", is_connected=False, goes_on_alone=False)
        raise IllegalStateError("packed")


async def packed(ensemble: Ensemble) -> Submission:
    """The ensemble's run as a scheduler gets it."""
    packing = Packing()
    with pytest.raises(IllegalStateError, match="packed"):
        await ensemble.arun(runtime=packing, options=RunOptions(durability="off"))
    return packing.submission


class Owner:
    """A planned run's session, and what it reports."""

    def __init__(self, submission: Submission, pool: ProcessPool, *, max_own: int = 4) -> None:
        self.reports: asyncio.Queue[WireResult] = asyncio.Queue()
        self.submission = submission
        limits = SessionLimits(max_own=max_own, most_replicas=1)
        self.session = RunSession(opening_of(submission), pool, self, hub=None, limits=limits)

    async def receive(self, reports: Sequence[WireResult]) -> None:
        """Keep them."""
        for report in reports:
            self.reports.put_nowait(report)

    def return_order(self, instance: str) -> None:
        """Everything was sent with the run."""
        raise KeyError(instance)

    def start(self) -> None:
        """Hand out the first task."""
        node = self.submission.plan.nodes[0]
        order: WireOrder = TaskOrder(
            run_id=self.submission.run_id,
            key=node.key,
            instance=instance_of(node.key),
            epoch=0,
            index=node.index,
            task=body_of(self.submission, node.key).task,
            agent_key=node.agent_key,
            agent_role=node.agent_role,
        )
        self.session.submit([order])
