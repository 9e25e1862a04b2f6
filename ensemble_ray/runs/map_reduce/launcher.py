"""Runs that create their tasks dynamically. This process has the factories, so it coordinates them (S-MR-161)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from msgspec.structs import replace

from ensemble_ray.definition.fields import ParallelErrorStrategy
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition, output_types_of
from ensemble_ray.errors import RecordError, StaleEpochError, ValidationError
from ensemble_ray.events import Event
from ensemble_ray.execute.agent.attempts import RecordedModel
from ensemble_ray.execute.scope import Spending
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded, RecordedError, RunEnded, RunResumed
from ensemble_ray.items.pulling import ItemReader
from ensemble_ray.items.results import DeadLetterFile, ResultsFile, RowColumns
from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.planner import Planned, attached_inputs, text_of
from ensemble_ray.ports import ChatModel, EventSink, Journal, Persistence
from ensemble_ray.process.concurrency import USER_ERRORS, SystemClock
from ensemble_ray.process.context import merge_warnings
from ensemble_ray.record.head import read_head
from ensemble_ray.record.identity.definition import map_reduce_run_data
from ensemble_ray.record.journal import ForgetfulJournal
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.result import RunResultHead, assemble
from ensemble_ray.record.stores import OwnedRun
from ensemble_ray.runs.attachments import read_inputs, store_inputs
from ensemble_ray.runs.coordinator import Coordinator, RunDirectives, RunJournal, as_error
from ensemble_ray.runs.handle import Run
from ensemble_ray.runs.launching import RunConclusion, RunScope, WorkSummary, check_deps_of, request_of
from ensemble_ray.runs.map_reduce.items import ItemBuffer, ItemLog, ItemResultWriter, ItemStream
from ensemble_ray.runs.map_reduce.orders import (
    DefinitionFactories,
    DirectFactory,
    OrderMaker,
    PreparedTask,
    TaskMaker,
    rules_for_tasks,
)
from ensemble_ray.runs.map_reduce.outputs import MapReduceEnd, MapReduceOutputs
from ensemble_ray.runs.map_reduce.recovery import conclude, list_reasons, load_end, open_items, rules_of, window_of
from ensemble_ray.runs.map_reduce.resume_point import MapReduceResumePoint
from ensemble_ray.runs.map_reduce.tasks import MapReduceTasks
from ensemble_ray.runs.ports import ExecutorSession, RunRequest, claim_run, watch_for_cancel
from ensemble_ray.schedule.instructions import End
from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.ids import RUN, new_object_id
from ensemble_ray.values.metrics import NOTHING
from ensemble_ray.values.outputs import EnsembleOutput, ExitReason, RunState
from ensemble_ray.values.reviews import RunDirective
from ensemble_ray.values.task_output import OutputType
from ensemble_ray.values.trace import CaptureMode

if TYPE_CHECKING:
    from ensemble_ray.record.batches import RecordedBatch
    from ensemble_ray.runs.map_reduce.batches import BatchSession


class UnitEvents:
    """Sends events through the run's executor. Fulfils `EventSink`."""

    def __init__(self, events: EventSink) -> None:
        self.wants = events.wants
        self.executor: ExecutorSession

    def emit(self, event: Event) -> None:
        self.executor.emit(event)


