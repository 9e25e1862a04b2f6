"""One planned run in the scheduler, with its coordinator.

It stores the submission for a restarted scheduler (S-DUR-32). Outputs stay bytes, which this process never loads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import ray
import ray.exceptions
from msgspec.structs import replace

from ensemble_ray.actors.link import wire
from ensemble_ray.actors.link.events import HubSink, pack_announcement
from ensemble_ray.actors.link.limiter import RemoteMemoryResets, close_account
from ensemble_ray.actors.link.packing import make_undone_result, pack, pack_failure, pack_result, packed_evaluation
from ensemble_ray.actors.link.reach import BackgroundTasks, last_line
from ensemble_ray.actors.scheduler.processes import ProcessPool
from ensemble_ray.actors.scheduler.session import RunSession, SessionLimits
from ensemble_ray.actors.scheduler.submission_store import SubmissionStore
from ensemble_ray.actors.worker.task_host import RemoteDriverServices
from ensemble_ray.errors import message_of
from ensemble_ray.events import GraphStateCompletedEvent, LoopIterationCompletedEvent
from ensemble_ray.execute.orders import EvaluationFailed, HistoryPart, TaskBody
from ensemble_ray.facts.runs import RecordedError
from ensemble_ray.plan.placement import find_beside_predicates
from ensemble_ray.plan.plan import Plan
from ensemble_ray.process.concurrency import SystemClock
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.opening import store_at
from ensemble_ray.runs.coordinator import Coordinator, RunJournal
from ensemble_ray.runs.outputs import SpooledOutputs, recall_output
from ensemble_ray.runs.planned import ClaimedRun
from ensemble_ray.runs.planned_tasks import LOGGER as PLANNED_LOGGER
from ensemble_ray.runs.planned_tasks import PlannedTasks
from ensemble_ray.runs.ports import GRACE_S, DecisionWatch, watch_for_cancel
from ensemble_ray.runs.unit_evaluations import UnitPorts
from ensemble_ray.schedule.instructions import EdgeMatches, IterationEnded, StepEnded, UntilHolds
from ensemble_ray.values.ids import instance_of, new_object_id, node_key
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.reviews import RunDirective

_log = bounded_logger(__name__)
_NO_CALLABLES = wire.TaskCallables()
Entry = TypeVar("Entry")
_PAGE_ENTRIES = 1000
_PAGE_BYTES = 1_000_000
_READ_S = 60.0


class PlannedRun:
    """The executor of its coordinator. It starts no process before `begin`."""

    def __init__(
        self,
        submission: wire.Submission,
        pool: ProcessPool,
        *,
        hub: Any,
        limits: SessionLimits,
        claimed: ClaimedRun,
        outputs: SpooledOutputs,
        store: SubmissionStore,
        add_lines: Callable[[Sequence[wire.LogLine]], None],
        finished: asyncio.Future[wire.WireOutcome],
    ) -> None:
        self._submission = submission = replace(submission, context=claimed.context)
        self._owned = owned = claimed.owned
        recovery, is_restart = claimed.recovery, submission.reason.is_restart
        self._store = store
        self._add_lines = add_lines
        is_managed = submission.plan.hierarchy is not None
        beside_callables = frozenset[str]()  # agents in the process of the run's predicates
        if submission.callables is not None and submission.callables.predicates:
            placements = [each.placement for each in submission.templates]
            beside_callables = find_beside_predicates(submission.plan, placements)
        self._session = RunSession(
            opening_of(submission),
            pool,
            self,
            hub=hub,
            limits=limits,
            is_managed=is_managed,
            beside_callables=beside_callables,
            warn=(lambda text: add_lines([wire.scheduler_line(text, wire.CLUSTER_LOGGER)]))
            if submission.context.forwards_logs
            else None,
        )
        epoch, facts = (0, MemoryJournal(submission.run_id)) if owned is None else (owned.epoch, owned.journal)
        journal = RunJournal(
            run_id=submission.run_id,
            epoch=epoch,
            journal=facts,
            clock=SystemClock(),
            redaction=submission.context.redaction,
        )
        self._announcements: Announcements | None = None
        if hub is not None and submission.plan.units:
            sink = HubSink(hub, self.run_id, submission.context.interest)
            self._announcements = Announcements(self.run_id, submission.plan, sink, self._session.submit)
        self._tasks: PlannedTasks = PlannedTasks(
            submission.plan,
            journal,
            outputs,
            partial(body_of, submission),
            header=submission.header,
            preamble=submission.preamble,
            contents=getattr(submission, "contents", ()),
            resumed=None
            if recovery is None
            else recovery.resume(
                lambda instance: recall_output(outputs, instance), pack_failure, is_restart=is_restart
            ),
            units=self._unit_ports(hub) if submission.plan.units else None,
        )
        #: None: the driver decides its gates
        self._decisions: DecisionWatch | None = None
        if submission.context.is_detached and submission.store is not None:
            waiting = self._tasks.suspended
            self._decisions = DecisionWatch(store_at(submission.store), submission.run_id, lambda: waiting.reviews)
        find_decided = None if self._decisions is None else self._decisions.find_decided
        self._coordinator = Coordinator(journal, self._tasks, find_decided)
        self._running: asyncio.Task[wire.WireOutcome]
        self._background = BackgroundTasks()
        self._storing: asyncio.Task[None] | None = None
        self._finished = finished

    @property
    def run_id(self) -> str:
        return self._submission.run_id

    def _unit_ports(self, hub: Any) -> UnitPorts:
        # Predicates run in the host of the run's callables; listeners and memory are in the driver.
        announcements = self._announcements
        return UnitPorts(
            predicates=RemotePredicates(self._session),
            lives_with=self._session.is_beside_callables,
            announce=(lambda _what, _outputs: None) if announcements is None else announcements.announce,
            failure_of=_failure_of,
            memory=None if hub is None else RemoteMemoryResets(RemoteDriverServices(hub, self.run_id)),
            log=(lambda level, text: self._add_lines([wire.scheduler_line(text, PLANNED_LOGGER, level)]))
            if self._submission.context.forwards_logs
            else None,
        )

    @property
    def waiting(self) -> int:
        return self._session.waiting

    def resize(self, limits: SessionLimits) -> None:
        self._session.resize(limits)

    async def begin(self) -> None:
        if self._owned is not None:
            self._storing = self._background.start(self._store_submission())
        try:
            self._session.open()
        except Exception as error:  # noqa: BLE001  the run must end, whatever failed
            self._coordinator.break_off(error)
        self._running = asyncio.get_running_loop().create_task(self._coordinator.run(self._tasks.source, self))
        self._background.start(self._finish())
        await self._coordinator.begun

    async def cancel(self) -> None:
        async with self._session.continuations.suspended(GRACE_S):
            await self._coordinator.cancel()

    async def inject(self, directive: RunDirective) -> bool:
        async with self._session.continuations.suspended():
            return await self._coordinator.inject(directive)

    async def report(self, reports: Sequence[wire.WireResult]) -> None:
        await self._session.report(reports)

    def locate(self, agent_key: str, lost: str | None) -> list[tuple[str, Any]]:
        return self._session.locate(agent_key, lost=lost)

    # The executor of its coordinator, and the receiver of its session.

    def start(self, orders: Sequence[wire.WireOrder]) -> None:
        """Start these tasks after the events that were announced before."""
        if self._announcements is not None:
            self._announcements.start(orders)
            return
        if len(orders) == 1:
            orders = [self._session.continue_with(orders[0], self._tasks.list_following)]
        self._session.submit(orders)

    def stop(self, instances: Sequence[str]) -> None:
        waiting = [] if self._announcements is None else self._announcements.withdraw(instances)
        self._coordinator.deliver([pack_result(make_undone_result(order, None, "cancelled")) for order in waiting])
        self._session.stop(instances)

    async def receive(self, reports: Sequence[wire.WireResult]) -> None:
        self._coordinator.deliver(reports)

    def return_order(self, instance: str) -> None:
        raise KeyError(instance)  # a planned run's submission contains all that its orders need

    async def _finish(self) -> None:
        try:
            self._finished.set_result(await self._release())
        except Exception as error:  # noqa: BLE001  the waiting caller must hear of any failure
            self._finished.set_exception(error)
            self._finished.exception()  # marks it as retrieved: a run without a driver has no caller

    async def _store_submission(self) -> None:
        try:
            await self._store.keep(self._submission)
        except Exception as error:  # noqa: BLE001  without it the run only depends on its driver
            _log.warning(
                "Run %s cannot be stored for another scheduler, and is interrupted if this one dies: %s",
                self.run_id,
                message_of(error),
            )

    async def _drop(self, storing: asyncio.Task[None]) -> None:
        await asyncio.wait([storing])
        try:
            await self._store.drop(self.run_id)
        except Exception as error:  # noqa: BLE001  the run has ended
            _log.warning("Run %s: its stored submission cannot be removed: %s", self.run_id, message_of(error))

    async def _release(self) -> wire.WireOutcome:
        """Release the processes and close the record when the run has ended."""
        keep, state = None, RunState.FAILED
        watching = deciding = None
        if self._owned is not None:
            watching = self._background.start(watch_for_cancel(self._owned, self.run_id, self.cancel))
        if self._decisions is not None:
            deciding = self._background.start(self._decisions.watch(self._coordinator.resume_tasks))
        try:
            ended = await asyncio.shield(self._running)
            keep, state = self._submission.keep, ended.state
        except Exception:
            state = RunState.INTERRUPTED  # its record can be resumed
            raise
        finally:
            for each in (watching, deciding):
                if each is not None:
                    each.cancel()
            # Before the caller receives the end: then a run with this id may start or resume.
            settling: asyncio.Task[None] | None = None
            if self._storing is not None:
                stays = state is RunState.WAITING and self._submission.goes_on_alone  # the scheduler resumes it
                settling = self._storing if stays else self._background.start(self._drop(self._storing))
            try:
                # If the coordinator failed, processes may still run tasks, so `keep` is None.
                if self._announcements is not None:
                    await self._announcements.flush()  # the driver reads events until it receives the end
                await self._session.close(keep=keep)
                if settling is not None:
                    await asyncio.wait([settling])
            finally:
                close_account(self._submission.context)
                if self._owned is not None:
                    await self._owned.close(state)
        return ended


class Announcements:
    """Publishes the events of one run's units in order with its tasks."""

    def __init__(
        self, run_id: str, plan: Plan, sink: HubSink, start: Callable[[Sequence[wire.WireOrder]], None]
    ) -> None:
        self._run_id = run_id
        self._units = {unit.key: unit for unit in plan.units}
        self._sink = sink
        self._start = start
        self._waiting: dict[str, wire.WireOrder] = {}
        self._background = BackgroundTasks()

    def announce(self, what: IterationEnded | StepEnded, outputs: Sequence[bytes]) -> None:
        event_type = LoopIterationCompletedEvent if isinstance(what, IterationEnded) else GraphStateCompletedEvent
        if self._sink.wants(event_type):
            unit = self._units[node_key(instance_of(what.unit))]
            self._sink.emit_packed(pack_announcement(self._run_id, unit, what, outputs))

    def start(self, orders: Sequence[wire.WireOrder]) -> None:
        """Start these orders when the hub has all earlier announcements."""
        if self._sink.is_idle and not self._waiting:
            self._start(orders)
            return
        is_first = not self._waiting
        self._waiting.update((order.instance, order) for order in orders)
        if is_first:
            self._background.start(self._start_waiting())

    def withdraw(self, instances: Sequence[str]) -> list[wire.WireOrder]:
        found = (self._waiting.pop(instance, None) for instance in instances)
        return [order for order in found if order is not None]

    async def flush(self) -> None:
        await self._sink.flush()

    async def _start_waiting(self) -> None:
        while not self._sink.is_idle:
            await self._sink.flush()
        orders, self._waiting = list(self._waiting.values()), {}
        if orders:
            self._start(orders)


