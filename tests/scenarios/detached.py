"""What scenarios of detached reviews share: a person who decides in a record, from outside any run."""

from __future__ import annotations

import time

from ensemble_ray import EnsembleOutput, ReviewDecision
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reviews import ReviewDecided, ReviewRequested
from ensemble_ray.ports import Persistence
from ensemble_ray.process.loop import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.runs.ports import Runtime
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.reviews import ReviewAnswer

__all__ = ["decide", "gates_of"]


def gates_of(output: EnsembleOutput) -> dict[str, str]:
    """Ids of the open gates, by what they ask about."""
    return {each.task_description: each.gate_id for each in output.open_reviews}


def decide(runtime: Runtime, run_id: str, gate_id: str, decision: ReviewDecision) -> None:
    """Decide at a gate of a run that waits."""
    run_blocking(_decide(runtime, run_id, gate_id, decision))


async def _decide(runtime: Runtime, run_id: str, gate_id: str, decision: ReviewDecision) -> None:
    store = store_at(runtime.store_address)
    asked = [
        each
        for each in await store.facts(run_id)
        if isinstance(each.data, ReviewRequested) and each.data.review_id == gate_id
    ]
    data = ReviewDecided.of(ReviewAnswer(decision=decision, by="ann"), outside=True)
    owned = await store.claim(run_id)
    fact = Fact(run=run_id, name=asked[-1].name, at=time.time(), data=data, epoch=owned.epoch)
    await owned.journal.append((fact,), epoch=owned.epoch, until=Persistence.SYNCED)
    await owned.close(RunState.WAITING)
