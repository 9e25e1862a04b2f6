"""Ownership of a run's record: claim it, watch it for cancel requests and decisions, and release it."""

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
#: Grace period of a cancelled task, s; afterwards the run ends without it.
GRACE_S = 3.0
#: How often the owner of a run checks its record for a cancel request, s.
CANCEL_POLL_S = 1.0


async def claim_run(
    store: RunStore, run_id: str, *, origin: object, durability: str, submission: SubmissionReason
) -> OwnedRun:
    """Begin the record of a run or claim it, and mark the run as running.

    Raises:
        RunExistsError: another process owns it, or a run with this id exists.
        RecordError: the store cannot be read or written.
    """
    is_buffered, state = durability == Durability.RUN, RunState.RUNNING
    if submission.is_recorded:
        return await store.claim(run_id, is_buffered=is_buffered, by_force=submission.takes_over, state=state)
    return await store.begin(run_id, origin=str(origin or ""), is_buffered=is_buffered, state=state)


async def release_run(owned: OwnedRun | None) -> None:
    """Release a run that could not begin here, so that it can be resumed; the caller raises the cause."""
    if owned is not None:
        with contextlib.suppress(RecordError):
            await owned.close(RunState.INTERRUPTED)


async def watch_for_cancel(owned: OwnedRun, run_id: str, cancel: Callable[[], Awaitable[None]]) -> None:
    """Wait until the record has a cancel request, then call `cancel` (S-DUR-52)."""
    while True:
        await asyncio.sleep(CANCEL_POLL_S)
        try:
            if await owned.is_cancel_asked():
                break
        except RecordError as error:  # a lasting error also fails the writes of the run's own facts
            _log.warning("Run %s: cannot check for a cancel request: %s", run_id, message_of(error))
    await cancel()


#: How often the record is checked while tasks of a run wait, s.
_POLL_S = 0.5


class DecisionWatch:
    """Checks for decisions at the gates of suspended tasks (S-REV-124); reports each gate once."""

    def __init__(self, store: RunStore, run_id: str, waiting: Callable[[], Mapping[str, Sequence[OpenReview]]]) -> None:
        """`waiting` returns the open gates of suspended tasks, by instance."""
        self._store = store
        self._run_id = run_id
        self._waiting = waiting
        self._reported: set[str] = set()

    async def watch(self, resume_tasks: Callable[[Sequence[str]], None]) -> None:
        """Report, until cancelled, the tasks that can resume: one of their gates was decided or has expired."""
        while True:
            await asyncio.sleep(_POLL_S)
            if ready := await self._find({Obstacle.DECIDED, Obstacle.EXPIRED}):
                resume_tasks(ready)

    async def find_decided(self) -> Sequence[str]:
        """Return the instances that can resume since one of their gates was decided."""
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
        """Return the ids of open, unreported gates, by suspended task."""
        waiting = self._waiting().items()
        found = {instance: {each.gate_id for each in gates} - self._reported for instance, gates in waiting}
        return {instance: gate_ids for instance, gate_ids in found.items() if gate_ids}
