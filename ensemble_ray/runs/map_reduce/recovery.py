"""Rules, items, end and error of a map-reduce, from its definition and record."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import cast

from ensemble_ray.definition.fields import ParallelErrorStrategy
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.errors import BudgetExhaustedError, EnsembleError, ParallelExecutionError, ValidationError
from ensemble_ray.errors.texts import tasks_failure
from ensemble_ray.facts.runs import OWN_FAILURES, PlanRecorded
from ensemble_ray.items.pulling import ItemEntry, ItemReader, ListReader, Pulled, RefusedItem
from ensemble_ray.plan.map_reduce_factories import input_tokens
from ensemble_ray.process.concurrency import threads
from ensemble_ray.record.head import read_head
from ensemble_ray.record.identity.definition import DIRECT, position_of
from ensemble_ray.record.map_reduce_fold import RecordedOutcome, fails_on_item, read_map_reduce
from ensemble_ray.record.result import RunEnd, RunResults, error_trace, failures_by_label, task_error
from ensemble_ray.record.resume.reading import RecordedFailures, is_answered
from ensemble_ray.record.stores import RunStore
from ensemble_ray.runs.launching import RunConclusion
from ensemble_ray.runs.map_reduce.items import ItemBuffer, ItemResultWriter
from ensemble_ray.runs.map_reduce.outputs import FailureLog, MapReduceEnd, MapReduceFailure, MapReduceOutputs
from ensemble_ray.runs.map_reduce.resume_point import MapReduceResumePoint, recorded_failure
from ensemble_ray.schedule.instructions import End, FailureReason
from ensemble_ray.schedule.map_reduce_groups import Grouping, MapReduceRules
from ensemble_ray.values.outputs import ExitReason, FailedItem, RunState
from ensemble_ray.values.task_output import OutputType, TaskOutput
from ensemble_ray.values.value import utc_of


def conclude(
    ended: MapReduceEnd, task_outputs: MapReduceOutputs, failed_items: Sequence[FailedItem] = (), *, continues: bool
) -> RunConclusion:
    """Return the outcome and the outputs. Unless the run `continues`, the first failure is its error."""
    started, completed = task_outputs.span or (
        utc_of(ended.started_at),
        utc_of(max(ended.started_at, ended.completed_at)),
    )
    end = RunEnd(
        state=ended.ending.state,
        exit_reason=ended.ending.exit_reason,
        started_at=started,
        completed_at=completed,
        errors=tuple(
            error_trace(each.error, at=each.at, agent_role=each.agent_role, task_description=each.task_description)
            for each in list_reasons(ended)
        ),
    )
    outputs, last = task_outputs.outputs, task_outputs.last
    results = RunResults(
        outputs=outputs,
        raw="" if last is None else task_outputs.output(*last).raw,
        traces=task_outputs.traces,
        agents=task_outputs.agents,
        metrics=task_outputs.metrics,
        tool_calls=task_outputs.tool_calls,
        levels=task_outputs.levels,
        failed_items=failed_items,
    )
    failure = failure_of(ended, outputs, continues=continues) if ended.ending.state is RunState.FAILED else None
    return RunConclusion(end=end, results=results, failure=failure, warning=ended.warning)


def list_reasons(ended: MapReduceEnd) -> Sequence[MapReduceFailure]:
    """Return why a run failed: its own error, then those of its tasks."""
    own: BaseException | None = BudgetExhaustedError(ended.warning) if ended.warning else None
    if ended.ending.failure in OWN_FAILURES:
        if ended.refusal is not None:
            return (ended.refusal, *ended.failures)
        own = ended.cause or _no_items()
    if own is None:
        return ended.failures
    first = MapReduceFailure(key="", level=0, at=ended.completed_at, task_description="", agent_role="", error=own)
    return (first, *ended.failures)


def _no_items() -> ValidationError:
    return ValidationError("items must not be None or empty")


def failure_of(ended: MapReduceEnd, outputs: Sequence[TaskOutput], *, continues: bool) -> BaseException:
    if ended.refusal is not None:
        return _first(ended.refusal, outputs)
    if ended.cause is not None:
        return ended.cause
    if ended.ending.failure == "empty":
        return _no_items()
    level = max((failure.level for failure in ended.failures), default=0)
    here = [failure for failure in ended.failures if failure.level == level]
    if ended.ending.failure != "all_maps" and not (continues and level):
        return _first(here[0], outputs)
    count = ended.failed_maps if not level else len(here)  # all failures of a level, or the first hundred
    causes = failures_by_label((failure.task_description, failure.error) for failure in here)
    error = ParallelExecutionError(tasks_failure(count, count, causes), (), causes, count, len(outputs))
    error.completed_task_outputs = outputs
    return error


def _first(failure: MapReduceFailure, outputs: Sequence[TaskOutput]) -> EnsembleError:
    return task_error(
        failure.error,
        outputs,
        label=failure.task_description,
        task_description=failure.task_description,
        agent_role=failure.agent_role,
    )


_PER_PROCESS = 256  # unlimited tasks in flight per process (S-MR-140)
#: This factor more tasks than the capacity wait in the processes, so that free capacity gets work without a message.
_AHEAD = 1.25
_PROBE = 256  # items per step while it is unknown whether all fit the budget


def window_of(definition: MapDefinition, most_processes: int | None) -> int:
    """Return the most tasks in flight (S-MR-140); `most_processes` per kind of agent, None: only this one."""
    if definition.max_parallel_tasks is not None:
        return definition.max_parallel_tasks
    processes = 1 if most_processes is None else definition.replicas or most_processes
    if definition.max_concurrency is not None:
        return math.ceil(definition.max_concurrency * processes * _AHEAD)
    return _PER_PROCESS * processes


def rules_of(definition: MapDefinition, *, window: int, is_direct: bool) -> MapReduceRules:
    fails_on_item = definition.item_policy == "fail" or is_direct
    fails_on_reduce = definition.parallel_error_strategy is ParallelErrorStrategy.FAIL_FAST
    if is_direct or not isinstance(definition, MapReduceDefinition):
        return MapReduceRules(
            grouping=Grouping.NONE, window=window, fails_on_item=fails_on_item, fails_on_reduce=fails_on_reduce
        )
    is_adaptive = definition.is_adaptive
    return MapReduceRules(
        grouping=Grouping.BUDGET if is_adaptive else Grouping.CHUNK,
        capacity=definition.capacity,
        max_levels=definition.max_reduce_levels if is_adaptive else None,
        is_pipelined=definition.is_pipelined,
        is_ordered=definition.ordered,
        window=window,
        fails_on_item=fails_on_item,
        fails_on_reduce=fails_on_reduce,
    )


async def open_items(definition: MapDefinition) -> tuple[ItemReader, bool]:
    """Return the reader of a run's items, and whether they form one task (S-MR-81)."""
    reader = definition.item_source.open()
    if not isinstance(definition, MapReduceDefinition) or definition.direct_task is None or definition.budget is None:
        return reader, False
    try:
        return await _probe(definition, reader, definition.budget)
    except BaseException:
        await reader.close()
        raise


