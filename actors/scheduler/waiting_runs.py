"""WaitingRuns: the runs of this cluster that wait for reviews in their records, and go on here by themselves (S-REV-134).

In: submissions of runs that have ended their calls, with the gates that are open. Out: the same submissions, to be begun again, when
somebody has decided at one of these gates, or the time of one is up. Whoever decides needs no cluster: the record tells. Must
never happen: a run that goes on here and somewhere else; the store refuses that, and what goes on elsewhere is forgotten here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ensemble_ray.actors.link.background_tasks import BackgroundTasks
from ensemble_ray.errors import EnsembleError, RecordError, message_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.record.open_reviews import Gate, fold_gates, obstacle_at
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.resume.advice import resume_advice
from ensemble_ray.runs.submission import SubmissionReason
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.actors.link.wire import Submission
    from ensemble_ray.record.stores import StoreAddress

__all__ = ["WaitingRuns"]

_log = bounded_logger(__name__)
#: How often the records of waiting runs are looked at, s.
_LOOK_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    submission: Submission
    store: StoreAddress
    #: ids of the gates that were open when its call ended
    gates: frozenset[str]


class WaitingRuns:
    """Runs that wait, and what begins them again."""

    def __init__(self, begin: Callable[[Submission], Awaitable[None]], drop: Callable[[str], Awaitable[None]]) -> None:
        """Make one that has none.

        Args:
            begin: Begins a run again.
            drop: Forgets a submission that was kept for another scheduler.
        """
        self._begin = begin
        self._drop = drop
        self._runs: dict[str, _Waiting] = {}
        self._background = BackgroundTasks()

    def add(self, submission: Submission, gates: Collection[str]) -> None:
        """Watch a run that waits from now on.

        Args:
            submission: The run.
            gates: Ids of its open gates.
        """
        if submission.store is not None:
            self._runs[submission.run_id] = _Waiting(submission, submission.store, frozenset(gates))
            if not self._background:
                self._background.start(self._watch())

    def forget(self, run_id: str) -> None:
        """Watch a run no more: somebody lets it go on."""
        self._runs.pop(run_id, None)

    async def _watch(self) -> None:
        while self._runs:
            await asyncio.sleep(_LOOK_S)
            for waiting in tuple(self._runs.values()):
                try:
                    await self._look_at(waiting)
                except RecordError as error:  # such as a database that is out of reach: look again
                    run_id = waiting.submission.run_id
                    _log.warning("Run %s: cannot see whether it was decided: %s", run_id, message_of(error))

    async def _look_at(self, waiting: _Waiting) -> None:
        run_id = waiting.submission.run_id
        found = await store_at(waiting.store).summary(run_id)
        is_left = found is None or found.state is not RunState.WAITING
        is_ready = not is_left and await self._is_ready(waiting)
        if self._runs.get(run_id) is not waiting:  # it goes on here meanwhile
            return
        if is_left:  # it went on elsewhere, was cancelled or removed
            self.forget(run_id)
            await self._drop(run_id)
        elif is_ready:
            try:
                await self._begin(replace(waiting.submission, reason=SubmissionReason.RESUMED))
            except EnsembleError as error:
                self.forget(run_id)
                _log.error(
                    "Run %s cannot go on by itself: %s. Go on with it: %s",
                    run_id, message_of(error), resume_advice(run_id, waiting.submission.header.origin or ""),
                )  # fmt: skip
                await self._drop(run_id)

    async def _is_ready(self, waiting: _Waiting) -> bool:
        """Whether one of the gates that were open has its decision, or nobody can decide there any more."""
        now = time.time()

        def is_settled(gate: Gate) -> bool:
            return gate.gate_id in waiting.gates and obstacle_at(gate, at=now, is_owned=False) is not None

        facts = await store_at(waiting.store).gates_of(waiting.submission.run_id)
        return any(map(is_settled, fold_gates(facts)))
