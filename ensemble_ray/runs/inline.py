"""InlineRuntime: executes runs in this process, without Ray.

Synchronous user code runs in threads, CPU-heavy tools in a process pool.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Self

from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.definition.task import Task
from ensemble_ray.events import GraphStateCompletedEvent, LoopIterationCompletedEvent
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.execute.local_executor import LocalExecutor
from ensemble_ray.execute.orders import (
    EvaluationFailed,
    HistoryPart,
    RunContext,
    RunOutcome,
    TaskBody,
    TaskFailure,
    TaskOrder,
    TaskResult,
)
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts, spending_here
from ensemble_ray.llm.limits.limiter import process_limiter
from ensemble_ray.plan.planner import Planned
from ensemble_ray.ports import Journal, Persistence, RunEventSink, Services
from ensemble_ray.process.concurrency import SystemClock, bridge, run_blocking
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.runs.coordinator import Coordinator, RunJournal
from ensemble_ray.runs.outputs import InMemoryOutputs, recall_output
from ensemble_ray.runs.planned import ClaimedRun, claim_planned
from ensemble_ray.runs.planned_tasks import PlannedTasks
from ensemble_ray.runs.ports import (
    GRACE_S,
    DecisionWatch,
    Deliver,
    PlannedWork,
    RunRequest,
    release_run,
    watch_for_cancel,
)
from ensemble_ray.runs.unit_evaluations import (
    LocalMemoryResets,
    LocalPredicates,
    UnitPorts,
    build_announcement,
    list_predicates,
)
from ensemble_ray.schedule.instructions import IterationEnded, StepEnded, UnitQuestion
from ensemble_ray.tools.cpu import LokyCpuPool
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.task_output import TaskOutput


def _runner_ports(
    request: RunRequest,
    context: RunContext,
    callables: LocalCallables,
    services: Services,
    journal: Journal,
    *,
    report_after: Persistence = Persistence.COMMITTED,
) -> RunnerPorts:
    return RunnerPorts(
        clock=SystemClock(),
        journal=journal,
        report_after=report_after,
        events=request.events,
        callables=callables,
        services=services,
        tool_metrics=request.tool_metrics,
        spending=spending_here(context.budget, context.cost),
        ask_unknown=None if isinstance(request.on_unknown, OnUnknown) else request.on_unknown,
        reviewer=request.reviewer,
        memory=request.memory,
        reflections=request.reflections,
        answers=None if request.store is None else store_at(request.store),
    )


def outputs_of(planned: Planned) -> InMemoryOutputs[TaskOutput]:
    """Return a store that restores recorded outputs as their declared types."""

    def load(instance: str, body: bytes) -> TaskOutput:
        task = planned.tasks.get(node_key(instance))
        return typed_output(json.loads(body), None if task is None else task.output_type)

    return InMemoryOutputs(load)


class InlineRun:
    """A coordinator, a runner, and the executor between them."""

    def __init__(
        self,
        request: RunRequest,
        work: PlannedWork,
        claimed: ClaimedRun,
        outputs: InMemoryOutputs[TaskOutput],
        services: Services,
    ) -> None:
        self.run_id = request.run_id
        planned = work.planned
        context = claimed.context
        self._owned = owned = claimed.owned
        self._journal: Journal = MemoryJournal(request.run_id) if owned is None else owned.journal
        callables = LocalCallables(planned.tasks, work.delegation_policies)
        # One journal has all facts in order, so a fact is never committed before an output it depends on. Listeners and
        # the code of units depend on more than facts.
        is_seen = bool(context.interest) or bool(planned.units)
        report_after = Persistence.COMMITTED if is_seen else Persistence.SOON
        ports = _runner_ports(request, context, callables, services, self._journal, report_after=report_after)
        self._runner = runner = TaskRunner(context, ports, planned.agents)
        epoch = 0 if owned is None else owned.epoch
        journal = RunJournal(run_id=request.run_id, epoch=epoch, journal=self._journal, clock=ports.clock)

        def body(key: str) -> TaskBody:
            task = planned.tasks[key]
            return TaskBody(task, len(task.input_guardrails), len(task.output_guardrails))

        self._tasks = PlannedTasks(
            planned.plan,
            journal,
            outputs,
            body,
            header=work.header,
            preamble=work.preliminary,
            contents=work.contents,
            resumed=None
            if claimed.recovery is None
            else claimed.recovery.resume(lambda instance: recall_output(outputs, instance), lambda failure: failure),
            units=self._unit_ports(planned, request) if planned.units else None,
        )
        self._decisions: DecisionWatch | None = None  # None: only this process decides
        if context.is_detached and request.store is not None:
            waiting = self._tasks.suspended
            self._decisions = DecisionWatch(store_at(request.store), request.run_id, lambda: waiting.reviews)
        find_decided = None if self._decisions is None else self._decisions.find_decided
        self._coordinator = Coordinator(journal, self._tasks, find_decided)
        self.inject = self._coordinator.inject
        self._executor = LocalExecutor(runner, planned.agents, self._coordinator.deliver, grace_s=GRACE_S)
        self._running: asyncio.Task[RunOutcome]
        self._watching: asyncio.Task[None] | None = None
        self._deciding: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the first tasks; `wait` raises an error of this."""
        loop = asyncio.get_running_loop()
        if self._owned is not None:
            self._watching = loop.create_task(watch_for_cancel(self._owned, self.run_id, self.cancel))
            self._watching.add_done_callback(self._coordinator.break_off_with)
        if self._decisions is not None:
            self._deciding = loop.create_task(self._decisions.watch(self._coordinator.resume_tasks))
            self._deciding.add_done_callback(self._coordinator.break_off_with)
        self._running = loop.create_task(self._coordinator.run(self._tasks.source, self._executor))
        await self._coordinator.begun

    async def wait(self) -> RunOutcome:
        """Return when the run ended and its record is closed."""
        state = RunState.FAILED
        try:
            outcome = await asyncio.shield(self._running)
            state = outcome.state
        except Exception:
            state = RunState.INTERRUPTED  # the record can be resumed
            raise
        finally:
            self._executor.stop(self._executor.running)  # empty, unless the coordinator itself broke
            for watching in (self._watching, self._deciding):
                if watching is not None:
                    watching.cancel()
            await self._runner.current_run.close_deps()
            if self._owned is not None:
                await self._owned.close(state)
        return outcome

    async def cancel(self) -> None:
        await self._coordinator.cancel()

    def _unit_ports(self, planned: Planned, request: RunRequest) -> UnitPorts:
        """Events are delivered before a predicate is evaluated (S-LOOP-107)."""
        units, events = {unit.key: unit for unit in planned.plan.units}, request.events

        def announce(what: IterationEnded | StepEnded, outputs: Sequence[TaskOutput]) -> None:
            event_type = LoopIterationCompletedEvent if isinstance(what, IterationEnded) else GraphStateCompletedEvent
            if events.wants(event_type):
                unit = units[what.unit.rpartition("/")[2]]
                events.emit(build_announcement(self.run_id, unit, what, outputs))

        def failure_of(raised: EvaluationFailed) -> TaskFailure:
            assert isinstance(raised.error, BaseException), "raised in this process"  # noqa: S101  for the type
            return TaskFailure(error=raised.error)

        return UnitPorts(
            predicates=_AfterEvents(LocalPredicates(list_predicates(planned.units)), events, self._runner),
            announce=announce,
            failure_of=failure_of,
            memory=None if request.memory is None else LocalMemoryResets(request.memory),
        )


