"""InlineRuntime: the same machines and runners in this process, without Ray. Floor: above record.

Everything runs on the library's loop; synchronous user code runs in threads, CPU-heavy tools in a process pool.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Self

from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.context import Services
from ensemble_ray.definition.durability import Durability, OnUnknown
from ensemble_ray.errors import RecordError, StaleEpochError, message_of
from ensemble_ray.execute.callables import LocalCallables
from ensemble_ray.execute.conductor import Assignment, Conducted, Report, RunConductor
from ensemble_ray.execute.exits import exhaustion_told
from ensemble_ray.execute.local_houses import LocalHouses
from ensemble_ray.execute.orders import RunOutcome, TaskFailure, TaskOrder, TaskResult
from ensemble_ray.execute.reports import report_of
from ensemble_ray.execute.runner import TaskRunner
from ensemble_ray.execute.scope import RunnerPorts
from ensemble_ray.execute.spending import spending_here
from ensemble_ray.inline_feed import InlineFeed
from ensemble_ray.limits.local_limiter import process_limiter
from ensemble_ray.loop import bridge, run_blocking
from ensemble_ray.outputs import RunState
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.record.recovery import Recovered, resumed_inline
from ensemble_ray.record.spent import with_account
from ensemble_ray.record.stores import StoreAddress, store_at
from ensemble_ray.tools.cpu import LokyCpuPool

if TYPE_CHECKING:
    from pathlib import Path

    from ensemble_ray.outputs import TaskOutput
    from ensemble_ray.ports import Journal
    from ensemble_ray.record.stores import OwnedRun, RunStore
    from ensemble_ray.runtime import FeedRequest, RunRequest

__all__ = ["GRACE_S", "InlineRuntime", "SystemClock", "let_go", "own_run", "watch_for_cancel"]

_log = bounded_logger(__name__)
#: How long a cancelled task may take to let go before the run ends without it, s.
GRACE_S = 3.0
#: How often a run looks whether somebody asked its record for its end, s.
CANCEL_POLL_S = 1.0


class _SteadyClock:
    """Counts on from the latest time that the computer's clock has shown."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._offset_s = float("-inf")

    def now(self) -> float:
        """Unix time, s; never an earlier one than before."""
        with self._lock:
            elapsed_s = time.monotonic()
            self._offset_s = max(self._offset_s, time.time() - elapsed_s)
            return self._offset_s + elapsed_s


#: One for the whole process: what one part of it began, another one ends.
_steady = _SteadyClock()


class SystemClock:
    """The computer's clock; within a process it never goes back, so that nothing takes less than no time."""

    def now(self) -> float:
        """Unix time, s; after the computer's clock was set back, that of before goes on."""
        return _steady.now()

    async def sleep(self, delay_s: float) -> None:
        """Sleep on the loop."""
        await asyncio.sleep(delay_s)


