"""Claim a run's record, watch it for cancel requests and decisions, and release it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

from ensemble_ray.definition.fields import Durability
from ensemble_ray.errors import RecordError, message_of
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.open_reviews import Obstacle, fold_gates, obstacle_at
from ensemble_ray.record.stores import OwnedRun, RunStore
from ensemble_ray.runs.ports import SubmissionReason
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.reviews import OpenReview

_log = bounded_logger(__name__)
GRACE_S = 3.0  # for a cancelled task, s; afterwards the run ends without it
CANCEL_POLL_S = 1.0  # interval of checks for a cancel request, s


async def claim_run(
    store: RunStore, run_id: str, *, origin: object, durability: str, submission: SubmissionReason
) -> OwnedRun:
    """Begin or claim the record, and mark the run as running. Raises `RunExistsError`, `RecordError`."""
    is_buffered, state = durability == Durability.RUN, RunState.RUNNING
    if submission.is_recorded:
        return await store.claim(run_id, is_buffered=is_buffered, by_force=submission.takes_over, state=state)
    return await store.begin(run_id, origin=str(origin or ""), is_buffered=is_buffered, state=state)


async def release_run(owned: OwnedRun | None) -> None:
    """Release a run that could not begin, so that it can be resumed; the caller raises the cause."""
    if owned is not None:
        with contextlib.suppress(RecordError):
            await owned.close(RunState.INTERRUPTED)


async def watch_for_cancel(owned: OwnedRun, run_id: str, cancel: Callable[[], Awaitable[None]]) -> None:
    """Wait for a cancel request, then call `cancel` (S-DUR-52)."""
    while True:
        await asyncio.sleep(CANCEL_POLL_S)
        try:
            if await owned.is_cancel_asked():
                break
        except RecordError as error:  # a lasting error also fails the writes of the run's own facts
            _log.warning("Run %s: cannot check for a cancel request: %s", run_id, message_of(error))
    await cancel()


_POLL_S = 0.5  # interval of checks while tasks wait, s


class DecisionWatch:
    """Reports each decided gate of suspended tasks once (S-REV-124)."""

    def __init__(self, store: RunStore, run_id: str, waiting: Callable[[], Mapping[str, Sequence[OpenReview]]]) -> None:
        """`waiting` returns the open gates of suspended tasks, by instance."""
        self._store = store
        self._run_id = run_id
        self._waiting = waiting
        self._reported: set[str] = set()

    async def watch(self, resume_tasks: Callable[[Sequence[str]], None]) -> None:
        """Report, until cancelled, tasks with a decided or expired gate."""
        while True:
            await asyncio.sleep(_POLL_S)
            if ready := await self._find({Obstacle.DECIDED, Obstacle.EXPIRED}):
                resume_tasks(ready)

    async def find_decided(self) -> Sequence[str]:
        return await self._find({Obstacle.DECIDED})

    async def _find(self, settled_by: Collection[Obstacle]) -> Sequence[str]:
        if not self._list_unreported():
            return ()
        try:
            gates = fold_gates(await self._store.gates_of(self._run_id))
        except RecordError as error:  # a lasting error also fails the writes of the run's own facts
            _log.warning("Run %s: cannot see whether its reviews were decided: %s", self._run_id, message_of(error))
            return ()
        now = time.time()
        settled = {gate.gate_id for gate in gates if obstacle_at(gate, at=now, is_owned=False) in settled_by}
        ready = [instance for instance, gate_ids in self._list_unreported().items() if gate_ids & settled]
        if ready:
            self._reported |= settled
        return ready

    def _list_unreported(self) -> Mapping[str, set[str]]:
        """Return ids of open, unreported gates, by task."""
        waiting = self._waiting().items()
        found = {instance: {each.gate_id for each in gates} - self._reported for instance, gates in waiting}
        return {instance: gate_ids for instance, gate_ids in found.items() if gate_ids}
