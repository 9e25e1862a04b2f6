"""InlineRun: one planned run in this process, from its start to its outcome. Package: inline.

In: a request and the run's record. Out: the outcome. A coordinator, a runner, and the local executor between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ensemble_ray.coordinator.coordinator import Coordinator
from ensemble_ray.coordinator.outputs import HeldOutputs
from ensemble_ray.coordinator.planned import PlannedTasks
from ensemble_ray.coordinator.run_journal import RunJournal
from ensemble_ray.definition.durability import OnUnknown
from ensemble_ray.errors import RecordError, StaleEpochError
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.local_executor import LocalExecutor
from ensemble_ray.execute.orders import TaskBody
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts
from ensemble_ray.execute.spending import spending_here
from ensemble_ray.process.clock import SystemClock
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.recovery import Recovered, resumed_inline
from ensemble_ray.record.spent import with_account
from ensemble_ray.runs.ownership import GRACE_S, watch_for_cancel
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.definition.task import Task
    from ensemble_ray.execute.orders import TaskFailure, TaskResult
    from ensemble_ray.execute.outcomes import RunOutcome
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
        self._tasks: PlannedTasks[Task, TaskOutput, TaskFailure] = PlannedTasks(
            planned.plan,
            journal,
            HeldOutputs(),
            self._body,
            header=work.header,
            preamble=work.preliminary,
            resumed=resumed_inline(Recovered(owned.recorded), types) if owned is not None and owned.recorded else None,
        )
        self._coordinator = Coordinator(journal, self._tasks)
        self._running: asyncio.Task[RunOutcome]
        self._watching: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the first tasks; what fails here ends the run, and `wait` tells of it."""
        if self._owned is not None:
            self._watching = asyncio.get_running_loop().create_task(
                watch_for_cancel(self._owned, self.run_id, self.cancel)
            )
            self._watching.add_done_callback(self._coordinator.break_off_with)
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
        except (RecordError, StaleEpochError):
            state = RunState.INTERRUPTED  # what was recorded can be gone on with
            raise
        finally:
            self._executor.stop(self._executor.running)  # none, unless conducting itself broke
            if self._watching is not None:
                self._watching.cancel()
            if self._owned is not None:
                await self._owned.close(state)
        return outcome

    async def cancel(self) -> None:
        """Ask the run to end."""
        await self._coordinator.cancel()

    def _body(self, key: str) -> TaskBody:
        task = self._planned.tasks[key]
        return TaskBody(task, len(task.input_guardrails), len(task.output_guardrails))

    def _deliver(self, results: Sequence[TaskResult]) -> None:
        self._coordinator.deliver(results)
