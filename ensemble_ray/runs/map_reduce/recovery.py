"""The record of a map-reduce that resumes, as its tasks query it.

On a cluster, the process of a task may record its end before the driver's fact of its item is committed: such ends
wait
here for the fact. If the item has no fact at all, the process of the task finds the end, so recorded work is not
repeated. Recorded class names are resolved only among the classes of the current definition.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn, Protocol, cast

from ensemble_ray.definition.fields import ParallelErrorStrategy
from ensemble_ray.definition.map_reduce import MapReduceDefinition, find_output_type
from ensemble_ray.errors import BudgetExhaustedError, EnsembleError, ParallelExecutionError, ValidationError
from ensemble_ray.errors.texts import tasks_failure
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.facts.runs import (
    OWN_FAILURES,
    AgentsJoined,
    FailureRecorded,
    ItemOutputRecorded,
    ItemsRecorded,
    OutputRecorded,
    read_trace,
)
from ensemble_ray.items.pulling import ItemReader, ListReader, Pulled, RefusedItem
from ensemble_ray.plan.map_reduce_factories import input_tokens
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import threads
from ensemble_ray.record.head import read_head
from ensemble_ray.record.identity.map_reduce import DIRECT, FINAL, map_key, position_of, reduce_key
from ensemble_ray.record.map_reduce_fold import (
    MAP_REDUCE_KINDS,
    MapReduceResumeReader,
    RecordedOutcome,
    fails_on_item,
    read_map_reduce,
)
from ensemble_ray.record.rerun import is_answered
from ensemble_ray.record.result import RunEnd, RunResults, error_trace, failures_by_label, task_error
from ensemble_ray.record.resume.reading import RecordedFailures, read_pages
from ensemble_ray.runs.launching import RunConclusion
from ensemble_ray.runs.map_reduce.items import ItemBuffer
from ensemble_ray.runs.map_reduce.outputs import FailureLog, MapReduceEnd, MapReduceFailure, node_type
from ensemble_ray.schedule.instructions import End
from ensemble_ray.schedule.map_reduce_groups import Grouping, MapReduceRules
from ensemble_ray.values.error_data import error_from
from ensemble_ray.values.outputs import ExitReason, RunState
from ensemble_ray.values.task_output import OutputType, join_iterations
from ensemble_ray.values.value import utc_of

if TYPE_CHECKING:
    from ensemble_ray.definition.map_reduce import MapDefinition
    from ensemble_ray.facts.fact import Fact
    from ensemble_ray.facts.runs import PlanRecorded
    from ensemble_ray.items.pulling import ItemEntry
    from ensemble_ray.record.stores import RunStore
    from ensemble_ray.runs.map_reduce.items import ItemResultWriter
    from ensemble_ray.runs.map_reduce.outputs import MapReduceOutputs
    from ensemble_ray.schedule.instructions import FailureReason, ReduceGroup
    from ensemble_ray.schedule.stimuli import Evaluated
    from ensemble_ray.values.outputs import FailedItem
    from ensemble_ray.values.task_output import TaskOutput
    from ensemble_ray.values.trace import TaskTrace


_log = bounded_logger(__name__)


def recorded_failure(key: str, level: int, fact: Fact[FailureRecorded]) -> MapReduceFailure:
    """Return the recorded failure of a task."""
    trace = read_trace(fact)
    return MapReduceFailure(
        key=key,
        level=level,
        at=fact.at if trace is None else trace.completed_at.timestamp(),
        task_description=key if trace is None else trace.task_description,
        agent_role="" if trace is None else trace.agent_role,
        error=error_from(fact.data.error_data),
        attempts=fact.data.attempts,
    )


class MapReduceResumePoint:
    """A recorded map-reduce. Fulfils `RecordedTasks`."""

    def __init__(self, outputs: MapReduceOutputs, output_types: Mapping[str, OutputType] | None = None) -> None:
        """Create an empty record; `output_types` are the definition's, by full name."""
        self._outputs = outputs
        self._output_types = output_types or {}
        #: types of recorded outputs, by full name
        self._found: dict[str, OutputType | None] = {}
        self._failures: RecordedFailures[tuple[int, int]] = RecordedFailures()
        #: ends of unrecorded items, by key
        self._early: dict[str, OutputRecorded | Fact[FailureRecorded]] = {}
        #: recorded ends of tasks of open items with several tasks, by key of the item
        self._inner: dict[str, dict[str, OutputRecorded | Fact[FailureRecorded]]] = {}
        #: which of them are the outputs of their items, while their parts are incomplete
        self._output_facts: dict[str, ItemOutputRecorded] = {}
        self.facts = MapReduceResumeReader(self._keep, self._keep_failure, self._keep_inner, self._keep_item)

    @classmethod
    async def read(
        cls, store: RunStore, run_id: str, outputs: MapReduceOutputs, output_types: Mapping[str, OutputType]
    ) -> MapReduceResumePoint:
        """Read the record of a run, page by page; outputs of its tasks are added to `outputs`.

        Args:
            store: Has the record.
            run_id: The run's id.
            outputs: Receives its outputs.
            output_types: Types of the current definition, by full name; other outputs stay JSON data.

        Raises:
            RecordError: the record is damaged.
        """
        record = cls(outputs, output_types)
        await read_pages(store, run_id, (*MAP_REDUCE_KINDS, AgentsJoined.KIND), record.apply)
        return record

    def apply(self, facts: Sequence[Fact]) -> None:
        """Apply the next facts.

        Raises:
            RecordError: one of them is damaged.
        """
        self.facts.apply(facts)
        for fact in facts:
            if isinstance(fact.data, AgentsJoined):
                self._outputs.keep_recorded_agents(fact.data.summaries())
        if any(isinstance(fact.data, ItemsRecorded) for fact in facts):
            early, self._early = self._early, {}
            for key, end in early.items():
                if isinstance(end, OutputRecorded):
                    self._keep(key, end)
                else:
                    self._keep_failure(key, end)
            for key in [*self._output_facts]:
                self._keep_output(key)

    def _keep(self, key: str, end: OutputRecorded) -> None:
        position = self._position_of(key)
        if position is None:
            self._early[key] = end
            return
        type_of_node = node_type(position[0], is_final=key == FINAL, is_direct=key == DIRECT)
        self._outputs.keep(*position, self._output_of(end), type_of_node)

    def _keep_inner(self, key: str, fact: Fact[OutputRecorded] | Fact[FailureRecorded]) -> None:
        end = fact.data
        kept = end if isinstance(end, OutputRecorded) else cast("Fact[FailureRecorded]", fact)
        self._inner.setdefault(key, {})[fact.name] = kept
        self._keep_output(key)

    def _keep_item(self, key: str, end: ItemOutputRecorded) -> None:
        self._output_facts[key] = end
        self._keep_output(key)

    def _keep_output(self, key: str) -> None:
        """Store the output of an item, once all its parts are known."""
        position, end, inner = self._position_of(key), self._output_facts.get(key), self._inner.get(key, {})
        if position is None or end is None or any(name not in inner for name in end.outputs):
            return
        del self._output_facts[key]
        given = [self._output_of(cast("OutputRecorded", inner[name])) for name in end.outputs]
        output = given[0] if len(given) == 1 else join_iterations(given)
        self._outputs.keep(*position, output, node_type(position[0]), executions=self._executions(key))

    def _executions(self, key: str) -> list[TaskTrace]:
        """Return the traces of an item that has ended, and drop its recorded ends."""
        ends = self._inner.pop(key, {}).values()
        traces = [self._output_of(end).trace if isinstance(end, OutputRecorded) else read_trace(end) for end in ends]
        return [trace for trace in traces if trace is not None]

    def _output_of(self, end: OutputRecorded) -> TaskOutput:
        return typed_output(end.output_data(), self._find_type(end.read().output_type))

    def _find_type(self, name: str) -> OutputType | None:
        if name not in self._found:
            self._found[name] = find_output_type(name, self._output_types)
            if name and self._found[name] is None:
                _log.warning(
                    "Recorded outputs of type %s stay JSON data: no factory of the definition refers to that type. "
                    "Use its class in a factory, or a module-level alias of it",
                    name,
                )
        return self._found[name]

    def _keep_failure(self, key: str, fact: Fact[FailureRecorded]) -> None:
        position = self._position_of(key)
        if position is None:
            self._early[key] = fact
            return
        self._failures.put(position, fact)
        type_of_node = node_type(position[0], is_final=key == FINAL, is_direct=key == DIRECT)
        self._outputs.mark_lost(*position, read_trace(fact), type_of_node, executions=self._executions(key))

    def _position_of(self, key: str) -> tuple[int, int] | None:
        """Return level and number of a key, as the machine has them; None if the record lacks them."""
        if key == DIRECT:
            return 0, 0
        if key == FINAL:
            final = self.facts.groups.final
            return None if final is None else (final.level, final.number)
        position = position_of(key)
        if position is None or position[0]:
            return position
        number = self.facts.items.number(position[1])
        return None if number is None else (0, number)

    def _key(self, level: int, number: int) -> str:
        final = self.facts.groups.final
        if final is not None and (final.level, final.number) == (level, number):
            return FINAL
        return reduce_key(level, number) if level else map_key(self.facts.items.index(number))

    # RecordedTasks.

    @property
    def groups(self) -> Sequence[ReduceGroup]:
        return self.facts.groups

    @property
    def failed(self) -> Iterable[tuple[int, int]]:
        """Tasks that failed at least once; some may have been retried."""
        return self._failures

    def outcome(self, level: int, number: int) -> RecordedOutcome:
        """Return the recorded outcome of a task."""
        return self.facts.outcome(self._key(level, number))

    def failure(self, level: int, number: int) -> MapReduceFailure | None:
        key = self._key(level, number)
        fact = self._failures.get((level, number)) if self.facts.outcome(key) is RecordedOutcome.FAILED else None
        if fact is None:
            return None
        return recorded_failure(key, level, fact)

    def exit_reason(self, level: int, number: int) -> ExitReason | None:
        return self.facts.exits.get(self._key(level, number))

    def occurrence(self, level: int, number: int) -> int:
        if not level and number >= self.facts.items.count:
            return 0
        return int(self.facts.instance(self._key(level, number)).rpartition("#")[2])

    @property
    def verdicts(self) -> Mapping[str, Sequence[Evaluated]]:
        return self.facts.verdicts

    @property
    def knows_all(self) -> bool:
        return self.facts.items.are_all

    def check_items(self, first: int, indices: Sequence[int], digests: Sequence[str]) -> int:
        items = self.facts.items
        compared = max(0, min(len(indices), items.count - first))
        for number in range(compared):
            index, digest = indices[number], digests[number]
            recorded = items.digest(index) if items.index(first + number) == index else None
            if recorded is None or (recorded and digest and recorded != digest):
                raise ValidationError(
                    f"items changed: item {index} is not what it was. Resume with the items that the run began with, or "
                    f"begin a new run{self._order_advice()}"
                )
        if items.are_all and first + len(indices) > items.count:
            self._refuse_count("more")
        return compared

    def check_end(self, count: int) -> None:
        if count < self.facts.items.count:
            self._refuse_count(str(count))

    def _refuse_count(self, found: str) -> NoReturn:
        raise ValidationError(
            f"items changed: the run recorded {self.facts.items.count} items, the source has {found}. Resume with the items "
            f"that the run began with, or begin a new run{self._order_advice()}"
        )

    def _order_advice(self) -> str:
        """Return advice on how to fix the order of an unordered source."""
        if (self.facts.head.header.items or {}).get("kind") != "dataset":
            return ""
        return (
            ". A Ray Dataset keeps the order of its rows only if dataset.context.execution_options.preserve_order "
            "is True, its files are the same, and it is not shuffled"
        )


