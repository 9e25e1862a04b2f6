"""RayRun: one run on the cluster, seen from its driver: submitted, listened to, waited for. Used by `RayRuntime`.

Events and the driver's services are `DriverConnection`'s. A scheduler that was started again is asked again; a cluster that is
gone is noticed within seconds.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray.exceptions

from ensemble_ray.actors import spawn
from ensemble_ray.actors.driver.cluster import ClusterHeartbeat
from ensemble_ray.actors.driver.driver_connection import DriverConnection
from ensemble_ray.actors.link.failures import last_line, ours
from ensemble_ray.actors.link.packing import dump_submission, unpack_end, unpack_failure, unpack_output
from ensemble_ray.actors.link.reach import RESTART_PAUSES_S, reach
from ensemble_ray.actors.link.wire import EndPage, Submission
from ensemble_ray.errors import EnsembleError, message_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.runs.submission import SubmissionReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ensemble_ray.execute.outcomes import RunOutcome
    from ensemble_ray.runs.ports import RunRequest
    from ensemble_ray.values.directives import RunDirective

__all__ = ["RayRun"]

_log = bounded_logger(__name__)


def _unrecorded_loss(run_id: str) -> EnsembleError:
    lost = EnsembleError(
        f"Run {run_id}: the scheduler's process died, and the run is not recorded (durability 'off'), so that it cannot "
        "go on. Run it again, or use durability='effects'"
    )
    lost.run_id = run_id
    return lost


class RayRun:
    """A run on the cluster, seen from its driver."""

    def __init__(self, request: RunRequest, submission: Submission, scheduler: Any) -> None:
        self.run_id, self._origin = request.run_id, request.origin
        self._submission = submission
        self._scheduler = scheduler
        self._is_cancelled = False
        self._heartbeat = ClusterHeartbeat(request.run_id, request.origin)
        self._connection = DriverConnection(request, self._heartbeat, scheduler)

    async def begin(self) -> None:
        """Hand the run over, then listen for events and answer requests until it ends."""
        hub = await self._submit(self._submission)
        self._connection.begin(hub)

    async def _submit(self, submission: Submission) -> Any:
        """Submit the run and return its hub; a scheduler that died meanwhile and was started again may have the run already, or never heard of it."""
        tries = itertools.count()

        async def submit() -> Any:
            is_first = next(tries) == 0
            if not is_first and await self._scheduler.knows.remote(self.run_id):
                return spawn.existing("event_hub") if submission.is_connected else None
            reason = submission.reason if is_first else submission.reason.without_answer()
            return await self._scheduler.submit.remote(dump_submission(replace(submission, reason=reason)))

        return await reach(submit, RESTART_PAUSES_S)

    async def wait(self) -> RunOutcome:
        """Wait until the run has ended and all its events were handed on; return its outcome.

        Raises:
            EnsembleError: the cluster died, or the scheduler's process did in a run that is not recorded.
        """
        try:
            return await self._fetch_end()
        except ray.exceptions.RayError as error:
            raise ours(error, self.run_id, self._origin) from None
        finally:
            await self._connection.leave()

    async def _fetch_end(self) -> RunOutcome:
        """Wait until the run has ended and return how; it comes in pages, which the scheduler keeps until all are here."""
        page = await self._wait_for_end()
        parts = [self._read(page)]
        while not page.is_last:
            following = await self._heartbeat.reach(partial(self._ask_for_end, page.cursor, page.end_id))
            if following is None:  # that scheduler is gone, and what it kept
                following = await self._wait_for_end()
                parts = []
            page = following
            parts.append(self._read(page))
        self._connection.keep_last_lines(page.lines)
        self._scheduler.forget.remote(self.run_id, page.end_id)
        return _join(parts)

    def _read(self, page: EndPage) -> RunOutcome:
        """Return a page with its outputs loaded."""
        try:
            return page.end.convert(unpack_output, unpack_failure)
        except Exception as error:
            self._scheduler.forget.remote(self.run_id, page.end_id)
            unreadable = EnsembleError(
                f"Run {self.run_id}: its results cannot be loaded in this process: {message_of(error)}. "
                "Install the module they come from here too, or use runtime='inline'"
            )
            unreadable.run_id = self.run_id
            raise unreadable from error

    async def _wait_for_end(self) -> EndPage:
        """Wait until the run has ended and return the first page of how, also when the scheduler's process died on the way and was started again (S-DUR-32)."""
        while True:
            ended = await self._heartbeat.reach(self._ask_for_end)
            if ended is not None:
                return ended
            if self._submission.store is None:
                raise _unrecorded_loss(self.run_id)
            # What its record knows is used, its cancellation included.
            await self._submit(replace(self._submission, reason=SubmissionReason.RESUBMITTED))
            if self._is_cancelled:
                await self.cancel()

    async def _ask_for_end(self, cursor: int = 0, end_id: str = "") -> EndPage | None:
        if self._is_cancelled:  # `cancel` may have given up before the scheduler was back
            await self._scheduler.cancel.remote(self.run_id)
        body: bytes | None = await self._scheduler.wait.remote(self.run_id, cursor, end_id)
        return None if body is None else unpack_end(body)

    async def cancel(self) -> None:
        """Ask the run to end, also where the scheduler is just being started again; of one that is gone `wait` tells."""
        self._is_cancelled = True
        try:
            await reach(lambda: self._scheduler.cancel.remote(self.run_id), RESTART_PAUSES_S)
        except ray.exceptions.RayError as error:
            _log.warning("Run %s: the scheduler cannot be reached: %s", self.run_id, last_line(error))

    async def inject(self, directive: RunDirective) -> bool:
        """Tell the tasks that start from now on, also where the scheduler is just being started again.

        Raises:
            EnsembleError: it cannot be recorded, or the cluster is gone.
        """
        try:
            is_told: bool = await reach(lambda: self._scheduler.inject.remote(self.run_id, directive), RESTART_PAUSES_S)
        except ray.exceptions.RayError as error:
            raise ours(error, self.run_id, self._origin) from None
        return is_told


def _join(parts: Sequence[RunOutcome]) -> RunOutcome:
    """Return the end with the entries of all its pages."""
    return replace(
        parts[0],
        completed=[each for part in parts for each in part.completed],
        delegated=[each for part in parts for each in part.delegated],
        failures=[each for part in parts for each in part.failures],
        unfinished=[each for part in parts for each in part.unfinished],
        raised=[each for part in parts for each in part.raised],
    )
