"""One run with its coordinator: a journal that can be held, an executor that keeps what it is asked, reports."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Never, TypeAlias

from ensemble_ray import ExitReason, Plan
from ensemble_ray.execute.orders import ResumePoint, RunOutcome, TaskBody, TaskOrder, TaskResult, TaskStatus
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.runs import PlanRecorded, RecordedError
from ensemble_ray.ports import Persistence
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.runs.coordinator import Coordinator, RunJournal
from ensemble_ray.runs.outputs import InMemoryOutputs
from ensemble_ray.runs.planned_tasks import PlannedTasks
from ensemble_ray.testing import ManualClock
from tests.ensemble_ray.schedule.plans import plan_of


@dataclass(frozen=True)
class Failure:
    """A failure that nobody looks into."""

    body: str
    error_type: str = ""
    message: str = ""
    newer_epoch: int = 0
    interrupts_run: bool = False

    @property
    def reason(self) -> RecordedError:
        return RecordedError("", self.error_type, self.message)


#: Bodies are texts here.
Order: TypeAlias = TaskOrder[str, Never, str]
Result: TypeAlias = TaskResult[str, Failure]


def body_of(key: str) -> TaskBody[str]:
    """Return a task of a plan."""
    return TaskBody(f"task {key}")


def describe_facts(facts: Sequence[Fact]) -> list[str]:
    """Facts as `kind name type`, in order."""
    return [" ".join([fact.kind, fact.name, str(fact.data.to_data().get("type", ""))]).strip() for fact in facts]


class SlowJournal(MemoryJournal):
    """A journal that takes its time while it is held; keeps what it got at once."""

    def __init__(self, run_id: str) -> None:
        super().__init__(run_id)
        self.batches: list[list[str]] = []
        #: what was to be committed before anything followed from it
        self.committed: list[str] = []
        self.free = asyncio.Event()
        self.free.set()

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        self.batches.append(describe_facts(facts))
        self.committed += describe_facts(facts) if until is Persistence.COMMITTED else []
        await asyncio.sleep(0)
        await self.free.wait()
        await super().append(facts, epoch=epoch, until=until)


@dataclass
class RecordingExecutor:
    """Keeps what it was asked to do, and what the journal knew then."""

    journal: MemoryJournal
    started: list[Order] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    recorded: list[list[str]] = field(default_factory=list)
    has_started: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, orders: Sequence[Order]) -> None:
        self.started += orders
        self.has_started.set()
        self.recorded.append(describe_facts(self.journal.facts()))

    def stop(self, instances: Sequence[str]) -> None:
        self.stopped += instances
        self.recorded.append(describe_facts(self.journal.facts()))

    @property
    def keys(self) -> list[str]:
        """Keys of the tasks that were started, in order."""
        return [order.key for order in self.started]


class Conducting:
    """One run with its coordinator and the executor it speaks to."""

    def __init__(
        self,
        plan: Plan,
        *,
        preamble: Sequence[Fact] = (),
        epoch: int = 0,
        resumed: ResumePoint[str, Failure] | None = None,
        find_decided: Callable[[], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        self.clock = ManualClock(start=100.0)
        self.journal = SlowJournal("run")
        self.executor = RecordingExecutor(self.journal)
        self.plan = plan
        journal = RunJournal(run_id="run", epoch=epoch, journal=self.journal, clock=self.clock)
        self.tasks: PlannedTasks = PlannedTasks(
            plan,
            journal,
            InMemoryOutputs(),
            body_of,
            header=PlanRecorded(workflow=plan.workflow),
            preamble=preamble,
            resumed=resumed,
        )
        self.coordinator = Coordinator(journal, self.tasks, find_decided)
        self.end: asyncio.Task[RunOutcome[str, Failure]]

    async def start(self) -> None:
        """Begin, and return when it has nothing more to do by itself."""
        self.end = asyncio.create_task(self.coordinator.run(self.tasks.source, self.executor))
        await self.settled()

    async def settled(self) -> None:
        """Return when the coordinator waits for somebody else; raise what it broke off with."""
        for _ in range(20):
            await asyncio.sleep(0)
        if self.end.done():
            await self.end

    async def report(self, *results: Result) -> None:
        self.coordinator.deliver(results)
        await self.settled()

    async def cancel(self) -> None:
        """Ask for its end."""
        asking = self.coordinator.cancel()
        await self.settled()
        assert asking.done()

    @property
    def fact_lines(self) -> list[str]:
        """All facts."""
        return describe_facts(self.journal.facts())

    def ended(self) -> RunOutcome[str, Failure]:
        """Return how it ended; it must have."""
        return self.end.result()


async def conducting(
    plan: Plan, *, preamble: Sequence[Fact] = (), epoch: int = 0, resumed: ResumePoint[str, Failure] | None = None
) -> Conducting:
    """A run that began, or went on."""
    run = Conducting(plan, preamble=preamble, epoch=epoch, resumed=resumed)
    await run.start()
    return run


def done(key: str, at: float = 101.0) -> Result:
    """The task gave an output."""
    return TaskResult(
        key=key,
        instance=f"{key}#0",
        status="completed",
        at=at,
        duration_s=1.0,
        total_tokens=7,
        output=f"output of {key}",
    )


def failed(key: str, at: float = 101.0) -> Result:
    """The task failed."""
    return TaskResult(
        key=key,
        instance=f"{key}#0",
        status="failed",
        at=at,
        failure=Failure(f"failure of {key}", "ValueError", f"{key} broke"),
    )


def ended_early(key: str, status: TaskStatus, *, reason: ExitReason = ExitReason.USER_EXIT_EARLY) -> Result:
    """The task exited, or was cancelled."""
    return TaskResult(
        key=key, instance=f"{key}#0", status=status, at=101.0, failure=Failure(f"trace of {key}"), exit_reason=reason
    )


PAIR = plan_of("parallel", {"a": (), "b": (), "c": ("b", "a")})