def conclude(
    ended: MapReduceEnd, task_outputs: MapReduceOutputs, failed_items: Sequence[FailedItem] = (), *, goes_on: bool
) -> RunConclusion:
    """Return the outcome of a run and the outputs of its tasks.

    Args:
        ended: The end of the run.
        task_outputs: The outputs of its tasks.
        failed_items: Items that were left out, if they are collected.
        goes_on: Whether failed tasks are left out; otherwise the first of them is the error.
    """
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
    failure = failure_of(ended, outputs, goes_on=goes_on) if ended.ending.state is RunState.FAILED else None
    return RunConclusion(end=end, results=results, failure=failure, warning=ended.warning)


def list_reasons(ended: MapReduceEnd) -> Sequence[MapReduceFailure]:
    """Return why a run failed: its own error first, if any, then the errors of its tasks."""
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


def failure_of(ended: MapReduceEnd, outputs: Sequence[TaskOutput], *, goes_on: bool) -> BaseException:
    """Return the error of a failed run."""
    if ended.refusal is not None:
        return _first(ended.refusal, outputs)
    if ended.cause is not None:
        return ended.cause
    if ended.ending.failure == "empty":
        return _no_items()
    level = max((failure.level for failure in ended.failures), default=0)
    here = [failure for failure in ended.failures if failure.level == level]
    if ended.ending.failure == "all_maps" or (goes_on and level):
        return _several(here, ended.failed_maps if not level else len(here), outputs)
    return _first(here[0], outputs)


