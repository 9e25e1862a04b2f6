"""The tasks of a map-reduce, in the process with the user's factories: items, orders, results.

A group is recorded before its reduce begins (S-MR-161). An error of a source, a factory or an estimator ends the run
unchanged (S-MR-106, S-MR-123), which then does not wait for user code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn

from ensemble_ray.definition.map_reduce import MapDefinition
from ensemble_ray.errors import BudgetExhaustedError, RecordError, StaleEpochError, ValidationError
from ensemble_ray.errors.texts import brief, message_of
from ensemble_ray.errors.travel import is_refusal
from ensemble_ray.execute.orders import TaskOrder, TaskResult
from ensemble_ray.execute.redaction import clean_error
from ensemble_ray.execute.scope import describe_exhaustion
from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.facts.runs import ExitRecorded, ItemOutputRecorded, ItemsRecorded
from ensemble_ray.ports import EventSink
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.identity.definition import map_key
from ensemble_ray.runs.coordinator import InitialStep, RunBackgroundTasks, RunJournal, TaskReporter, as_error
from ensemble_ray.runs.map_reduce.item_loops import ItemLoops, LoopEnd
from ensemble_ray.runs.map_reduce.items import ItemBuffer, ItemResultWriter
from ensemble_ray.runs.map_reduce.orders import (
    FailedMap,
    OrderMaker,
    PreparedLoop,
    PreparedOrder,
    PreparedTask,
    TokenCounts,
)
from ensemble_ray.runs.map_reduce.outputs import (
    FailureLog,
    MapReduceEnd,
    MapReduceFailure,
    MapReduceOutputs,
    failure_of,
    node_type,
)
from ensemble_ray.runs.map_reduce.resume_point import MapReduceResumePoint
from ensemble_ray.schedule.instructions import (
    CountTokens,
    End,
    Inform,
    IterationEnded,
    MapItem,
    Position,
    PullItems,
    Question,
    ReduceGroup,
    Start,
    StepEnded,
    Warn,
    WarnLeftOut,
    WarnOversized,
)
from ensemble_ray.schedule.machine import Source
from ensemble_ray.schedule.stimuli import Begun, Cancelled, Completed, Evaluated, Exited, Failed, ItemsPulled, Stimulus
from ensemble_ray.values.ids import RUN, key_of
from ensemble_ray.values.outputs import ExitReason
from ensemble_ray.values.task_output import TaskOutput

_log = bounded_logger(__name__)
_BATCH = 64  # factories per batch: this many tasks wait for the slowest call


class MapReduceTasks:
    def __init__(
        self,
        journal: RunJournal,
        *,
        items: ItemBuffer,
        orders: OrderMaker,
        store: MapReduceOutputs,
        results: ItemResultWriter,
        definition: MapDefinition,
        events: EventSink | None = None,
        record: MapReduceResumePoint | None = None,
        check: Callable[[PreparedTask], None] | None = None,
    ) -> None:
        """`events` receives those of iterations; `record` is of a resumed run; `check` refuses maps."""
        self._journal = journal
        self._items = items
        self.orders = orders
        self._store = store
        self._results = results
        self._record = record
        self.depends_on_order = False  # its groups are recorded
        self.directives = orders.directives
        self._reporter: TaskReporter
        self._started_at = journal.now()
        self._in_flight: dict[str, PreparedOrder] = {}  # submitted to an executor, by instance
        self._discarded: set[str] = set()  # stopped before they were submitted
        self._uncounted: dict[str, TaskOutput] = {}  # wait for the user's token estimator
        self._token_counts = TokenCounts(definition)
        self._background: RunBackgroundTasks
        self._failures = FailureLog()
        self._cause: BaseException | None = None
        self._spent: BudgetExhaustedError | None = None
        self._refusal: MapReduceFailure | None = None
        self._why: dict[str, str] = {}
        verdicts = {} if record is None else record.verdicts
        self._loops = ItemLoops(journal, orders, events, verdicts)
        self._unrecorded: dict[str, Sequence[FactData]] = {}  # ends of items with several tasks
        self._check = check
        self._deferred: dict[str, int] = {}  # maps without their orders, and the numbers of their items
        self._settled = 0  # items with an order, a recorded end or a refusal
        self._has_all = False  # whether the source is exhausted

    async def open(self, source: Source, reporter: TaskReporter) -> InitialStep:
        del source  # it handles recorded tasks like others
        self._reporter = reporter
        self._background = RunBackgroundTasks(reporter.break_off)
        self._loops.open(reporter, self._finish_loop)
        self._started_at = self._journal.now()
        return InitialStep(stimuli=[Begun(at=self._started_at)])

    def encode(self, stimuli: Sequence[Stimulus]) -> Sequence[Fact]:
        """Return the ends of loops; other stimuli follow from other facts."""
        return [
            self._journal.fact(each.instance, data, each.at)
            for each in stimuli
            if isinstance(each, Completed | Failed | Exited)
            for data in self._unrecorded.pop(each.instance, ())
        ]

    async def close(self, ending: End) -> MapReduceEnd:
        return MapReduceEnd(
            ending=ending,
            started_at=self._started_at,
            completed_at=self._journal.now(),
            failures=self._failures.first,
            failed_maps=self._failures.failed_maps,
            cause=self._cause,
            refusal=self._refusal,
            warning="" if self._spent is None else describe_exhaustion((self._spent,)),
        )

    def detach(self) -> None:
        self._background.detach()
        self._loops.detach()

    def log(self, what: Inform | Warn | WarnLeftOut | WarnOversized) -> None:
        match what:
            case Inform():
                _log.info("%s", what.text)
            case Warn():
                _log.warning("%s", what.text)
            case WarnLeftOut():
                key, reason = key_of(what.instance), self._why.pop(what.instance, "")
                _log.warning("Run %s: %s failed and is left out%s", self._journal.run_id, key, reason)
            case _:
                role, key = self._store.output(*what.output).agent_role, self.orders.key(*what.output)
                _log.warning(
                    "An output of '%s' (%s) has %d tokens, more than the budget of %d: it has a group of its own",
                    role, key, what.tokens, what.budget_tokens,
                )  # fmt: skip

    def announce(self, what: IterationEnded | StepEnded) -> NoReturn:
        """Refuse: no unit of a map-reduce has iterations or steps."""
        raise TypeError(f"a map-reduce announces no {what}")

    def evaluate(self, question: Question) -> None:
        self._background.start(self._answer(question))

    async def _answer(self, question: Question) -> None:
        answer: ItemsPulled | int | None = None
        try:
            match question:
                case PullItems():
                    answer = await self._pull(question.count)
                case CountTokens():
                    answer = await self._token_counts.ask(self._uncounted.pop(question.instance))
                case _:
                    raise TypeError(f"no source of a map-reduce asks {question}")  # noqa: TRY301  a defect of ours
        except (RecordError, StaleEpochError):
            raise
        except BaseException as error:
            if self._background.is_left:
                raise
            self._cause = self._cause or as_error(error)
        self._reporter.notify(Evaluated(at=self._journal.now(), question=question, answer=answer))

    async def _pull(self, count: int) -> ItemsPulled:
        slots = await self._results.free_slots(lambda: self._items.in_flight)
        batch = await self._items.pull(min(count, slots))
        self._has_all, self._settled = batch.is_exhausted, self._settled + len(batch.refused)
        now = self._journal.now()
        if batch.has_unrecorded:
            data = ItemsRecorded.of(batch.indices, batch.digests, are_all=batch.is_exhausted)
            await self._journal.append(self._journal.fact(RUN, data, now))
        for number, entry in batch.refused.items():
            self._lose_item(number, entry.text, entry.error, now)
        return ItemsPulled(count=batch.count, is_exhausted=batch.is_exhausted, refused=tuple(batch.refused))

    def _lose_item(self, number: int, about: str, error: BaseException, now: float) -> None:
        """Fail a map whose line is invalid (S-MR-125) or whose factory raised (S-MR-154)."""
        if (redaction := self._journal.redaction) is not None:
            about, error = redaction.clean(about), clean_error(redaction, error)
        self._failures.add(
            MapReduceFailure(key=map_key(number), level=0, at=now, task_description=about, agent_role="", error=error)
        )
        self._note_failed_item(number, error, attempts=0)

    def look_up(self, start: Start) -> Sequence[Stimulus]:
        record = self._record
        if record is None:
            return ()
        level, number = position = _position_of(start)
        if self._store.has(level, number):
            output = self._store.output(level, number)
            if not level:
                self._results.write_output(number, self._items.index(number), self._items.shown(number), output)
                self._settled += 1
            is_final = isinstance(start.changes, ReduceGroup) and start.changes.is_final
            left = record.exit_reason(level, number)
            return (self._complete(start.instance, position, output, is_final=is_final, exit_reason=left),)
        if (failure := record.failure(level, number)) is None:
            return ()
        self._failures.add(failure)
        if not level:
            self._settled += 1
            self._note_failed_item(number, failure.error, attempts=failure.attempts)
        return (Failed(at=self._journal.now(), instance=start.instance),)

    def make(self, starts: Sequence[Start]) -> None:
        maps: list[Start] = []
        for start in starts:
            if isinstance(start.changes, ReduceGroup):
                making = self.orders.reduce(start.changes, start.instance, self._is_discarded)
                self._background.start(self._make([start], making))
            else:
                maps.append(start)
        for first in range(0, len(maps), _BATCH):
            self._background.start(self._make_maps(maps[first : first + _BATCH]))

    async def _make_maps(self, starts: Sequence[Start]) -> None:
        numbers = {start.instance: _position_of(start)[1] for start in starts}
        await self._make(starts, self.orders.maps(numbers, self._is_discarded))
        self._settled += len(starts)

    @property
    def are_all_made(self) -> bool:
        """Whether the source is exhausted, and each of its items has its order."""
        return self._has_all and self._settled >= self._items.count

    def defer(self, instance: str) -> None:
        """Drop the order of a map, which `make_again` creates once more."""
        if (prepared := self._in_flight.pop(instance, None)) is not None:
            self._deferred[instance] = prepared.number

    async def make_again(self, instances: Sequence[str]) -> None:
        """Create and submit the orders of deferred maps."""
        numbers = {each: self._deferred[each] for each in instances if each in self._deferred}
        starts = [Start(instance=each, changes=MapItem(number=number)) for each, number in numbers.items()]
        await self._make(starts, self.orders.maps(numbers, self._is_discarded))

    async def _make(self, starts: Sequence[Start], making: Awaitable[list[PreparedTask]]) -> None:
        """Create and submit orders; report failures, since no executor will."""
        try:
            results = await making
            if self._check is not None:
                for each in results:
                    self._check(each)
            self._submit(results)
        except (RecordError, StaleEpochError):
            raise
        except BudgetExhaustedError as spent:  # creating agents calls a model, too
            self._spent = self._spent or spent
            now, reason = self._journal.now(), ExitReason.BUDGET_EXHAUSTED
            self._reporter.notify(*(Exited(at=now, instance=start.instance, reason=reason) for start in starts))
        except BaseException as error:
            if self._background.is_left:
                raise
            self._cause = self._cause or as_error(error)
            now = self._journal.now()
            self._reporter.notify(*(Failed(at=now, instance=start.instance, ends_run=True) for start in starts))

    def _submit(self, results: Sequence[PreparedTask]) -> None:
        orders: list[TaskOrder] = []
        for prepared in results:
            if self._is_discarded(prepared.instance):
                continue
            self._deferred.pop(prepared.instance, None)
            if isinstance(prepared, FailedMap):
                now = self._journal.now()
                self._why[prepared.instance] = f": {brief(message_of(prepared.error))}"
                about = f"Item {self._items.index(prepared.number)}"
                self._lose_item(prepared.number, about, prepared.error, now)
                self._reporter.notify(Failed(at=now, instance=prepared.instance))
            elif isinstance(prepared, PreparedLoop):
                self._loops.begin(prepared)
            else:
                self._in_flight[prepared.instance] = prepared
                orders.append(prepared.order)
        if orders:
            self._reporter.submit(orders)

    def discard(self, instance: str) -> bool:
        """A loop reports its end itself."""
        if self._loops.stop(instance):
            return True
        self._discarded.add(instance)
        return False

    def _is_discarded(self, instance: str) -> bool:
        return instance in self._discarded

    def accept(self, result: TaskResult) -> Sequence[Stimulus]:
        if self._loops.owns(result.instance):
            if result.status == "failed" and isinstance(result.error, RecordError | StaleEpochError):
                raise result.error
            if result.status == "exited" and isinstance(result.error, BudgetExhaustedError):
                self._spent = self._spent or result.error
            self._loops.accept(result)
            return ()
        if (deferred := self._deferred.pop(result.instance, None)) is not None:  # stopped while it waits
            self._discarded.add(result.instance)
            self._store.mark_lost(0, deferred, None, node_type(0), item=self._items.pop(deferred))
            return (Cancelled(at=result.at, instance=result.instance),)
        prepared = self._in_flight.pop(result.instance)
        level, number, error = prepared.level, prepared.number, result.error
        store, item = self._store, None if level else self._items.shown(number)
        has_left = result.status == "exited"  # has an output if a gate after it ended the run (S-REV-32)
        if result.output is not None and (has_left or result.status == "completed"):
            output = store.keep(level, number, result.output, prepared.unit_type, item=item, packed=result.packed)
            if not level:
                self._results.write_output(number, self._items.index(number), item, output)
            is_final, left = prepared.unit_type == "final-reduce", result.exit_reason if has_left else None
            return (self._complete(result.instance, (level, number), output, is_final=is_final, exit_reason=left),)
        store.mark_lost(level, number, result.trace, prepared.unit_type, item=item)
        stimulus = self._lose(prepared, result, error)
        if not level:
            self._items.pop(number)
        return (stimulus,)

    def _finish_loop(self, end: LoopEnd) -> Stimulus:
        """Store the output of an item's loop; return the stimulus for the source."""
        prepared, store, items = end.prepared, self._store, self._items
        instance, number, item = prepared.instance, prepared.number, items.item(prepared.number)
        if end.output is not None:
            left = () if end.exit_reason is None else (ExitRecorded(reason=end.exit_reason),)
            self._unrecorded[instance] = (ItemOutputRecorded(outputs=end.source_instances), *left)
            output = store.keep(0, number, end.output, prepared.unit_type, item=item, executions=end.traces)
            self._results.write_output(number, items.index(number), item, output)
            return self._complete(instance, (0, number), output, is_final=False, exit_reason=end.exit_reason)
        store.mark_lost(0, number, None, prepared.unit_type, item=item, executions=end.traces)
        if end.error is not None:
            return self._fail_loop(end, end.error)
        items.pop(number)
        if end.exit_reason is None:
            return Cancelled(at=end.at, instance=instance)
        self._unrecorded[instance] = (ExitRecorded(reason=end.exit_reason),)
        return Exited(at=end.at, instance=instance, reason=end.exit_reason)

    def _fail_loop(self, end: LoopEnd, error: BaseException) -> Failed:
        instance, number = end.prepared.instance, end.prepared.number
        order, failure = end.failed, end.failure(error)
        self._unrecorded[instance] = (end.failure_fact(error),)
        if order is not None and order.task.handler is None and is_refusal(error):
            self._refusal = self._refusal or failure
        elif isinstance(error, ValidationError):
            self._cause = self._cause or error
        else:
            self._why[instance] = f": {brief(message_of(error))}"
            self._failures.add(failure)
            self._note_failed_item(number, error, attempts=end.attempts)
            return Failed(at=end.at, instance=instance)
        self._items.pop(number)
        return Failed(at=end.at, instance=instance, ends_run=True)

    def _complete(
        self, instance: str, position: Position, output: TaskOutput, *, is_final: bool, exit_reason: ExitReason | None
    ) -> Completed | Exited:
        if not position[0]:
            self._items.pop(position[1])
        if exit_reason is not None:
            return Exited(at=output.completed_at.timestamp(), instance=instance, reason=exit_reason, has_output=True)
        tokens = 0 if is_final else self._token_counts.count(output)  # a final output is never grouped
        if tokens is None:
            self._uncounted[instance] = output
        return Completed(at=output.completed_at.timestamp(), instance=instance, output_tokens=tokens)

    def _lose(self, prepared: PreparedOrder, result: TaskResult, error: BaseException | None) -> Stimulus:
        instance = prepared.instance
        match result.status:
            case "failed" if isinstance(error, RecordError | StaleEpochError):
                raise error
            case "failed" if error is not None and is_refusal(error) and prepared.order.task.handler is None:
                self._refusal = self._refusal or failure_of(prepared.level, prepared.order, result, error)
                return Failed(at=result.at, instance=instance, ends_run=True)
            case "failed" if isinstance(error, ValidationError):
                self._cause = self._cause or error  # the factory returned an invalid task (S-SET-38)
                return Failed(at=result.at, instance=instance, ends_run=True)
            case "failed":
                failure = failure_of(
                    prepared.level, prepared.order, result, error or RuntimeError("task failed without an error")
                )
                self._why[instance] = f": {brief(message_of(failure.error))}"
                self._failures.add(failure)
                if not prepared.level:
                    self._note_failed_item(prepared.number, failure.error, attempts=result.attempts)
                return Failed(at=result.at, instance=instance)
            case "exited":
                self._spent = self._spent or (error if isinstance(error, BudgetExhaustedError) else None)
                return Exited(at=result.at, instance=instance, reason=result.exit_reason)
            case _:
                return Cancelled(at=result.at, instance=instance)

    def _note_failed_item(self, number: int, error: BaseException, *, attempts: int) -> None:
        self._results.write_failure(self._items.index(number), self._items.pop(number), error, attempts)


def _position_of(start: Start) -> Position:
    match start.changes:
        case MapItem():
            return 0, start.changes.number
        case ReduceGroup():
            return start.changes.level, start.changes.number
        case _:
            raise TypeError(f"{start} says neither of which item nor of which group")