async def _probe(definition: MapReduceDefinition, reader: ItemReader, budget: int) -> tuple[ItemReader, bool]:
    """Read until it is known whether all items fit the budget."""

    def count(items: Sequence[object]) -> int:
        return sum(input_tokens(definition, item) for item in items)

    entries: list[ItemEntry] = []
    total, is_exhausted = 0, False
    while not is_exhausted and total <= budget:
        pulled = await reader.next(_PROBE)
        entries.extend(pulled.items)
        is_exhausted = pulled.is_exhausted
        if any(isinstance(entry, RefusedItem) for entry in pulled.items):
            return _Again(entries, reader, is_exhausted=is_exhausted), False  # invalid lines are handled item by item
        items = [entry[1] for entry in pulled.items if not isinstance(entry, RefusedItem)]
        total += await threads.run(count, items)
    if total > budget or not entries:
        return _Again(entries, reader, is_exhausted=is_exhausted), False
    await reader.close()
    return ListReader([[entry[1] for entry in entries if not isinstance(entry, RefusedItem)]]), True


class _Again:
    """First returns entries that were read before."""

    def __init__(self, entries: Sequence[ItemEntry], rest: ItemReader, *, is_exhausted: bool) -> None:
        self._entries = list(reversed(entries))
        self._rest = rest
        self._is_exhausted = is_exhausted

    async def next(self, count: int) -> Pulled:
        if not self._entries:
            return Pulled((), is_exhausted=True) if self._is_exhausted else await self._rest.next(count)
        entries = [self._entries.pop() for _ in range(min(count, len(self._entries)))]
        return Pulled(entries, is_exhausted=self._is_exhausted and not self._entries)

    async def close(self) -> None:
        await self._rest.close()