def _several(failures: Sequence[MapReduceFailure], count: int, outputs: Sequence[TaskOutput]) -> ParallelExecutionError:
    """Return an error with all failures of a level, or the first hundred of them."""
    causes = failures_by_label((failure.task_description, failure.error) for failure in failures)
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


#: Tasks in flight per process if they are unlimited (S-MR-140).
_PER_PROCESS = 256
#: With limited capacity, this factor more tasks wait in the processes, so that free capacity need not wait for a
#: message.
_AHEAD = 1.25
#: Items pulled per step until it is known whether all of them fit the budget.
_PROBE = 256


def window_of(definition: MapDefinition, most_processes: int | None) -> int:
    """Return the maximum number of tasks in flight (S-MR-140).

    Args:
        definition: The definition of the run.
        most_processes: Maximum number of processes per kind of agent; None: this process only.
    """
    if definition.max_parallel_tasks is not None:
        return definition.max_parallel_tasks
    processes = 1 if most_processes is None else definition.replicas or most_processes
    if definition.max_concurrency is not None:
        return math.ceil(definition.max_concurrency * processes * _AHEAD)
    return _PER_PROCESS * processes


def rules_of(definition: MapDefinition, *, window: int, is_direct: bool) -> MapReduceRules:
    """Return the rules of the source."""
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
    """Open the items: return the reader of a run's items, and whether all of them form one task (S-MR-81).

    Raises:
        ValidationError: the items are a consumed iterator, or an estimator returned no text.
        Exception: an error of the source or the estimator.
    """
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
    entries: list[ItemEntry] = []
    total, is_exhausted = 0, False
    while not is_exhausted and total <= budget:
        pulled = await reader.next(_PROBE)
        entries.extend(pulled.items)
        is_exhausted = pulled.is_exhausted
        if any(isinstance(entry, RefusedItem) for entry in pulled.items):
            return _Again(entries, reader, is_exhausted=is_exhausted), False  # invalid lines are handled item by item
        items = [entry[1] for entry in pulled.items if not isinstance(entry, RefusedItem)]
        total += await threads.run(_tokens, definition, items)
    if total > budget or not entries:
        return _Again(entries, reader, is_exhausted=is_exhausted), False
    await reader.close()
    return ListReader([[entry[1] for entry in entries if not isinstance(entry, RefusedItem)]]), True


