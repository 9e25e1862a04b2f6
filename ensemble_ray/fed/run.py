"""MapReduceRun: one fed run, seen from its caller. Room: fed.

In: a definition, and what is chosen for one run. Out: the handle of `RunLife`, with results of items as they come. The run
is owned by this process on every runtime, since its source and its factories are here (S-MR-161).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.definition.durability import Durability
from ensemble_ray.definition.map_reduce import MapDefinition, MapReduceDefinition
from ensemble_ray.definition.origin import Origin
from ensemble_ray.definition.workflow import ParallelErrorStrategy
from ensemble_ray.errors import RecordError, StaleEpochError, message_of
from ensemble_ray.events import EnsembleStartedEvent
from ensemble_ray.execute.kinds import Kinds
from ensemble_ray.execute.recorded_model import RecordedModel
from ensemble_ray.facts.effects import ModelAnswered
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded, RecordedError, RunEnded, RunResumed
from ensemble_ray.fed.bodies import FedBodies
from ensemble_ray.fed.conductor import FedParts, MapReduceConductor
from ensemble_ray.fed.factories import DefinitionFactories, DirectFactory
from ensemble_ray.fed.feeding import opened, rules_for_tasks, rules_of, window_of
from ensemble_ray.fed.finished import finished
from ensemble_ray.fed.intake import Intake
from ensemble_ray.fed.item_log import ItemLog, ItemStream
from ensemble_ray.fed.jobs import as_error
from ensemble_ray.fed.making import Envelope, OrderMaker
from ensemble_ray.fed.ports import FedEnded
from ensemble_ray.fed.recovery import RecoveredRun
from ensemble_ray.fed.result import FedFrame, assemble_fed
from ensemble_ray.fed.tasks import TaskMaker
from ensemble_ray.fed.watch import RunWatch
from ensemble_ray.fed.weights import Weights
from ensemble_ray.ids import RUN, new_object_id, new_run_id
from ensemble_ray.inline import SystemClock, own_run, watch_for_cancel
from ensemble_ray.items.dead_letters import DeadLetterFile
from ensemble_ray.items.results import ResultsFile
from ensemble_ray.limits.budget import NOTHING, RunBudget
from ensemble_ray.outputs import EnsembleOutput, ExitReason, RunState
from ensemble_ray.plan.plan import Plan
from ensemble_ray.plan.planner import Planned, text_of
from ensemble_ray.ports import Until
from ensemble_ray.record.environment import effective_capture_mode
from ensemble_ray.record.identity.map_reduce import map_reduce_run_data
from ensemble_ray.record.journal import ForgetfulJournal
from ensemble_ray.record.rerun import check_same
from ensemble_ray.record.stores import store_at
from ensemble_ray.run_frame import frame_of
from ensemble_ray.run_life import RunLife
from ensemble_ray.runtime import FeedRequest
from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.schedule.map_reduce_words import EndFed
from ensemble_ray.tools.tool import NoOpToolMetrics

if TYPE_CHECKING:
    from ensemble_ray.definition.run_rules import RunOptions
    from ensemble_ray.execute.spending import Spending
    from ensemble_ray.items.pulling import ItemReader
    from ensemble_ray.ports import ChatModel, Journal
    from ensemble_ray.record.stores import OwnedRun
    from ensemble_ray.run_handle import Resumption
    from ensemble_ray.runtime import Runtime
    from ensemble_ray.trace import CaptureMode

__all__ = ["MapReduceRun"]

_log = bounded_logger(__name__)


class MapReduceRun(RunLife):
    """A fed run that was started. Results come with `result()`, or item by item with `items()`."""

    def __init__(
        self,
        definition: MapDefinition,
        inputs: Mapping[str, object] | None = None,
        *,
        runtime: Runtime | str | None = None,
        run_id: str | None = None,
        options: RunOptions | None = None,
        is_watched: bool = True,
        is_heard: bool = True,
        origin: Origin | None = None,
        resumption: Resumption | None = None,
    ) -> None:
        """Begin, or go on; `is_watched` says whether `items()` or `events()` will be asked, `is_heard` that `events()` may."""
        chosen = definition.with_options(options)
        super().__init__(chosen, run_id=run_id or new_run_id(), runtime=runtime, is_watched=is_watched and is_heard)
        self._definition = chosen
        self._inputs = {str(name): text_of(value) for name, value in {**chosen.inputs, **(inputs or {})}.items()}
        self._options = options
        self._origin = origin or Origin()
        self._resumption = resumption
        self._is_named = run_id is not None
        self._bodies = FedBodies(keeps_items=is_watched)
        self._items = ItemLog(self._bodies, is_read=is_watched)
        self._conductor: MapReduceConductor | None = None
        #: while the items are opened: whether all of them fit one task is asked of user code
        self._opening: asyncio.Task[tuple[ItemReader, bool]] | None = None
        self._budget = RunBudget.of(chosen.max_tokens, chosen.max_cost)
        self._spending: Spending | None = None
        self._answers: Mapping[str, Sequence[Fact[ModelAnswered]]] = {}
        self._clock = SystemClock()
        self._begin()

    @property
    def recorded_tasks(self) -> int:
        """How many tasks had recorded outputs when the run went on; none when it begins."""
        return 0 if self._resumption is None else self._resumption.recorded_tasks

    @property
    def recorded_items(self) -> int:
        """How many of them are of items."""
        return 0 if self._resumption is None else self._resumption.recorded_items

    @property
    def failed_count(self) -> int:
        """How many items have failed until now, also where nobody collects them."""
        return self._items.failed_count

    def items(self) -> ItemStream:
        """What came of each item, in the order in which it came, the past ones first (S-MR-131)."""
        return self._items.stream()

    @property
    def _has_begun(self) -> bool:
        return self._conductor is not None or self._resumption is not None

    async def _stop(self) -> None:
        if self._conductor is not None:
            self._conductor.cancel()
        elif self._opening is not None:
            self._opening.cancel()

    # On the library's loop.

    async def _run(self) -> EnsembleOutput:
        try:
            return await self._done()
        finally:
            self._items.close()

    async def _done(self) -> EnsembleOutput:
        definition = self._definition
        mode = effective_capture_mode(definition.capture_mode)
        header = self._header(mode)
        if self._resumption is not None and not self._resumption.allows_changes:
            check_same(self.id, self._resumption.header, header, doing="resume")
        count = definition.item_source.count
        _log.info("Run started: workflow %s, %s items", definition.shown_workflow, "some" if count is None else count)
        self.emit(
            EnsembleStartedEvent(
                run_id=self.id, ensemble_id=self.id, workflow=definition.shown_workflow, total_tasks=count or 0
            )
        )
        self._state = RunState.RUNNING
        if (recorded := await self._recorded_end(header)) is not None:
            self._state, self._is_replayed = RunState.COMPLETED, True
            return self._assembled(recorded, mode)
        owned = await self._owned()
        state = RunState.FAILED
        try:
            ended = await self._conducted(owned, header, mode)
            state = ended.ending.state
            await self._note_end(owned, ended)
        except Exception as error:
            # What breaks around a run, such as its cluster, is no failure of it: it can be gone on with.
            if self._conductor is not None or isinstance(error, RecordError | StaleEpochError):
                state = RunState.INTERRUPTED
            raise
        finally:
            if owned is not None:
                await owned.close(state)
        self._state = state
        if ended.warning:
            _log.warning("%s", ended.warning)
        output = self._assembled(ended, mode)
        await self._finish(output, mode)
        return output

    def _assembled(self, ended: FedEnded, mode: CaptureMode) -> EnsembleOutput:
        """The output of the run, or its error."""
        definition = self._definition
        frame = FedFrame(
            run_id=self.id,
            workflow=definition.shown_workflow,
            inputs=self._inputs,
            capture_mode=mode,
            trace_id=self._trace_id,
            goes_on=definition.parallel_error_strategy is ParallelErrorStrategy.CONTINUE_ON_ERROR,
        )
        collects = definition.item_policy == "collect"
        return assemble_fed(frame, ended, self._bodies, self._items.failed_items if collects else ())

    async def _recorded_end(self, header: PlanRecorded) -> FedEnded | None:
        """How a finished run of that id ended; it is not run again (S-SET-39). None for a run that begins or goes on."""
        resumption = self._resumption
        if not (self._is_named if resumption is None else resumption.is_completed):
            return None
        return await finished(
            store_at(self._runtime.store_address),
            self.id,
            self._definition,
            header=header if resumption is None else None,
            bodies=self._bodies,
            open_watch=self._watch,
        )

    async def _owned(self) -> OwnedRun | None:
        definition, resumption = self._definition, self._resumption
        if definition.durability is Durability.OFF:
            return None
        return await own_run(
            store_at(self._runtime.store_address),
            self.id,
            origin=self._origin.place,
            durability=definition.durability,
            is_resumed=resumption is not None,
            takes_over=resumption is not None and resumption.takes_over,
            reads_earlier=False,
        )

    async def _conducted(self, owned: OwnedRun | None, header: PlanRecorded, mode: CaptureMode) -> FedEnded:
        """Everything between the beginning of the record and its end."""
        record = None
        if self._resumption is not None:
            record = await RecoveredRun.read(store_at(self._runtime.store_address), self.id, self._bodies)
            record.facts.go_on()
            self._answers = record.facts.answers
        journal = ForgetfulJournal(self.id) if owned is None else owned.journal
        epoch, now = 0 if owned is None else owned.epoch, self._clock.now()
        data = replace(header, started_at=now) if record is None else RunResumed.of(header, is_restart=False)
        first = Fact(run=self.id, name=RUN, at=now, data=data, epoch=epoch)
        await journal.append((first,), epoch=epoch, until=Until.WRITTEN)
        async with contextlib.AsyncExitStack() as stack:
            found = await self._opened()
            if found is None:
                return self._cancelled(now)
            reader, is_direct = found
            stack.push_async_callback(reader.close)
            watch = await self._watch(is_direct=is_direct)
            stack.push_async_exit(watch.leave)
            envelope = Envelope(run_id=self.id, epoch=epoch, journal=journal, clock=self._clock)
            parts = self._parts(envelope, Intake(reader, record), watch, record, is_direct=is_direct)
            conductor = MapReduceConductor(envelope, parts)
            watch.on_error = conductor.break_off
            try:
                houses = await self._runtime.feed(self._request(conductor, mode, journal))
            except asyncio.CancelledError:
                if not self._is_cancelling:
                    raise
                return self._cancelled(now)
            stack.push_async_callback(houses.close)
            self._spending = houses.spending
            self._items.window = window = window_of(self._definition, houses.most_processes)
            rules = rules_of(self._definition, window=window, is_direct=is_direct)
            self._conductor = conductor
            if owned is not None:
                watching = asyncio.get_running_loop().create_task(watch_for_cancel(owned, self.id, self.acancel))
                stack.callback(watching.cancel)
            if self._is_cancelling:
                conductor.cancel()
            return await conductor.conduct(houses, MapReduceMachine(rules, () if record is None else record.groups))

    def _cancelled(self, started_at: float) -> FedEnded:
        """The end of a run that was cancelled before its first task."""
        ending = EndFed(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
        return FedEnded(ending=ending, started_at=started_at, completed_at=self._clock.now())

    async def _opened(self) -> tuple[ItemReader, bool] | None:
        """The items, and whether all of them are one task; None where the run was cancelled meanwhile."""
        self._opening = asyncio.get_running_loop().create_task(opened(self._definition))
        if self._is_cancelling:
            self._opening.cancel()
        await asyncio.wait([self._opening])
        if self._opening.cancelled():
            if self._is_cancelling:
                return None
            raise as_error(asyncio.CancelledError())
        if (error := self._opening.exception()) is not None:
            raise as_error(error)
        return self._opening.result()

    async def _watch(self, *, is_direct: bool, is_replayed: bool = False) -> RunWatch:
        """The files that the run writes, open."""
        if is_direct:
            return RunWatch(self._items, is_direct=True)
        definition, is_resumed = self._definition, is_replayed or self._resumption is not None
        letters = results = None
        if definition.results is not None:
            results = await ResultsFile.open(definition.results, is_resumed=is_resumed)
        if definition.dead_letters is not None:
            letters = await DeadLetterFile.open(definition.dead_letters, run_id=self.id, is_resumed=is_resumed)
        return RunWatch(self._items, results=results, letters=letters)

    def _parts(
        self, envelope: Envelope, intake: Intake, watch: RunWatch, record: RecoveredRun | None, *, is_direct: bool
    ) -> FedParts:
        definition = self._definition
        reduced = definition if isinstance(definition, MapReduceDefinition) else None
        orders = OrderMaker(
            envelope,
            factories=DirectFactory(reduced) if is_direct and reduced is not None else DefinitionFactories(definition),
            maker=TaskMaker(definition, self._inputs, recorded=self._recorded),
            kinds=Kinds(),
            intake=intake,
            bodies=self._bodies,
            record=record,
            item_count=definition.item_source.count,
            is_direct=is_direct,
        )
        return FedParts(
            intake=intake,
            orders=orders,
            bodies=self._bodies,
            watch=watch,
            capacity=0 if reduced is None else reduced.capacity,
            weights=Weights(definition),
            record=record,
        )

    def _request(self, conductor: MapReduceConductor, mode: CaptureMode, journal: Journal) -> FeedRequest:
        definition, resumption = self._definition, self._resumption
        planned = Planned(plan=Plan(workflow=definition.shown_workflow, nodes=()), tasks={}, agents={})
        frame = frame_of(
            rules_for_tasks(definition),
            planned,
            run_id=self.id,
            interest=self._delivery.interest | self._events.interest,
            capture_mode=mode,
            log_fields=self._fields,
        )
        if frame.budget is not None:
            # An account of its own for each owner of the run, who knows what was spent before (S-BUD-6, S-BUD-7).
            spent = NOTHING if resumption is None else resumption.spent
            frame = replace(frame, budget=replace(frame.budget, spent=spent, account=f"{self.id}/{new_object_id()}"))
        return FeedRequest(
            run_id=self.id,
            frame=frame,
            events=self,
            tool_metrics=definition.tool_metrics or NoOpToolMetrics(),
            on_unknown=definition.on_unknown,
            journal=journal,
            store=None if definition.durability is Durability.OFF else self._runtime.store_address,
            deliver=conductor.deliver,
            called_off=self._called_off,
        )

    async def _note_end(self, owned: OwnedRun | None, ended: FedEnded) -> None:
        """Put the end on record."""
        if owned is None:
            return
        ending = ended.ending
        data = RunEnded(
            state=ending.state,
            exit_reason=ending.exit_reason,
            failure=ending.failure,
            errors=[RecordedError("", type(each.error).__name__, message_of(each.error)) for each in ended.failures],
        )
        last = Fact(run=self.id, name=RUN, at=ended.completed_at, data=data, epoch=owned.epoch)
        await owned.journal.append((last,), epoch=owned.epoch, until=Until.WRITTEN)

    def _recorded(self, name: str, model: ChatModel, note: Callable[[Fact], None]) -> ChatModel:
        """The model for a synthesizer, its calls recorded as effects of the run (S-SET-46)."""
        return RecordedModel(model, self.id, name, note, known=self._answers.get(name, ()), spending=self._spending)

    def _header(self, mode: CaptureMode) -> PlanRecorded:
        """Return the record's first fact: everything that tells whether, and with what, the run can go on."""
        definition = self._definition
        data = map_reduce_run_data(
            definition,
            workflow=definition.shown_workflow,
            inputs=self._inputs,
            items=definition.item_source.identity,
        )
        return self._first_data(data, self._options, self._origin, mode)