_BATCH = 256


async def load_end(
    store: RunStore,
    run_id: str,
    definition: MapDefinition,
    *,
    header: PlanRecorded | None,
    outputs: MapReduceOutputs,
    output_types: Mapping[str, OutputType],
    open_results: Callable[[bool], Awaitable[ItemResultWriter]],
) -> MapReduceEnd | None:
    """Return the end of the run with this id; None: there is no such run, so it begins.

    Missing rows and dead letters are written again; `open_results` receives whether all items form one task.
    `RunExistsError`: it is running. `ValidationError`: it did not complete, or its definition or items differ.
    """
    summary = await store.summary(run_id)
    if summary is None:
        return None
    head = await read_head(store, run_id)
    if not is_answered(run_id, summary.state, recorded_state=head.state, recorded=head.header, header=header):
        return None
    record = await MapReduceResumePoint.read(store, run_id, outputs, output_types)
    async with contextlib.AsyncExitStack() as stack:
        reader, is_direct = await open_items(definition)
        stack.push_async_callback(reader.close)
        writer = await open_results(is_direct)
        stack.push_async_exit(writer.detach)
        return await _recorded_end(record, reader, outputs, writer)


async def load_failure(store: RunStore, run_id: str) -> BaseException | None:
    """Return the error of a run that failed because of its tasks; None: the record lacks it."""
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
    return failure_of(ended, (), continues=not fails_on_item(head.header))


async def _recorded_end(
    record: MapReduceResumePoint, reader: ItemReader, outputs: MapReduceOutputs, writer: ItemResultWriter
) -> MapReduceEnd:
    """Return the end of a finished run; its items' results are written again."""
    items, head, recorded = ItemBuffer(reader, record, writer.redaction), record.facts.head, record.facts.items
    is_exhausted = False
    # A run that ended early pulled only some items, and only these are compared.
    while not is_exhausted and (recorded.are_all or items.count < recorded.count):
        wanted = _BATCH if recorded.are_all else min(_BATCH, recorded.count - items.count)
        pulled = await items.pull(wanted)
        for number in range(items.count - pulled.count, items.count):
            index, item = items.index(number), items.pop(number)
            if (refused := pulled.refused.get(number)) is not None:
                writer.write_failure(index, item, refused.error, 0)
            elif (failure := record.failure(0, number)) is not None:
                writer.write_failure(index, item, failure.error, failure.attempts)
            elif outputs.has(0, number):
                writer.write_output(number, index, item, outputs.output(0, number))
        await writer.wait_until_written()  # limits memory: the outputs of a large run do not fit
        is_exhausted = pulled.is_exhausted
    failures = [record.failure(level, number) for level, number in record.failed]
    reason = (head.end and head.end.exit_reason) or ExitReason.COMPLETED
    return MapReduceEnd(
        ending=End(state=RunState.COMPLETED, exit_reason=reason),
        started_at=head.started_at,
        completed_at=head.started_at,
        failures=[failure for failure in failures if failure is not None],
    )