def _tokens(definition: MapReduceDefinition, items: Sequence[object]) -> int:
    return sum(input_tokens(definition, item) for item in items)


class _Again:
    """A reader that first returns entries that were read before."""

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


#: Items compared per step.
_BATCH = 256


class OpenResults(Protocol):
    """Opens the writer of a run's item results, with the run's files."""

    async def __call__(self, *, is_direct: bool) -> ItemResultWriter:
        """Return the writer; the caller closes it."""
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
    """Return the end of the run with this id; None if there is no such run, so that it begins.

    Args:
        store: Has the records.
        run_id: The id.
        definition: The definition of the run.
        header: The first fact that the run would record; None: it has been compared.
        outputs: Receives its outputs.
        output_types: Types of the current definition, by full name.
        open_results: Opens the writer of its item results; missing rows and dead letters are written again.

    Raises:
        RunExistsError: it is running.
        ValidationError: the run did not complete, or its definition or items differ.
        Exception: an error of the source of the items.
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
        writer = await open_results(is_direct=is_direct)
        stack.push_async_exit(writer.detach)
        return await _recorded_end(record, reader, outputs, writer)


async def load_failure(store: RunStore, run_id: str) -> BaseException | None:
    """Return the error of a run that failed because of its tasks, without their outputs; None: the record lacks it.

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
    record: MapReduceResumePoint, reader: ItemReader, outputs: MapReduceOutputs, writer: ItemResultWriter
) -> MapReduceEnd:
    """Return the end of a finished run; results of its items are written again."""
    items, head, recorded = ItemBuffer(reader, record), record.facts.head, record.facts.items
    is_exhausted = False
    # A run that ended early had not pulled all items: only the pulled items are compared.
    while not is_exhausted and (recorded.are_all or items.count < recorded.count):
        wanted = _BATCH if recorded.are_all else min(_BATCH, recorded.count - items.count)
        pulled = await items.pull(wanted)
        for number in range(items.count - pulled.count, items.count):
            index, item = items.index(number), items.pop(number)
            if (failed := _failure(record, number, pulled.refused.get(number))) is not None:
                writer.write_failure(index, item, *failed)
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


def _failure(
    record: MapReduceResumePoint, number: int, refused: RefusedItem | None
) -> tuple[BaseException, int] | None:
    """Return why an item has no output, and its attempts; None if it has an output."""
    if refused is not None:
        return refused.error, 0
    failure = record.failure(0, number)
    return None if failure is None else (failure.error, failure.attempts)