class _AfterEvents:
    """Evaluates predicates after listeners received the preceding iteration or step."""

    def __init__(self, predicates: LocalPredicates, events: RunEventSink, runner: TaskRunner) -> None:
        self._predicates = predicates
        self._events = events
        self._runner = runner
        self.drop = predicates.drop

    async def holds(
        self, question: UnitQuestion, *, sent_count: int, new: Sequence[HistoryPart[TaskOutput]]
    ) -> bool | EvaluationFailed | None:
        await self._events.wait_until_delivered(LoopIterationCompletedEvent, GraphStateCompletedEvent)
        return await self._runner.call(partial(self._predicates.holds, question, sent_count=sent_count, new=new))


class InlineSession:
    """Runs a run's tasks on the library's loop. Fulfils `ExecutorSession`."""

    def __init__(self, request: RunRequest, services: Services, *, journal: Journal, deliver: Deliver) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._called: dict[str, Task] = {}  # with handlers or guardrails
        self.emit = request.events.emit
        ports = _runner_ports(request, request.context, LocalCallables(self._called), services, journal)
        self.spending = ports.spending
        self.most_processes: int | None = None

        def report(results: Sequence[TaskResult]) -> None:
            for result in results:
                self._called.pop(result.key, None)
            deliver(results)

        self._runner = TaskRunner(request.context, ports, {})
        self._executor = LocalExecutor(self._runner, {}, report, grace_s=GRACE_S)
        self.stop = self._executor.stop

    async def close(self) -> None:
        await self._executor.end()
        await self._runner.current_run.close_deps()

    def start(self, orders: Sequence[TaskOrder]) -> None:
        for order in orders:
            if order.task.handler is not None or order.input_guardrails or order.output_guardrails:
                self._called[order.key] = order.task
        self._executor.start(orders)


class InlineRuntime:
    """Executes runs in this process. Values are not pickled, so any object works as tool, handler or model."""

    name = "inline"

    def __init__(self, *, home: str | Path | None = None, store: str | None = None) -> None:
        """Create the runtime.

        Args:
            home: Directory of the records; default: `ENSEMBLE_RAY_HOME` or the user's state directory.
            store: URL of a database that stores them instead; default: `ENSEMBLE_RAY_STORE`.
        """
        self._home = home
        self._store = store
        self._cpu = LokyCpuPool()

    @property
    def store_address(self) -> StoreAddress:
        """Store of its runs' records."""
        return StoreAddress.of(self._home, self._store)

    async def submit(self, request: RunRequest, work: PlannedWork) -> InlineRun:
        """Begin or resume a planned run in this process."""
        outputs = outputs_of(work.planned)
        claimed = await claim_planned(
            request.store,
            request.context,
            work.header,
            submission=work.submission,
            preliminary=work.preliminary,
            keep=lambda instance, given: outputs.stage(instance, json.dumps(given.output_data()).encode()),
        )
        try:
            run = InlineRun(request, work, claimed, outputs, self._services())
        except BaseException:
            await release_run(claimed.owned)
            raise
        await run.begin()
        return run

    async def open_session(self, request: RunRequest, *, journal: Journal, deliver: Deliver) -> InlineSession:
        """Open an executor for tasks that are created while their run continues."""
        return InlineSession(request, self._services(), journal=journal, deliver=deliver)

    def _services(self) -> Services:
        return Services(limiter=process_limiter(), cpu=self._cpu)

    async def close(self) -> None:
        """End the process pool of CPU-heavy tools."""
        self._cpu.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await bridge(self.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        run_blocking(self.close())
