"""InlineRuntime: the same machines and runners in this process, without Ray. Floor: above record.

Everything runs on the library's loop; synchronous user code runs in threads, CPU-heavy tools in a process pool.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

from ensemble_ray.config import home_directory
from ensemble_ray.context import Services
from ensemble_ray.errors import message_of
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.conductor import Assignment, Conducted, Report, RunConductor
from ensemble_ray.execute.local_houses import LocalHouses
from ensemble_ray.execute.orders import RunOutcome, TaskFailure, TaskOrder, TaskResult
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts
from ensemble_ray.limits.local_limiter import process_limiter
from ensemble_ray.loop import bridge, run_blocking
from ensemble_ray.outputs import RunState
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.journal_file import close_run, open_run
from ensemble_ray.tools.cpu import LokyCpuPool

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble_ray.outputs import TaskOutput
    from ensemble_ray.ports import Journal
    from ensemble_ray.record.journal_file import RunDirectory
    from ensemble_ray.runtime import RunRequest

__all__ = ["GRACE_S", "InlineRuntime", "SystemClock"]

_log = logging.getLogger(__name__)
#: How long a cancelled task may take to let go before the run ends without it, s.
GRACE_S = 3.0


class SystemClock:
    """The computer's clock."""

    def now(self) -> float:
        """Unix time, s."""
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        """Sleep on the loop."""
        await asyncio.sleep(delay_s)


class InlineRuntime:
    """Runs in this process. Nothing is pickled, so anything works as tool, handler or model (S-CONV-34)."""

    def __init__(self, *, record: bool = True, home: Path | None = None) -> None:
        """Make one.

        Args:
            record: Keep each run's record on disk, so that it can be looked at later; else in memory only.
            home: Directory of the records; default: `ENSEMBLE_RAY_HOME` or the user's state directory.
        """
        self._record = record
        self.home = home
        self._cpu = LokyCpuPool()

    async def submit(self, request: RunRequest) -> InlineRun:
        """Begin a run in this process."""
        home = self.home or home_directory()
        journal: Journal
        if self._record:
            opened = open_run(home, request.run_id, writer="inline", origin=str(request.header.get("origin") or ""))
            journal = opened.journal
            opened.directory.write_state(RunState.RUNNING)
            directory = opened.directory
        else:
            journal, directory = MemoryJournal(request.run_id), None
        services = Services(limiter=process_limiter(), cpu=self._cpu)
        run = InlineRun(request, journal, services, directory)
        await run.begin()
        return run

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


class InlineRun:
    """One run in this process: a conductor, a runner, and the houses between them."""

    def __init__(
        self, request: RunRequest, journal: Journal, services: Services, directory: RunDirectory | None
    ) -> None:
        self.run_id = request.run_id
        self._planned = request.planned
        self._frame = request.frame
        self._journal = journal
        self._directory = directory
        clock = SystemClock()
        ports = RunnerPorts(
            clock=clock,
            journal=journal,
            events=request.events,
            callables=LocalCallables(request.planned.tasks),
            services=services,
            tool_metrics=request.tool_metrics,
        )
        runner = TaskRunner(request.frame, ports, request.planned.agents)
        self._houses = LocalHouses(runner, request.planned.agents, self._deliver, grace_s=GRACE_S)
        self._conductor: RunConductor[TaskOutput, TaskResult] = RunConductor(
            run_id=request.run_id,
            plan=request.planned.plan,
            header=request.header,
            journal=journal,
            clock=clock,
            houses=self,
            earlier=request.earlier,
        )
        self._reporting: set[asyncio.Task[None]] = set()

    async def begin(self) -> None:
        """Start the first tasks."""
        await self._conductor.start()

    async def wait(self) -> RunOutcome:
        """Return when the run ended and its record is closed."""
        state = RunState.FAILED
        try:
            ended = await asyncio.shield(self._conductor.ended)
            state = ended.state
        finally:
            self._houses.stop(self._houses.running)  # none, unless conducting itself broke
            await close_run(self._journal, self._directory, state)
        return outcome_of(self.run_id, ended)

    async def cancel(self) -> None:
        """Ask the run to end."""
        await self._conductor.cancel()

    # Houses, as the conductor sees them.

    def start(self, assignments: Sequence[Assignment[TaskOutput]]) -> None:
        """Make orders of assignments and run them."""
        self._houses.start([self._order(assignment) for assignment in assignments])

    def stop(self, instances: Sequence[str]) -> None:
        """Stop running tasks."""
        self._houses.stop(instances)

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
        job = asyncio.get_running_loop().create_task(self._conductor.report([report_of(result) for result in results]))
        self._reporting.add(job)
        job.add_done_callback(self._reported)

    def _reported(self, job: asyncio.Task[None]) -> None:
        """A defect in conducting must end the run with its error, not leave it waiting."""
        self._reporting.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None and not self._conductor.ended.done():
            self._conductor.ended.set_exception(error)


def report_of(result: TaskResult) -> Report[TaskOutput, TaskResult]:
    """A task's result, as scheduling sees it."""
    return Report(
        key=result.key,
        status=result.status,
        at=result.at,
        duration_s=result.duration_s,
        total_tokens=result.total_tokens,
        tool_call_count=result.tool_call_count,
        is_timeout=result.is_timeout,
        output=result.output,
        failure=result if result.output is None else None,
        error_type="" if result.error is None else type(result.error).__name__,
        message="" if result.error is None else message_of(result.error),
    )


def outcome_of(run_id: str, ended: Conducted[TaskOutput, TaskResult]) -> RunOutcome:
    """A conducted run as everybody above sees it."""
    return RunOutcome(
        run_id=run_id,
        state=ended.state,
        exit_reason=ended.exit_reason,
        started_at=ended.started_at,
        completed_at=ended.completed_at,
        completed=tuple(ended.completed),
        failures=tuple(
            TaskFailure(
                key=failed.key,
                at=failed.at,
                error=failed.failure.error or RuntimeError("task failed without an error"),
                completed_before=failed.completed_before,
                trace=failed.failure.trace,
            )
            for failed in ended.failures
        ),
        unfinished=tuple(trace for result in ended.unfinished if (trace := result.trace) is not None),
    )
