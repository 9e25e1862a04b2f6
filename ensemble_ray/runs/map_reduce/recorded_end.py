"""What a finished map-reduce gave, of its record (S-SET-39).

In: the record, and the items. Out: how the run ended; its outputs are in the body store already. The items are pulled and
compared, since an answer is of those items only. Never: a factory called, a model asked, a fact written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, cast

from ensemble_ray.coordinator.map_reduce.failures import FailureLog
from ensemble_ray.coordinator.map_reduce.item_buffer import ItemBuffer
from ensemble_ray.coordinator.map_reduce.ports import MapReduceEnd
from ensemble_ray.record.head import read_head
from ensemble_ray.record.identity.map_reduce import DIRECT, position_of
from ensemble_ray.record.map_reduce_fold import RecordedOutcome, fails_on_item, read_map_reduce
from ensemble_ray.record.rerun import is_answered
from ensemble_ray.record.resume.reading import RecordedFailures
from ensemble_ray.runs.map_reduce.opening import open_items
from ensemble_ray.runs.map_reduce.recovery import RecoveredRun, recorded_failure
from ensemble_ray.runs.map_reduce.result import failure_of
from ensemble_ray.schedule.instructions import End
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.task_output import OutputType

if TYPE_CHECKING:
    from ensemble_ray.coordinator.map_reduce.item_results import ItemResultWriter
    from ensemble_ray.coordinator.map_reduce.outputs import MapReduceOutputs
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.items.pulling import ItemReader, RefusedItem
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.schedule.instructions import FailureReason

#: Items that are compared at a time.
_BATCH = 256


class OpenResults(Protocol):
    """Opens what hears of a run's items, with the files that the run has."""

    async def __call__(self, *, is_direct: bool) -> ItemResultWriter:
        """Return it; close it."""
        ...


async def load_end(
    store: RunStore,
    run_id: str,
    definition: MapDefinition,
    *,
    header: PlanRecorded | None,
    outputs: MapReduceOutputs,
    output_types: Mapping[str, OutputType],
    open_results: OpenResults,
) -> MapReduceEnd | None:
    """How the run of that id ended; None where there was none, so that it begins.

    Args:
        store: Has the records.
        run_id: The id.
        definition: What is to be run.
        header: The first fact that the run would record; None: that has been compared.
        outputs: Get its outputs.
        output_types: Types of today's definition, by full name.
        open_results: Opens what hears of its items; rows and dead letters that its files lack are written again.

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
    record = await RecoveredRun.read(store, run_id, outputs, output_types)
    async with contextlib.AsyncExitStack() as stack:
        reader, is_direct = await open_items(definition)
        stack.push_async_callback(reader.close)
        writer = await open_results(is_direct=is_direct)
        stack.push_async_exit(writer.leave)
        return await _recorded_end(record, reader, outputs, writer)


async def load_failure(store: RunStore, run_id: str) -> BaseException | None:
    """Return what a failed run raised that failed because of its tasks, without their outputs; None: the record does not say.

    Raises:
        RecordError: the record is damaged.
    """
    facts: RecordedFailures[str] = RecordedFailures()
    record = await read_map_reduce(store, run_id, keep_failure=facts.put)
    head, log = record.head, FailureLog()
    refusal = None
    for key in facts:
        if (fact := facts.get(key)) is None or record.outcome(key) is not RecordedOutcome.FAILED:
            continue
        position, final = position_of(key), record.groups.final
        level = position[0] if position is not None else 0 if key == DIRECT or final is None else final.level
        failure = recorded_failure(key, level, fact)
        if head.own_error is not None and head.own_error.key == key:
            refusal = failure
        log.add(failure)
    if head.end is None or not log.first:
        return None
    ended = MapReduceEnd(
        ending=End(state=RunState.FAILED, exit_reason=head.end.reason, failure=cast("FailureReason", head.end.failure)),
        started_at=head.started_at,
        completed_at=head.started_at,
        failures=log.first,
        failed_maps=log.failed_maps,
        refusal=refusal,
    )
    return failure_of(ended, (), goes_on=not fails_on_item(head.header))


async def _recorded_end(
    record: RecoveredRun, reader: ItemReader, outputs: MapReduceOutputs, writer: ItemResultWriter
) -> MapReduceEnd:
    """How a finished run ended; what came of its items is told again."""
    items, head, recorded = ItemBuffer(reader, record), record.facts.head, record.facts.items
    is_exhausted = False
    # One that ended early had not pulled all of them: those that it had are compared, and no more are pulled.
    while not is_exhausted and (recorded.are_all or items.count < recorded.count):
        wanted = _BATCH if recorded.are_all else min(_BATCH, recorded.count - items.count)
        pulled = await items.pull(wanted)
        for number in range(items.count - pulled.count, items.count):
            index, item = items.index(number), items.pop(number)
            if (failed := _failure(record, number, pulled.refused.get(number))) is not None:
                writer.write_failure(index, item, *failed)
            elif outputs.has(0, number):
                writer.write_output(number, index, item, outputs.output(0, number))
        await writer.wait_until_written()  # of a large run not all outputs are to be in memory at once
        is_exhausted = pulled.is_exhausted
    failures = [record.failure(level, number) for level, number in record.failed]
    reason = (head.end and head.end.exit_reason) or ExitReason.COMPLETED
    return MapReduceEnd(
        ending=End(state=RunState.COMPLETED, exit_reason=reason),
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
