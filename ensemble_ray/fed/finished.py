"""What a finished fed run gave, of its record (S-SET-39). Room: fed.

In: the record, and the items. Out: how the run ended; its outputs are in the body store already. The items are pulled and
compared, since an answer is of those items only. Never: a factory called, a model asked, a fact written.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Protocol

from ensemble_ray.facts.runs import PlanRecorded
from ensemble_ray.fed.feeding import opened
from ensemble_ray.fed.intake import Intake
from ensemble_ray.fed.ports import FedEnded
from ensemble_ray.fed.recovery import RecoveredRun
from ensemble_ray.outputs import ExitReason, RunState
from ensemble_ray.record.map_reduce_fold import Outcome
from ensemble_ray.record.rerun import is_answered
from ensemble_ray.record.resume.run_head import read_head
from ensemble_ray.schedule.map_reduce_words import EndFed

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.fed.bodies import FedBodies
    from ensemble_ray.fed.watch import RunWatch
    from ensemble_ray.items.pulling import ItemReader, RefusedItem
    from ensemble_ray.record.stores import RunStore

__all__ = ["OpenWatch", "finished"]

#: Items that are compared at a time.
_BATCH = 256


class OpenWatch(Protocol):
    """Opens what hears of a run's items, with the files that the run has."""

    async def __call__(self, *, is_direct: bool, is_replayed: bool) -> RunWatch:
        """Return it; close it."""
        ...


async def finished(
    store: RunStore,
    run_id: str,
    definition: MapDefinition,
    *,
    header: PlanRecorded | None,
    bodies: FedBodies,
    open_watch: OpenWatch,
) -> FedEnded | None:
    """How the run of that id ended; None where there was none, so that it begins.

    Args:
        store: Has the records.
        run_id: The id.
        definition: What is to be run.
        header: The first fact that the run would record; None: that has been compared.
        bodies: Get its outputs.
        open_watch: Opens what hears of its items; rows and dead letters that its files lack are written again.

    Raises:
        RunExistsError: it is running.
        ValidationError: it ended otherwise, or was of another definition or other items.
        Exception: what the source of the items raised.
    """
    summary = await store.summary(run_id)
    if summary is None:
        return None
    head = await read_head(store, run_id)
    if not is_answered(run_id, summary.state, recorded_state=head.state, recorded=head.header, header=header):
        return None
    record = await RecoveredRun.read(store, run_id, bodies)
    async with contextlib.AsyncExitStack() as stack:
        reader, is_direct = await opened(definition)
        stack.push_async_callback(reader.close)
        watch = await open_watch(is_direct=is_direct, is_replayed=True)
        stack.push_async_exit(watch.leave)
        return await _recorded_end(record, reader, bodies, watch)


async def _recorded_end(record: RecoveredRun, reader: ItemReader, bodies: FedBodies, watch: RunWatch) -> FedEnded:
    """How a finished run ended; what came of its items is told again."""
    intake, head, known = Intake(reader, record), record.facts.head, record.facts.items
    is_exhausted = False
    # One that ended early had not pulled all of them: those that it had are compared, and no more are pulled.
    while not is_exhausted and (known.are_all or intake.count < known.count):
        wanted = _BATCH if known.are_all else min(_BATCH, known.count - intake.count)
        taken = await intake.pull(wanted)
        for number in range(intake.count - taken.count, intake.count):
            index, item = intake.index(number), intake.done(number)
            if (failed := _failure(record, number, taken.refused.get(number))) is not None:
                watch.failed(index, item, *failed)
            elif record.outcome(0, number) is Outcome.COMPLETED:
                watch.completed(number, index, item, bodies.output(0, number))
        await watch.written()  # of a large run not all outputs are to be in memory at once
        is_exhausted = taken.is_exhausted
    failures = [record.failure(level, number) for level, number in record.failed]
    reason = (head.end and head.end.exit_reason) or ExitReason.COMPLETED
    return FedEnded(
        ending=EndFed(state=RunState.COMPLETED, exit_reason=reason),
        started_at=head.started_at,
        completed_at=head.started_at,
        failures=[failure for failure in failures if failure is not None],
    )


def _failure(record: RecoveredRun, number: int, refused: RefusedItem | None) -> tuple[BaseException, int] | None:
    """Why an item has no output, and its attempts; None where it has one."""
    if refused is not None:
        return refused.error, 0
    failure = record.failure(0, number)
    return None if failure is None else (failure.error, failure.attempts)