class RemotePredicates:
    """Predicates in the process of the run's callables. Implements `Predicates` with outputs as bytes."""

    def __init__(self, session: RunSession) -> None:
        self._session = session
        self._background = BackgroundTasks()

    async def holds(
        self, question: UntilHolds | EdgeMatches, *, sent_count: int, new: Sequence[HistoryPart[bytes]]
    ) -> bool | EvaluationFailed | None:
        body = pack((self._session.run_id, question, sent_count, tuple(new)))

        async def ask(handle: Any) -> bool | EvaluationFailed | None:
            answer: bool | EvaluationFailed | None = await handle.holds_predicate.remote(body)
            return answer

        try:
            return await self._session.ask_callables(ask)
        except RuntimeError as error:
            return packed_evaluation(EvaluationFailed.of(error))

    def drop(self, unit: str) -> None:
        self._background.start(self._forget(unit))

    async def _forget(self, unit: str) -> None:
        host = self._session.callables_host
        if host is None:
            return
        try:
            await host.handle.forget_history.remote(self._session.run_id, unit)
        except ray.exceptions.RayError as error:  # the process is gone, and the history with it
            _log.debug("Run %s: the history of '%s' is gone: %s", self._session.run_id, unit, last_line(error))


def _failure_of(raised: EvaluationFailed) -> wire.WireFailure:
    assert isinstance(raised.error, bytes), "raised in another process"  # noqa: S101  for the type
    reason = raised.reason or RecordedError("", raised.error_type, raised.message)
    return wire.WireFailure(body=raised.error, error_type=raised.error_type, message=raised.message, reason=reason)


