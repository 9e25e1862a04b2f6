"""RayRun: one run on the cluster, seen from its driver: submitted, attended, waited for. Used by `RayRuntime`.

Events and the driver's services are `Attendance`'s. A scheduler that was started again is asked again; a cluster that is
gone is noticed within seconds.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import ray.exceptions

from actors import spawn
from actors.attendance import Attendance
from actors.connection import Pulse
from actors.failures import last_line, ours
from actors.wire import RunPackage, unpack_output, unpack_result
from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.coordinator.planned import FailedTask, PlannedEnd
from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.runs.outcomes import outcome_of
from ensemble_ray.runs.submission import Submission

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import RunOutcome, TaskResult
    from ensemble_ray.outputs import TaskOutput
    from ensemble_ray.runs.ports import RunRequest

__all__ = ["RayRun"]

_log = bounded_logger(__name__)
#: How long a scheduler that died is waited for before it is asked again, s.
_RESTART_PAUSES_S = (1.0, 2.0, 4.0, 8.0)
#: Pause before a scheduler that could not be reached is asked again, s.
_RETRY_S = 0.5


def _lost(run_id: str) -> EnsembleError:
    lost = EnsembleError(
        f"Run {run_id}: the scheduler's process died, and the run is not recorded (durability 'off'), so that it cannot "
        "go on. Run it again, or use durability='effects'"
    )
    lost.run_id = run_id
    return lost


class RayRun:
    """A run on the cluster, seen from its driver."""

    def __init__(self, request: RunRequest, package: RunPackage, scheduler: Any) -> None:
        self.run_id = request.run_id
        self._package = package
        self._scheduler = scheduler
        self._is_cancelled = False
        self._pulse = Pulse(request.run_id)
        self._attendance = Attendance(request, self._pulse, scheduler)

    async def begin(self) -> None:
        """Hand the run over, then listen for events and answer requests until it ends."""
        hub = await self._submitted(self._package)
        self._attendance.begin(hub)

    async def _submitted(self, package: RunPackage) -> Any:
        """Submit; a scheduler that died meanwhile and was started again may have the run already, or never heard of it."""
        for pause_s in _RESTART_PAUSES_S:
            try:
                return await self._scheduler.submit.remote(package)
            except ray.exceptions.ActorUnavailableError:
                await asyncio.sleep(pause_s)
                if await self._is_known():
                    return spawn.existing("event_hub") if package.is_attended else None
                package = replace(package, submission=package.submission.without_answer())
        return await self._scheduler.submit.remote(package)

    async def _is_known(self) -> bool:
        try:
            return bool(await self._scheduler.attend.remote(self.run_id))
        except ray.exceptions.ActorUnavailableError:
            return False

    async def wait(self) -> RunOutcome:
        """Return when the run ended and all its events were handed on.

        Raises:
            EnsembleError: the cluster died, or the scheduler's process did in a run that is not recorded.
        """
        try:
            ended = await self._ended()
        except ray.exceptions.RayError as error:
            raise ours(error, self.run_id) from None
        finally:
            await self._attendance.leave()
        self._scheduler.forget.remote(self.run_id)
        try:
            return outcome_of(self.run_id, _opened(ended))
        except Exception as error:
            unreadable = EnsembleError(
                f"Run {self.run_id}: its results cannot be loaded in this process: {message_of(error)}. "
                "Install the module they come from here too, or use runtime='inline'"
            )
            unreadable.run_id = self.run_id
            raise unreadable from error

    async def _ended(self) -> PlannedEnd[bytes, bytes]:
        """How the run ended, also when the scheduler's process died on the way and was started again (S-DUR-32)."""
        is_told = False
        while True:
            try:
                if is_told and self._is_cancelled:  # `cancel` may have given up before it was back
                    await self._pulse.given(self._scheduler.cancel.remote(self.run_id))
                ended: PlannedEnd[bytes, bytes] | None = await self._pulse.given(
                    self._scheduler.wait.remote(self.run_id)
                )
            except ray.exceptions.ActorUnavailableError:
                if not is_told:
                    _log.warning("Run %s: the scheduler's process died; the run goes on when it is back", self.run_id)
                    is_told = True
                await asyncio.sleep(_RETRY_S)
                await self._pulse.look()
                continue
            is_told = False
            if ended is not None:
                return ended
            if self._package.store is None:
                raise _lost(self.run_id)
            # What its record knows is used, its cancellation included.
            await self._submitted(replace(self._package, submission=Submission.RESUBMITTED))
            if self._is_cancelled:
                await self.cancel()

    async def cancel(self) -> None:
        """Ask the run to end, also where the scheduler is just being started again; of one that is gone `wait` tells."""
        self._is_cancelled = True
        for pause_s in (*_RESTART_PAUSES_S, None):
            try:
                await self._scheduler.cancel.remote(self.run_id)
            except ray.exceptions.RayError as error:
                if pause_s is not None and isinstance(error, ray.exceptions.ActorUnavailableError):
                    await asyncio.sleep(pause_s)
                    continue
                _log.warning("Run %s: the scheduler cannot be reached: %s", self.run_id, last_line(error))
            return


def _opened(ended: PlannedEnd[bytes, bytes]) -> PlannedEnd[TaskOutput, TaskResult]:
    """The outcome with its outputs loaded."""
    return PlannedEnd(
        state=ended.state,
        exit_reason=ended.exit_reason,
        started_at=ended.started_at,
        completed_at=ended.completed_at,
        completed=[(key, unpack_output(body)) for key, body in ended.completed],
        delegated=[unpack_output(body) for body in ended.delegated],
        lost_work=ended.lost_work,
        failures=[
            FailedTask(
                key=failed.key,
                at=failed.at,
                failure=unpack_result(failed.failure),
                completed_before=failed.completed_before,
            )
            for failed in ended.failures
        ],
        unfinished=[unpack_result(body) for body in ended.unfinished],
    )
