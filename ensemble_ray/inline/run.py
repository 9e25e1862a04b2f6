"""InlineRun: one planned run in this process, from its start to its outcome.

In: a request and the run's record. Out: the outcome. A coordinator, a runner, and the local executor between them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble_ray.coordinator.announcements import build_announcement
from ensemble_ray.coordinator.coordinator import Coordinator
from ensemble_ray.coordinator.memory_resets import LocalMemoryResets
from ensemble_ray.coordinator.outputs import HeldOutputs, recall_output
from ensemble_ray.coordinator.planned import PlannedTasks
from ensemble_ray.coordinator.predicates import LocalPredicates, list_predicates
from ensemble_ray.coordinator.run_journal import RunJournal
from ensemble_ray.coordinator.unit_evaluations import UnitPorts
from ensemble_ray.definition.fields import OnUnknown
from ensemble_ray.events import GraphStateCompletedEvent, LoopIterationCompletedEvent
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.effects import typed_output
from ensemble_ray.execute.local_executor import LocalExecutor
from ensemble_ray.execute.orders import TaskBody, TaskFailure
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts, spending_here
from ensemble_ray.process.forks import SystemClock
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.opening import store_at
from ensemble_ray.runs.decisions import DecisionWatch
from ensemble_ray.runs.ownership import GRACE_S, watch_for_cancel
from ensemble_ray.schedule.instructions import IterationEnded
from ensemble_ray.values.ids import node_key
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.definition.task import Task
    from ensemble_ray.execute.orders import EvaluationFailed, HistoryPart, RunOutcome, TaskResult
    from ensemble_ray.plan.planner import Planned
    from ensemble_ray.ports import Journal, RunEventSink, Services
    from ensemble_ray.runs.claimed import ClaimedRun
    from ensemble_ray.runs.ports import PlannedWork, RunRequest
    from ensemble_ray.schedule.instructions import EdgeMatches, StepEnded, UntilHolds
    from ensemble_ray.values.reviews import RunDirective
    from ensemble_ray.values.task_output import TaskOutput


def outputs_of(planned: Planned) -> HeldOutputs[TaskOutput]:
    """Return where the outputs of a plan's tasks are kept; recorded ones become objects of the types that tasks declare."""

    def load(instance: str, body: bytes) -> TaskOutput:
        task = planned.tasks.get(node_key(instance))
        return typed_output(json.loads(body), None if task is None else task.output_type)

    return HeldOutputs(load)


