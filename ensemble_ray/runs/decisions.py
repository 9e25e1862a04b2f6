"""Decisions that come while their run is still at work on other tasks: what waited for them goes on at once. Package: runs.

In: the tasks of a detached run that were put down, and its record, where anybody decides. Out: the tasks that can go on. Never: a
decision taken here.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from ensemble_ray.errors import RecordError, message_of
from ensemble_ray.process.bounded_log import bounded_logger
from ensemble_ray.record.open_reviews import fold_gates, obstacle_at

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.values.reviews import OpenReview

__all__ = ["watch_for_decisions"]

_log = bounded_logger(__name__)
#: How often the record is looked at while tasks of a run wait, s.
_POLL_S = 0.5


async def watch_for_decisions(
    store: RunStore,
    run_id: str,
    waiting: Callable[[], Mapping[str, Sequence[OpenReview]]],
    go_on: Callable[[Sequence[str]], None],
) -> None:
    """Tell, until it is cancelled, which tasks can go on: a gate of theirs was decided, or its time is up (S-REV-124).

    Args:
        store: Has the record.
        run_id: The run's id.
        waiting: Returns the open gates of the tasks that wait, by instance.
        go_on: Takes instances, each once for each gate.
    """
    told: set[str] = set()
    while True:
        await asyncio.sleep(_POLL_S)
        asked = {instance: {each.gate_id for each in reviews} - told for instance, reviews in waiting().items()}
        if not any(asked.values()):
            continue
        try:
            gates = fold_gates(await store.gates_of(run_id))
        except RecordError as error:  # the run's own facts will tell, if it lasts
            _log.warning("Run %s: cannot see whether its reviews were decided: %s", run_id, message_of(error))
            continue
        now = time.time()
        settled = {gate.gate_id for gate in gates if obstacle_at(gate, at=now, is_owned=False) is not None}
        if ready := [instance for instance, gate_ids in asked.items() if gate_ids & settled]:
            told |= settled
            go_on(ready)
