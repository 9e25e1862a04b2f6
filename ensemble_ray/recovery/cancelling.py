"""Ending a run from whichever process, keeping what is done.

In: a run's id. Out: its owner knows that its end is asked for; or, where nobody owns it, its end is on record. Never: a second end.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ensemble_ray.errors import RunExistsError, ValidationError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import RunEnded
from ensemble_ray.ports import Persistence
from ensemble_ray.record.head import head_facts
from ensemble_ray.values.ids import RUN
from ensemble_ray.values.outputs import ExitReason, RunState

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RecordedRun, RunStore


async def request_end(store: RunStore, run: RecordedRun) -> None:
    """Ask the owner of a run to end it, or end it where nobody owns it; the former takes its owner a moment.

    Raises:
        ValidationError: it has ended.
        RecordError: the record cannot be written.
    """
    if run.state.is_final:
        raise ValidationError(f"Run '{run.run_id}' has ended: it is {run.state.value}")
    if run.state.is_going_on:
        await store.ask_cancel(run.run_id)
    else:
        await end_unowned(store, run.run_id)


async def end_unowned(store: RunStore, run_id: str) -> None:
    """Write the end of a run that nobody owns.

    Raises:
        RecordError: the record cannot be written.
    """
    try:
        owned = await store.claim(run_id)
    except RunExistsError:  # somebody resumes it now, and will see that its end is asked for
        await store.ask_cancel(run_id)
        return
    data = RunEnded(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
    end = Fact(run=run_id, name=RUN, at=time.time(), data=data, epoch=owned.epoch)
    try:
        if await head_facts(store, run_id):  # else it never began, and its id stays free for a run that does
            await owned.journal.append((end,), epoch=owned.epoch, until=Persistence.COMMITTED)
    finally:
        await owned.close(RunState.CANCELLED)