_CANCELLED = End(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
_SOURCE_FAILED = End(state=RunState.FAILED, exit_reason=ExitReason.ERROR, failure="source")


class MapReduceLauncher:
    """Launches one map or map-reduce. Fulfils `Launcher`."""

    def __init__(
        self, definition: MapDefinition, inputs: Mapping[str, object] | None = None, *, keeps_items: bool = True
    ) -> None:
        """`keeps_items`: whether results will be read."""
        self.definition = definition
        self._given = {**definition.inputs, **(inputs or {})}
        self._inputs = {str(name): text_of(value) for name, value in self._given.items()}
        self._attached: Mapping[str, Sequence[Attachment]] = {}  # inputs, read when the run is prepared
        self._outputs = MapReduceOutputs(keeps_items=keeps_items)
        self.items = ItemLog(self._outputs, is_read=keeps_items)
        self._coordinator: Coordinator[MapReduceEnd] | None = None
        self._journal: RunJournal | None = None  # None: still unrecorded
        self._opening: asyncio.Task[tuple[ItemReader, bool]] | None = None  # while user code looks at the items
        self._batches: BatchSession | None = None
        self._spending: Spending | None = None
        self._answers: dict[str, list[Fact[ModelAnswered]]] = {}  # by effect name: calls for agents
        self._clock = SystemClock()

    @property
    def has_begun(self) -> bool:
        return self._journal is not None

    async def prepare(self, scope: RunScope) -> WorkSummary | ExitReason:
        check_deps_of(self.definition, scope)
        self._attached = attached_inputs(await read_inputs(self._given))
        if self.definition.delivery is not None and scope.store_address is None:
            raise ValidationError(
                "delivery='batch' needs a record, since answers may arrive after this process has ended. Leave out "
                "durability='off', or leave out delivery"
            )
        if self.definition.is_detached:
            raise ValidationError(
                "review_wait 'detach' is for ensembles with a plan: this definition creates its tasks while it runs, and its "
                "own program handles the gates. Leave out review_wait, and set a review_handler"
            )
        definition, count = self.definition, self.definition.item_source.count
        return WorkSummary(
            workflow=definition.shown_workflow,
            inputs=self._inputs,
            total_tasks=count or 0,
            size=f"{'some' if count is None else count} items",
        )

    def describe(self) -> PlanRecorded:
        definition = self.definition
        items, workflow = definition.item_source.identity, definition.shown_workflow
        return map_reduce_run_data(
            definition, workflow=workflow, inputs=self._inputs, items=items, attached=self._attached
        )

    async def replay(
        self, scope: RunScope, header: PlanRecorded | None, description: RunResultHead
    ) -> EnsembleOutput | None:
        ended = await load_end(
            scope.store,
            scope.run_id,
            self.definition,
            header=header,
            outputs=self._outputs,
            output_types=self._find_output_types(),
            open_results=lambda is_direct: self._open_results(scope, is_direct=is_direct, is_continued=True),
        )
        if ended is None:
            return None
        conclusion = self._conclude(ended)
        description = replace(description, name=(await read_head(scope.store, scope.run_id)).name)
        return assemble(description, conclusion.results, conclusion.end, conclusion.failure)

    async def launch(self, scope: RunScope, header: PlanRecorded, mode: CaptureMode) -> RunConclusion | ExitReason:
        owned, state = None, RunState.FAILED
        if scope.store_address is not None:
            owned = await claim_run(
                store_at(scope.store_address),
                scope.run_id,
                origin=scope.origin,
                durability=self.definition.durability,
                submission=scope.submission,
            )
        try:
            ended = await self._coordinate(scope, owned, header, mode)
            state = ended.ending.state
            conclusion = self._conclude(ended)
            await self._record_end(scope, owned, ended)
        except Exception as error:
            # A broken environment, such as a lost cluster, is no failure of the run.
            if self._journal is not None or isinstance(error, RecordError | StaleEpochError):
                state = RunState.INTERRUPTED
            if self._journal is not None and (self._coordinator is None or self._coordinator.has_ended):
                await self._journal.record_break(error)
            raise
        finally:
            if owned is not None:
                await owned.close(state)
        return conclusion

    async def stop(self) -> None:
        if self._coordinator is not None:
            self._coordinator.cancel()
        elif self._opening is not None:
            self._opening.cancel()

    async def inject(self, directive: RunDirective) -> bool:
        return self._coordinator is not None and await self._coordinator.inject(directive)

    def keep_batches(self) -> None:
        """Leave open batches to the provider when this process's work ends."""
        if self._batches is not None:
            self._batches.keeps_batches = True

    @property
    def batches(self) -> Sequence[RecordedBatch]:
        return () if self._batches is None else tuple(self._batches.batches)

    def close(self) -> None:
        self.items.close()

    def _conclude(self, ended: MapReduceEnd) -> RunConclusion:
        definition = self.definition
        collects = definition.item_policy == "collect"
        continues = definition.parallel_error_strategy is ParallelErrorStrategy.CONTINUE_ON_ERROR
        return conclude(ended, self._outputs, self.items.failed_items if collects else (), continues=continues)

    def _find_output_types(self) -> Mapping[str, OutputType]:
        """Return the types that factories can declare, by full name."""
        definition = self.definition
        reduced = definition if isinstance(definition, MapReduceDefinition) else None
        reducing = () if reduced is None else (reduced.reduce_task, reduced.direct_task)
        return output_types_of((definition.map_task, *reducing))

    async def _coordinate(
        self, scope: RunScope, owned: OwnedRun | None, header: PlanRecorded, mode: CaptureMode
    ) -> MapReduceEnd:
        run_id = scope.run_id
        record = None
        if scope.resumption is not None:
            record = await MapReduceResumePoint.read(scope.store, run_id, self._outputs, self._find_output_types())
            record.facts.drop_failures()
            self._answers = record.facts.answers
        journal = ForgetfulJournal(run_id) if owned is None else owned.journal
        epoch, now = 0 if owned is None else owned.epoch, self._clock.now()
        data = replace(header, started_at=now) if record is None else RunResumed.of(header, is_restart=False)
        first = Fact(run=run_id, name=RUN, at=now, data=data, epoch=epoch)
        await journal.append((first,), epoch=epoch, until=Persistence.COMMITTED)
        if self._attached:
            self._attached = await store_inputs(self._attached, journal)
        self._journal = run_journal = RunJournal(run_id=run_id, epoch=epoch, journal=journal, clock=self._clock)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(merge_warnings(run_id))
            try:
                found = await self._open_items(scope)
            except USER_ERRORS as error:
                return self._end_before_tasks(now, _SOURCE_FAILED, error)
            if found is None:
                return self._end_before_tasks(now, _CANCELLED)
            reader, is_direct = found
            stack.push_async_callback(reader.close)
            results = await self._open_results(scope, is_direct=is_direct, is_continued=record is not None)
            stack.push_async_exit(results.detach)
            self._events = UnitEvents(scope.events)
            tasks = self._make_tasks(
                scope, run_journal, ItemBuffer(reader, record), results, record, is_direct=is_direct
            )
            coordinator = Coordinator(run_journal, tasks)
            results.on_error = coordinator.break_off
            request = self._request(scope, mode)
            batches = self._make_batches(run_journal, tasks, request, coordinator, record)
            try:
                executor = await self._open_executor(scope, request, journal, coordinator, batches)
            except asyncio.CancelledError:
                if not scope.cancelled.is_set():
                    raise
                return self._end_before_tasks(now, _CANCELLED)
            stack.push_async_callback(executor.close)
            rules = rules_of(self.definition, window=self.items.window, is_direct=is_direct)
            executor.failed.add_done_callback(coordinator.break_off_with)
            self._coordinator = coordinator
            scope.begun.set()
            if owned is not None:

                async def cancel() -> None:
                    scope.cancelled.set()
                    await self.stop()

                watching = asyncio.get_running_loop().create_task(watch_for_cancel(owned, run_id, cancel))
                stack.callback(watching.cancel)
            if scope.cancelled.is_set():
                coordinator.cancel()
            groups = () if record is None else record.groups
            return await coordinator.run(MapReduceMachine(rules, tasks.orders.instance, groups), executor)

    def _make_batches(
        self,
        journal: RunJournal,
        tasks: MapReduceTasks,
        request: RunRequest,
        coordinator: Coordinator[MapReduceEnd],
        record: MapReduceResumePoint | None,
    ) -> BatchSession | None:
        """Return None if no request is or was delivered in a batch."""
        delivery, recorded = self.definition.delivery, None if record is None else record.batches
        if delivery is None and not recorded:
            return None
        from ensemble_ray.runs.map_reduce.batches import BatchSession  # few runs have batches

        deliver, break_off = coordinator.deliver, coordinator.break_off
        self._batches = BatchSession(
            delivery, journal, tasks, request, deliver=deliver, break_off=break_off, recorded=recorded
        )
        return self._batches

    async def _open_executor(
        self,
        scope: RunScope,
        request: RunRequest,
        journal: Journal,
        coordinator: Coordinator[MapReduceEnd],
        batches: BatchSession | None,
    ) -> ExecutorSession:
        deliver = coordinator.deliver if batches is None else batches.deliver
        executor: ExecutorSession = await scope.runtime.open_session(request, journal=journal, deliver=deliver)
        window = window_of(self.definition, executor.most_processes)
        if batches is not None:
            window = batches.open(executor, limit=window)
            executor = batches
        self._events.executor = executor
        self._spending = executor.spending
        self.items.window = window
        return executor

    def _end_before_tasks(self, started_at: float, ending: End, cause: BaseException | None = None) -> MapReduceEnd:
        return MapReduceEnd(ending=ending, started_at=started_at, completed_at=self._clock.now(), cause=cause)

    async def _open_items(self, scope: RunScope) -> tuple[ItemReader, bool] | None:
        """Return the items, and whether they form one task; None if the run was cancelled."""
        self._opening = asyncio.get_running_loop().create_task(open_items(self.definition))
        if scope.cancelled.is_set():
            self._opening.cancel()
        await asyncio.wait([self._opening])
        if self._opening.cancelled():
            if scope.cancelled.is_set():
                return None
            raise as_error(asyncio.CancelledError())
        if (error := self._opening.exception()) is not None:
            raise as_error(error)
        return self._opening.result()

    async def _open_results(self, scope: RunScope, *, is_direct: bool, is_continued: bool) -> ItemResultWriter:
        """Open the files; a resumed run has written to them before."""
        if is_direct:
            return ItemResultWriter(self.items, is_direct=True)
        definition = self.definition
        letters = results = None
        if definition.results is not None:
            columns = RowColumns(chosen=definition.columns, key=definition.key)
            results = await ResultsFile.open(definition.results, is_resumed=is_continued, columns=columns)
        if definition.dead_letters is not None:
            letters = await DeadLetterFile.open(definition.dead_letters, run_id=scope.run_id, is_resumed=is_continued)
        return ItemResultWriter(self.items, results=results, dead_letters=letters)

    def _make_tasks(
        self,
        scope: RunScope,
        journal: RunJournal,
        items: ItemBuffer,
        results: ItemResultWriter,
        record: MapReduceResumePoint | None,
        *,
        is_direct: bool,
    ) -> MapReduceTasks:
        def record_calls(name: str, model: ChatModel, note: Callable[[Fact], None]) -> ChatModel:
            recorded = self._answers.get(name, ())

            def store(fact: Fact) -> None:
                note(fact)
                if self.definition.delivery is not None:  # a map of a batch is made twice
                    self._answers.setdefault(name, []).append(cast("Fact[ModelAnswered]", fact))

            return RecordedModel(model, scope.run_id, name, store, recorded=tuple(recorded), spending=self._spending)

        definition = self.definition
        check: Callable[[PreparedTask], None] | None = None
        if definition.delivery is not None and not is_direct:
            from ensemble_ray.runs.map_reduce.batches import check_batched

            check = check_batched
        orders = OrderMaker(
            journal,
            factories=(DirectFactory if is_direct else DefinitionFactories)(definition),
            maker=TaskMaker(definition, self._inputs, attached=self._attached, recorded=record_calls),
            items=items,
            directives=RunDirectives(journal, () if record is None else record.facts.directives),
            store=self._outputs,
            record=record,
            item_count=definition.item_source.count,
            is_direct=is_direct,
        )
        return MapReduceTasks(
            journal,
            items=items,
            orders=orders,
            store=self._outputs,
            results=results,
            definition=definition,
            events=self._events,
            record=record,
            check=check,
        )

    def _request(self, scope: RunScope, mode: CaptureMode) -> RunRequest:
        definition, resumption = self.definition, scope.resumption
        planned = Planned(plan=Plan(workflow=definition.shown_workflow, nodes=()), tasks={}, agents={})
        request = request_of(scope, rules_for_tasks(definition), planned, capture_mode=mode, inputs=self._inputs)
        context = request.context
        if context.budget is None:
            return request
        # Each owner of the run has its own account with earlier spending (S-BUD-6, S-BUD-7).
        spent = NOTHING if resumption is None else resumption.spent
        account = f"{scope.run_id}/{new_object_id()}"
        budget = replace(context.budget, spent=spent, account=account)
        return replace(request, context=replace(context, budget=budget))

    async def _record_end(self, scope: RunScope, owned: OwnedRun | None, ended: MapReduceEnd) -> None:
        if owned is None:
            return
        ending = ended.ending
        data = RunEnded(
            state=ending.state,
            exit_reason=ending.exit_reason,
            failure=ending.failure,
            errors=[RecordedError.of(each.error, key=each.key) for each in list_reasons(ended)],
            incomplete_answers=self._outputs.metrics.total_incomplete_answers,
        )
        last = Fact(run=scope.run_id, name=RUN, at=ended.completed_at, data=data, epoch=owned.epoch)
        await owned.journal.append((last,), epoch=owned.epoch, until=Persistence.COMMITTED)


class MapReduceRun(Run):
    """A started run over items. `result()` returns its output, `items()` its results item by item."""

    @property
    def _items(self) -> ItemLog:
        return cast("MapReduceLauncher", self._launcher).items

    @property
    def batches(self) -> Sequence[RecordedBatch]:
        """Batches of the run so far, with `delivery="batch"`: their states, and how many of their requests are answered."""
        return cast("MapReduceLauncher", self._launcher).batches

    def detach(self) -> None:
        """End the work of this process as `cancel` does, and leave open batches to the provider: `resume` reads them."""
        cast("MapReduceLauncher", self._launcher).keep_batches()
        self.cancel()

    @property
    def failed_count(self) -> int:
        """Number of items that have failed so far, even if failures are not collected."""
        return self._items.failed_count

    @property
    def completed_count(self) -> int:
        """Number of items with an output so far."""
        return self._items.completed_count

    def items(self) -> ItemStream:
        """Return the results of items in order of arrival, past ones first."""
        return self._items.stream()
