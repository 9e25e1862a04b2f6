"""InlineRun: one planned run in this process, from its start to its outcome. Package: inline.

In: a request and the run's record. Out: the outcome. A coordinator, a runner, and the local executor between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble_ray.coordinator.coordinator import Coordinator
from ensemble_ray.coordinator.outputs import HeldOutputs
from ensemble_ray.coordinator.planned import Assignment, PlannedEnd, PlannedTasks
from ensemble_ray.coordinator.run_journal import RunJournal
from ensemble_ray.definition.durability import OnUnknown
from ensemble_ray.errors import RecordError, StaleEpochError
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.local_executor import LocalExecutor
from ensemble_ray.execute.orders import RunOutcome, TaskOrder, TaskResult
from ensemble_ray.execute.reports import Report, report_of
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts
from ensemble_ray.execute.spending import spending_here
from ensemble_ray.process.clock import SystemClock
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.recovery import Recovered, resumed_inline
from ensemble_ray.record.spent import with_account
from ensemble_ray.runs.outcomes import outcome_of
from ensemble_ray.runs.ownership import GRACE_S, watch_for_cancel
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.ports import Journal
    from ensemble_ray.ports.services import Services
    from ensemble_ray.record.stores import OwnedRun
    from ensemble_ray.runs.ports import PlannedWork, RunRequest
    from ensemble_ray.values.outputs import TaskOutput

__all__ = ["InlineRun"]


class InlineRun:
    """One run in this process: a conductor, a runner, and the houses between them."""

    def __init__(self, request: RunRequest, work: PlannedWork, owned: OwnedRun | None, services: Services) -> None:
        self.run_id = request.run_id
        self._planned = planned = work.planned
        recorded = () if owned is None else owned.recorded
        context = with_account(request.context, (*recorded, *work.preliminary))
        self._owned = owned
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
        )
        runner = TaskRunner(context, ports, planned.agents)
        self._executor = LocalExecutor(runner, planned.agents, self._deliver, grace_s=GRACE_S)
        types = {key: task.output_type for key, task in planned.tasks.items() if task.output_type is not None}
        epoch = 0 if owned is None else owned.epoch
        journal = RunJournal(run_id=request.run_id, epoch=epoch, journal=self._journal, clock=clock)
        self._tasks: PlannedTasks[TaskOutput, TaskResult] = PlannedTasks(
            planned.plan,
            journal,
            HeldOutputs(),
            header=work.header,
            preamble=work.preliminary,
            resumed=resumed_inline(Recovered(owned.recorded), types) if owned is not None and owned.recorded else None,
        )
        self._coordinator = Coordinator(journal, self._tasks)
        self._running: asyncio.Task[PlannedEnd[TaskOutput, TaskResult]]
        self._watching: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the first tasks; what fails here ends the run, and `wait` tells of it."""
        if self._owned is not None:
            self._watching = asyncio.get_running_loop().create_task(
                watch_for_cancel(self._owned, self.run_id, self.cancel)
            )
            self._watching.add_done_callback(self._coordinator.break_off_with)
        self._running = asyncio.get_running_loop().create_task(self._coordinator.run(self._tasks.source, self))
        await self._coordinator.begun

    async def wait(self) -> RunOutcome:
        """Return when the run ended and its record is closed."""
        state = RunState.FAILED
        try:
            ended = await asyncio.shield(self._running)
            state = ended.state
        except (RecordError, StaleEpochError):
            state = RunState.INTERRUPTED  # what was recorded can be gone on with
            raise
        finally:
            self._executor.stop(self._executor.running)  # none, unless conducting itself broke
            if self._watching is not None:
                self._watching.cancel()
            if self._owned is not None:
                await self._owned.close(state)
        return outcome_of(self.run_id, ended)

    async def cancel(self) -> None:
        """Ask the run to end."""
        await self._coordinator.cancel()

    # The executor, as the coordinator sees it.

    def start(self, assignments: Sequence[Assignment[TaskOutput]]) -> None:
        """Make orders of assignments and run them."""
        self._executor.start([self._order(assignment) for assignment in assignments])

    def stop(self, instances: Sequence[str]) -> None:
        """Stop running tasks."""
        self._executor.stop(instances)

    def _order(self, assignment: Assignment[TaskOutput]) -> TaskOrder:
        node = assignment.node
        task = self._planned.tasks[node.key]
        return TaskOrder(
            run_id=self.run_id,
            key=node.key,
            instance=assignment.instance,
            epoch=assignment.epoch,
            index=node.index,
            task=task,
            agent_key=node.agent_key,
            agent_role=node.agent_role,
            context=assignment.context,
            missing_context=assignment.missing_context,
            is_streaming=node.is_streaming,
            input_guardrails=len(task.input_guardrails),
            output_guardrails=len(task.output_guardrails),
        )

    def _deliver(self, results: Sequence[TaskResult]) -> None:
        self._coordinator.deliver([_report_of(result) for result in results])


def _report_of(result: TaskResult) -> Report[TaskOutput, TaskResult]:
    """Return the report of a result, with objects as this process holds them."""
    delegated = [(output.agent_role, output) for _, output in result.delegated]
    failure = result if result.output is None else None
    return report_of(result, output=result.output, failure=failure, delegated=delegated)