def opening_of(submission: wire.Submission) -> wire.SessionOpening:
    node_id = str(ray.get_runtime_context().get_node_id())
    return wire.SessionOpening(
        run_id=submission.run_id,
        context=submission.context,
        location=None if submission.store is None else wire.RecordLocation(submission.store, node_id),
        templates=submission.templates,
        callables=submission.callables,
        is_connected=submission.is_connected,
        program=submission.program,
    )


def body_of(submission: wire.Submission, key: str) -> TaskBody[bytes]:
    declared = {} if submission.callables is None else submission.callables.tasks
    callables = declared.get(key, _NO_CALLABLES)
    return TaskBody(submission.tasks[key], len(callables.input_guardrails), len(callables.output_guardrails))


class RunEndBuffer:
    def __init__(self) -> None:
        self.id = new_object_id()
        self.result: asyncio.Future[wire.WireOutcome] = asyncio.get_running_loop().create_future()
        self._waiting = 0
        self._asked_at = -_READ_S

    @property
    def is_read(self) -> bool:
        return self._waiting > 0 or asyncio.get_running_loop().time() < self._asked_at + _READ_S

    async def page(self, cursor: int) -> wire.EndPage:
        """Wait for the end and return the page after the first `cursor` entries."""
        self._waiting += 1
        try:
            ended = await asyncio.shield(self.result)
        finally:
            self._waiting -= 1
            self._asked_at = asyncio.get_running_loop().time()
        return _page_of(ended, self.id, cursor)