class InlineRun:
    """One run in this process: a coordinator, a runner, and the executor between them."""

    def __init__(
        self,
        request: RunRequest,
        work: PlannedWork,
        claimed: ClaimedRun,
        outputs: HeldOutputs[TaskOutput],
        services: Services,
    ) -> None:
        self.run_id = request.run_id
        self._planned = planned = work.planned
        context = claimed.context
        self._owned = owned = claimed.owned
        self._journal: Journal = MemoryJournal(request.run_id) if owned is None else owned.journal
        clock = SystemClock()
        ports = RunnerPorts(
            clock=clock,
            journal=self._journal,
            events=request.events,
            callables=LocalCallables(planned.tasks, work.delegation_policies),
            services=services,
            tool_metrics=request.tool_metrics,
            spending=spending_here(context.budget, context.cost),
            ask_unknown=None if isinstance(request.on_unknown, OnUnknown) else request.on_unknown,
            reviewer=request.reviewer,
            memory=request.memory,
            reflections=request.reflections,
        )
        runner = TaskRunner(context, ports, planned.agents)
        self._executor = LocalExecutor(runner, planned.agents, self._deliver, grace_s=GRACE_S)
        epoch = 0 if owned is None else owned.epoch
        journal = RunJournal(run_id=request.run_id, epoch=epoch, journal=self._journal, clock=clock)
        self._tasks: PlannedTasks[Task, TaskOutput, TaskFailure] = PlannedTasks(
            planned.plan,
            journal,
            outputs,
            self._body,
            header=work.header,
            preamble=work.preliminary,
            resumed=None
            if claimed.recovery is None
            else claimed.recovery.resume(lambda instance: recall_output(outputs, instance), lambda failure: failure),
            units=self._unit_ports(planned, request) if planned.units else None,
        )
        #: None: its gates are decided in this process
        self._decisions: DecisionWatch | None = None
        if context.is_detached and request.store is not None:
            waiting = self._tasks.put_down
            self._decisions = DecisionWatch(store_at(request.store), request.run_id, lambda: waiting.reviews)
        find_decided = None if self._decisions is None else self._decisions.find_decided
        self._coordinator = Coordinator(journal, self._tasks, find_decided)
        self._running: asyncio.Task[RunOutcome]
        self._watching: asyncio.Task[None] | None = None
        self._deciding: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the first tasks; what fails here ends the run, and `wait` tells of it."""
        if self._owned is not None:
            self._watching = asyncio.get_running_loop().create_task(
                watch_for_cancel(self._owned, self.run_id, self.cancel)
            )
            self._watching.add_done_callback(self._coordinator.break_off_with)
        if self._decisions is not None:
            self._deciding = asyncio.get_running_loop().create_task(self._decisions.watch(self._coordinator.go_on))
            self._deciding.add_done_callback(self._coordinator.break_off_with)
        self._running = asyncio.get_running_loop().create_task(
            self._coordinator.run(self._tasks.source, self._executor)
        )
        await self._coordinator.begun

    async def wait(self) -> RunOutcome:
        """Return when the run ended and its record is closed."""
        state = RunState.FAILED
        try:
            outcome = await asyncio.shield(self._running)
            state = outcome.state
        except Exception:
            state = RunState.INTERRUPTED  # what was recorded can be gone on with
            raise
        finally:
            self._executor.stop(self._executor.running)  # none, unless coordinating itself broke
            for watching in (self._watching, self._deciding):
                if watching is not None:
                    watching.cancel()
            if self._owned is not None:
                await self._owned.close(state)
        return outcome

    async def cancel(self) -> None:
        """Ask the run to end."""
        await self._coordinator.cancel()

    async def inject(self, directive: RunDirective) -> bool:
        """Tell the tasks that start from now on."""
        return await self._coordinator.inject(directive)

    def _unit_ports(self, planned: Planned, request: RunRequest) -> UnitPorts[TaskOutput, TaskFailure]:
        """Return what units need, in this process: events are delivered before a predicate is asked (S-LOOP-107)."""
        units, events = {unit.key: unit for unit in planned.plan.units}, request.events

        def announce(what: IterationEnded | StepEnded, outputs: Sequence[TaskOutput]) -> None:
            event_type = LoopIterationCompletedEvent if isinstance(what, IterationEnded) else GraphStateCompletedEvent
            if events.wants(event_type):
                unit = units[what.unit.rpartition("/")[2]]
                events.emit(build_announcement(self.run_id, unit, what, outputs))

        return UnitPorts(
            predicates=_AfterEvents(LocalPredicates(list_predicates(planned.units)), events),
            announce=announce,
            failure_of=_failure_of,
            memory=None if request.memory is None else LocalMemoryResets(request.memory),
        )

    def _body(self, key: str) -> TaskBody:
        task = self._planned.tasks[key]
        return TaskBody(task, len(task.input_guardrails), len(task.output_guardrails))

    def _deliver(self, results: Sequence[TaskResult]) -> None:
        self._coordinator.deliver(results)


class _AfterEvents:
    """Predicates that are asked when listeners have heard of the iteration or step before (S-LOOP-107). Fulfils `Predicates`."""

    def __init__(self, predicates: LocalPredicates, events: RunEventSink) -> None:
        self._predicates = predicates
        self._events = events
        self.forget = predicates.forget

    async def holds(
        self, question: UntilHolds | EdgeMatches, *, sent_count: int, new: Sequence[HistoryPart[TaskOutput]]
    ) -> bool | EvaluationFailed | None:
        """Ask one."""
        await self._events.wait_until_delivered(LoopIterationCompletedEvent, GraphStateCompletedEvent)
        return await self._predicates.holds(question, sent_count=sent_count, new=new)


def _failure_of(raised: EvaluationFailed) -> TaskFailure:
    """Return what a predicate raised as failures are held here."""
    assert isinstance(raised.error, BaseException), "raised in this process"  # noqa: S101  for the type
    return TaskFailure(error=raised.error)