class InlineRuntime:
    """Runs in this process. Nothing is pickled, so anything works as tool, handler or model (S-CONV-34)."""

    name = "inline"

    def __init__(self, *, home: Path | None = None, store: str | None = None) -> None:
        """Make one.

        Args:
            home: Directory of the records; default: `ENSEMBLE_RAY_HOME` or the user's state directory.
            store: URL of a database that keeps them instead; default: `ENSEMBLE_RAY_STORE`.
        """
        self._home = home
        self._store = store
        self._cpu = LokyCpuPool()

    @property
    def store_address(self) -> StoreAddress:
        """Where its runs are recorded."""
        return StoreAddress.of(self._home, self._store)

    async def submit(self, request: RunRequest) -> InlineRun:
        """Begin a run in this process, or go on with one."""
        owned = None
        if request.frame.durability != Durability.OFF:
            owned = await own_run(
                store_at(self.store_address),
                request.run_id,
                origin=request.header.origin,
                durability=request.frame.durability,
                is_resumed=request.is_resumed,
                takes_over=request.takes_over,
            )
        try:
            run = InlineRun(request, owned, Services(limiter=process_limiter(), cpu=self._cpu))
        except BaseException:
            await let_go(owned)
            raise
        await run.begin()
        return run

    async def feed(self, request: FeedRequest) -> InlineFeed:
        """Houses for tasks that are made while their run goes on."""
        services = Services(limiter=process_limiter(), cpu=self._cpu)
        return InlineFeed(request, services, SystemClock(), grace_s=GRACE_S)

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

    def __init__(self, request: RunRequest, owned: OwnedRun | None, services: Services) -> None:
        self.run_id = request.run_id
        self._planned = request.planned
        recorded = () if owned is None else owned.earlier
        frame = with_account(request.frame, (*recorded, *request.earlier))
        self._owned = owned
        self._journal: Journal = MemoryJournal(request.run_id) if owned is None else owned.journal
        clock = SystemClock()
        ports = RunnerPorts(
            clock=clock,
            journal=self._journal,
            events=request.events,
            callables=LocalCallables(request.planned.tasks, request.delegation_policies),
            services=services,
            tool_metrics=request.tool_metrics,
            spending=spending_here(frame.budget, frame.cost),
            ask_unknown=None if isinstance(request.on_unknown, OnUnknown) else request.on_unknown,
        )
        runner = TaskRunner(frame, ports, request.planned.agents)
        self._houses = LocalHouses(runner, request.planned.agents, self._deliver, grace_s=GRACE_S)
        types = {key: task.output_type for key, task in request.planned.tasks.items() if task.output_type is not None}
        self._conductor: RunConductor[TaskOutput, TaskResult] = RunConductor(
            run_id=request.run_id,
            plan=request.planned.plan,
            header=request.header,
            journal=self._journal,
            clock=clock,
            houses=self,
            earlier=request.earlier,
            epoch=0 if owned is None else owned.epoch,
            resumed=resumed_inline(Recovered(owned.earlier), types) if owned is not None and owned.earlier else None,
        )
        self._reporting: set[asyncio.Task[None]] = set()
        self._watching: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Start the first tasks; what fails here ends the run, and `wait` tells of it."""
        if self._owned is not None:
            self._watching = asyncio.get_running_loop().create_task(
                watch_for_cancel(self._owned, self.run_id, self.cancel)
            )
            self._watching.add_done_callback(self._reported)
        try:
            await self._conductor.start()
        except Exception as error:  # noqa: BLE001  whatever it is, `wait` raises it
            if not self._conductor.ended.done():
                self._conductor.ended.set_exception(error)

    async def wait(self) -> RunOutcome:
        """Return when the run ended and its record is closed."""
        state = RunState.FAILED
        try:
            ended = await asyncio.shield(self._conductor.ended)
            state = ended.state
        except (RecordError, StaleEpochError):
            state = RunState.INTERRUPTED  # what was recorded can be gone on with
            raise
        finally:
            self._houses.stop(self._houses.running)  # none, unless conducting itself broke
            if self._watching is not None:
                self._watching.cancel()
            if self._owned is not None:
                await self._owned.close(state)
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
        job = asyncio.get_running_loop().create_task(self._conductor.report([_report_of(result) for result in results]))
        self._reporting.add(job)
        job.add_done_callback(self._reported)

    def _reported(self, job: asyncio.Task[None]) -> None:
        """A defect in conducting must end the run with its error, not leave it waiting."""
        self._reporting.discard(job)
        if not job.cancelled() and (error := job.exception()) is not None and not self._conductor.ended.done():
            self._conductor.ended.set_exception(error)


async def own_run(
    store: RunStore,
    run_id: str,
    *,
    origin: object,
    durability: str,
    is_resumed: bool,
    takes_over: bool,
    reads_earlier: bool = True,
) -> OwnedRun:
    """Begin the record of a run, or take it over; `reads_earlier` says whether its facts are wanted as a list."""
    is_buffered = durability == Durability.RUN
    if is_resumed:
        owned = await store.take(run_id, is_buffered=is_buffered, by_force=takes_over, reads_earlier=reads_earlier)
    else:
        owned = await store.begin(run_id, origin=str(origin or ""), is_buffered=is_buffered)
    try:
        await owned.write_state(RunState.RUNNING)
    except BaseException:
        await let_go(owned)
        raise
    return owned


async def let_go(owned: OwnedRun | None) -> None:
    """Own a run no more that could not begin here, so that it can be resumed; what kept it from beginning is raised."""
    if owned is not None:
        with contextlib.suppress(RecordError):
            await owned.close(RunState.INTERRUPTED)


async def watch_for_cancel(owned: OwnedRun, run_id: str, cancel: Callable[[], Awaitable[None]]) -> None:
    """End the run when somebody asks its record for that (S-DUR-52)."""
    while True:
        await asyncio.sleep(CANCEL_POLL_S)
        try:
            if await owned.is_cancel_asked():
                break
        except RecordError as error:  # the run's own facts will tell, if it lasts
            _log.warning("Run %s: cannot see whether its end was asked for: %s", run_id, message_of(error))
    await cancel()


def _report_of(result: TaskResult) -> Report[TaskOutput, TaskResult]:
    """A result as this process holds it: as objects."""
    given = [(output.agent_role, output) for _, output in result.delegated]
    failure = result if result.output is None else None
    return report_of(result, output=result.output, failure=failure, delegated=given)


def outcome_of(run_id: str, ended: Conducted[TaskOutput, TaskResult]) -> RunOutcome:
    """A conducted run as everybody above sees it."""
    is_spent = ended.state is RunState.BUDGET_EXHAUSTED
    return RunOutcome(
        run_id=run_id,
        state=ended.state,
        exit_reason=ended.exit_reason,
        started_at=ended.started_at,
        completed_at=ended.completed_at,
        completed=tuple(ended.completed),
        delegated=tuple(ended.delegated),
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
        lost_work=tuple(ended.lost_work),
        warning=exhaustion_told(result.error for result in ended.unfinished) if is_spent else "",
        unfinished=tuple((result.key, result.trace) for result in ended.unfinished if result.trace is not None),
    )
