"""Decisions that come while their run is still at work on other tasks: what waited for them goes on at once.

In: the tasks of a detached run that were put down, and its record, where anybody decides. Out: the tasks that can go on. Never: a
decision taken here.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError, message_of
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.open_reviews import Obstacle, fold_gates, obstacle_at

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.values.reviews import OpenReview

_log = bounded_logger(__name__)
#: How often the record is looked at while tasks of a run wait, s.
_POLL_S = 0.5


class DecisionWatch:
    """Looks for decisions at the gates that tasks of a run wait for (S-REV-124); tells of each gate once."""

    def __init__(self, store: RunStore, run_id: str, waiting: Callable[[], Mapping[str, Sequence[OpenReview]]]) -> None:
        """Make one that looks when it is asked to.

        Args:
            store: Has the record.
            run_id: The run's id.
            waiting: Returns the open gates of the tasks that wait, by instance.
        """
        self._store = store
        self._run_id = run_id
        self._waiting = waiting
        self._told: set[str] = set()

    async def watch(self, go_on: Callable[[Sequence[str]], None]) -> None:
        """Tell, until it is cancelled, which tasks can go on: a gate of theirs was decided, or its time is up."""
        while True:
            await asyncio.sleep(_POLL_S)
            if ready := await self._find({Obstacle.DECIDED, Obstacle.EXPIRED}):
                go_on(ready)

    async def find_decided(self) -> Sequence[str]:
        """Return the instances that can go on since somebody decided at a gate of theirs."""
        return await self._find({Obstacle.DECIDED})

    async def _find(self, settled_by: Collection[Obstacle]) -> Sequence[str]:
        if not self._list_asked():
            return ()
        try:
            gates = fold_gates(await self._store.gates_of(self._run_id))
        except RecordError as error:  # the run's own facts will tell, if it lasts
            _log.warning("Run %s: cannot see whether its reviews were decided: %s", self._run_id, message_of(error))
            return ()
        now = time.time()
        settled = {gate.gate_id for gate in gates if obstacle_at(gate, at=now, is_owned=False) in settled_by}
        ready = [instance for instance, gate_ids in self._list_asked().items() if gate_ids & settled]
        if ready:
            self._told |= settled
        return ready

    def _list_asked(self) -> Mapping[str, set[str]]:
        """Return the ids of the gates that were not told of, of tasks that wait for any."""
        found = {instance: {each.gate_id for each in gates} - self._told for instance, gates in self._waiting().items()}
        return {instance: gate_ids for instance, gate_ids in found.items() if gate_ids}