def _page_of(ended: wire.WireOutcome, end_id: str, begin: int) -> wire.EndPage:
    page = _Page(begin)
    part = replace(
        ended,
        completed=page.fill_from(ended.completed, lambda entry: entry[1]),
        delegated=page.fill_from(ended.delegated, lambda entry: entry[1]),
        failures=page.fill_from(ended.failures, lambda failed: failed.failure.body),
        unfinished=page.fill_from(ended.unfinished, lambda entry: entry[1].body),
        raised=page.fill_from(ended.raised, lambda entry: entry[1].body),
        failed_delegations=ended.failed_delegations if begin == 0 else (),
        units=ended.units if begin == 0 else (),
        unit_failures=ended.unit_failures if begin == 0 else (),
    )
    return wire.EndPage(end_id=end_id, cursor=page.stop, is_last=page.stop >= page.total, end=part)


class _Page:
    """One page of several sequences that count as one."""

    def __init__(self, begin: int) -> None:
        #: entries so far
        self.total = 0
        self.stop = begin
        self._begin = begin
        self._size_bytes = 0

    def fill_from(self, entries: Sequence[Entry], body_of: Callable[[Entry], bytes]) -> list[Entry]:
        found: list[Entry] = []
        for entry in entries[max(0, self._begin - self.total) :]:
            if self.stop - self._begin >= _PAGE_ENTRIES or self._size_bytes >= _PAGE_BYTES:
                break
            found.append(entry)
            self.stop += 1
            self._size_bytes += len(body_of(entry))
        self.total += len(entries)
        return found
