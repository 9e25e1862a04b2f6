"""`ensemble-ray cancel`: end a run in any process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ensemble_ray.cli.inputs.records import RunName, own_store
from ensemble_ray.cli.view.terminal import FAILED, FINE, own_command, say, show

if TYPE_CHECKING:
    from ensemble_ray.record.stores import RecordedRun, RunStore


#: Seconds that a run may take to end: its owner polls once a second, and its tasks get a few seconds.
_PATIENCE_S = 30.0
_POLL_S = 0.2


def cancel(run: RunName) -> int:
    """End a run, and keep its results.

    A running one ends within seconds, wherever its owner is; an interrupted one is marked as cancelled. Both can be
    resumed.

    Exit codes: 0 it is cancelled, 1 its owner did not end it, 2 there is no such run or it has ended.
    """
    from ensemble_ray.process.forks import run_blocking

    return run_blocking(_cancel(own_store(), run))


async def _cancel(store: RunStore, name: str) -> int:
    import asyncio
    import time

    from ensemble_ray.recovery.deciding import end_unowned, request_end
    from ensemble_ray.values.outputs import RunState

    found: RecordedRun | None = await store.find(name)
    assert found is not None  # noqa: S101  `find` raises if there is none
    run_id = found.run_id
    await request_end(store, found)
    if found.state.is_active:
        say(f"Ending run {run_id}")
    found = await store.summary(run_id)
    deadline = time.monotonic() + _PATIENCE_S
    while found is not None and time.monotonic() < deadline:
        if found.state in {RunState.INTERRUPTED, RunState.WAITING}:
            await end_unowned(store, run_id)
        elif found.state.is_final:
            show(f"Run {run_id}: {found.state.value}")
            return FINE
        else:
            await asyncio.sleep(_POLL_S)
        found = await store.summary(run_id)
    owner = f" ({found.owner})" if found is not None and found.owner else ""
    say(
        f"Error: the owner of run '{run_id}'{owner} has not ended it within {_PATIENCE_S:.0f} s. "
        f"If that process hangs, claim the run: {own_command()} resume {run_id} --take-over"
    )
    return FAILED
