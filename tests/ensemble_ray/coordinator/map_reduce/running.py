"""One map-reduce run with its coordinator: real machine, items, factories and outputs; tasks end when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble_ray import Agent, ExitReason, MapReduceEnsemble, RunState, Task, TaskOutput
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.execute.orders import TaskFailure, TaskOrder, TaskResult
from ensemble_ray.execute.scope import Spending
from ensemble_ray.facts.fact import Fact
from ensemble_ray.items.pulling import ItemReader, ListReader
from ensemble_ray.ports import Persistence
from ensemble_ray.record.journal import MemoryJournal
from ensemble_ray.runs.coordinator import Coordinator, RunDirectives, RunJournal
from ensemble_ray.runs.map_reduce.items import ItemBuffer
from ensemble_ray.runs.map_reduce.orders import DefinitionFactories, OrderMaker, TaskMaker
from ensemble_ray.runs.map_reduce.outputs import MapReduceEnd, MapReduceOutputs
from ensemble_ray.runs.map_reduce.recovery import rules_of
from ensemble_ray.runs.map_reduce.resume_point import MapReduceResumePoint
from ensemble_ray.runs.map_reduce.tasks import MapReduceTasks
from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.testing import ManualClock, ScriptedModel
from tests.ensemble_ray.coordinator.map_reduce.outputs import output

#: How long a test waits for what must come; no test waits for it to pass.
PATIENCE_S = 60.0


async def until(condition: Callable[[], object]) -> None:
    """Return when it holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  some of it happens in threads
            await asyncio.sleep(0)


WORKER = Agent(role="Worker", goal="Work", llm=ScriptedModel())


def map_task(item: object) -> Task:
    """Make the task of an item."""
    return Task(description=f"map {item}", expected_output="a text", agent=WORKER)


def reduce_task(chunk: Sequence[Task]) -> Task:
    """Make the task of a group."""
    return Task(description="reduce", expected_output="a text", agent=WORKER, context=chunk)


def team(count: int = 4, **fields: Any) -> MapReduceEnsemble:
    """Return a static map-reduce of numbers in groups of two."""
    arguments: dict[str, Any] = {"items": iter(range(count)), "map_task": map_task, "reduce_task": reduce_task}
    if "target_token_budget" not in fields:
        arguments["chunk_size"] = 2
    return MapReduceEnsemble(**{**arguments, **fields})


@dataclass
class Executor:
    """Keeps what it was asked to do, and what the journal had then."""

    journal: MemoryJournal
    started: list[TaskOrder] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    recorded: dict[str, list[str]] = field(default_factory=dict)
    most_processes: int | None = None
    spending: Spending | None = None

    def __post_init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def start(self, orders: Sequence[TaskOrder]) -> None:
        """Keep them."""
        self.started += orders
        self.batches.append(len(orders))
        names = [f"{fact.kind} {fact.name}" for fact in self.journal.facts()]
        self.recorded.update({order.key: names for order in orders})

    def stop(self, instances: Sequence[str]) -> None:
        """Keep them."""
        self.stopped += instances

    async def close(self) -> None:
        """Keep nothing."""

    @property
    def keys(self) -> list[str]:
        """Keys of the tasks that were started, in order."""
        return [order.key for order in self.started]


@dataclass
class Watch:
    """Keeps what came of items; there is always room."""

    completed_items: list[tuple[int, object, str]] = field(default_factory=list)
    failed_items: list[tuple[int, object, str, int]] = field(default_factory=list)
    error: Exception | None = None

    async def free_slots(self, in_flight: Callable[[], int]) -> int:
        """Return more than anybody wants."""
        return 1_000 - in_flight()

    def write_output(self, number: int, index: int, item: object, output: TaskOutput) -> None:
        """Keep it, or raise."""
        del number
        if self.error is not None:
            raise self.error
        self.completed_items.append((index, item, output.raw))

    def write_failure(self, index: int, item: object, error: BaseException, attempts: int) -> None:
        """Keep it."""
        self.failed_items.append((index, item, str(error), attempts))


class Conducting:
    """One run."""

    def __init__(
        self,
        definition: MapReduceDefinition,
        *,
        window: int = 4,
        reader: ItemReader | None = None,
        facts: Sequence[Fact] = (),
        count: int = 4,
        journal: MemoryJournal | None = None,
    ) -> None:
        self.clock = ManualClock(start=100.0)
        self.journal = journal or MemoryJournal("run")
        self.executor = Executor(self.journal)
        self.watch = Watch()
        self.store = MapReduceOutputs()
        record = None
        if facts:
            record = MapReduceResumePoint(self.store)
            record.apply(facts)
        journal_of_run = RunJournal(run_id="run", epoch=0, journal=self.journal, clock=self.clock)
        items = ItemBuffer(ListReader(range(count)) if reader is None else reader, record)
        orders = OrderMaker(
            journal_of_run,
            factories=DefinitionFactories(definition),
            maker=TaskMaker(definition, {}, recorded=None),
            items=items,
            directives=RunDirectives(journal_of_run),
            store=self.store,
            record=record,
            item_count=None,
            is_direct=False,
        )
        tasks = MapReduceTasks(
            journal_of_run,
            items=items,
            orders=orders,
            store=self.store,
            results=self.watch,
            definition=definition,
            record=record,
        )
        self.coordinator = Coordinator(journal_of_run, tasks)
        self.executor.failed.add_done_callback(self.coordinator.break_off_with)
        rules = rules_of(definition, window=window, is_direct=False)
        self.machine = MapReduceMachine(rules, orders.instance, () if record is None else record.groups)
        self.end: asyncio.Task[MapReduceEnd] = asyncio.get_running_loop().create_task(
            self.coordinator.run(self.machine, self.executor)
        )

    @property
    def facts(self) -> list[str]:
        """All facts as `kind name`."""
        return [f"{fact.kind} {fact.name}" for fact in self.journal.facts()]

    def order(self, key: str) -> TaskOrder:
        """Return the order of a task that was started."""
        return next(order for order in self.executor.started if order.key == key)

    async def started(self, *keys: str) -> None:
        """Return when these tasks were started, and no others but those before."""
        await until(lambda: set(keys) <= set(self.executor.keys) or self.end.done())
        assert set(keys) <= set(self.executor.keys)

    def complete(self, *keys: str, tokens: int = -1) -> None:
        """Give these tasks outputs that say their keys."""
        self.coordinator.deliver(
            [self.result(key, status="completed", output=output(f"output of {key}", tokens)) for key in keys]
        )

    def fail(self, key: str, error: BaseException, **fields: Any) -> None:
        """Let a task fail."""
        self.coordinator.deliver([self.result(key, status="failed", failure=TaskFailure(error=error), **fields)])

    def exit(self, key: str, reason: ExitReason, error: BaseException | None = None) -> None:
        """Let a task ask for the end of the run."""
        self.coordinator.deliver(
            [self.result(key, status="exited", exit_reason=reason, failure=TaskFailure(error=error))]
        )

    def stopped(self, *keys: str) -> None:
        """Let tasks have been stopped."""
        self.coordinator.deliver([self.result(key, status="cancelled") for key in keys])

    def result(self, key: str, **fields: Any) -> TaskResult:
        """Return what came of a task that was started."""
        order = self.order(key)
        return TaskResult(key=key, instance=order.instance, at=self.clock.now(), duration_s=1.0, **fields)

    def completion(self, order: TaskOrder) -> TaskResult:
        """Return the result of an order that succeeded, also of one of several of the same task."""
        made = output(f"output of {order.instance}", -1)
        return TaskResult(
            key=order.key,
            instance=order.instance,
            status="completed",
            at=self.clock.now(),
            duration_s=1.0,
            output=made,
        )

    async def play(self, *, tokens: int = -1) -> MapReduceEnd:
        """Give all tasks outputs until the run ends."""
        reported: set[str] = set()
        async with asyncio.timeout(PATIENCE_S):
            while not self.end.done():
                keys = [key for key in self.executor.keys if key not in reported]
                reported.update(keys)
                if keys:
                    self.complete(*keys, tokens=tokens)
                await asyncio.sleep(0)
        return self.end.result()

    async def ended(self) -> MapReduceEnd:
        """Return how it ended."""
        async with asyncio.timeout(PATIENCE_S):
            return await self.end


class RefusingJournal(MemoryJournal):
    """A journal that cannot write facts of some kind."""

    def __init__(self, kind: str, error: Exception) -> None:
        super().__init__("run")
        self._kind = kind
        self._error = error

    async def append(self, facts: Sequence[Fact], *, epoch: int = 0, until: Persistence = Persistence.QUEUED) -> None:
        """Add facts, but for those of that kind."""
        if any(fact.kind == self._kind for fact in facts):
            raise self._error
        await super().append(facts, epoch=epoch, until=until)


def ending(ended: MapReduceEnd) -> tuple[RunState, ExitReason, str]:
    """Return how it ended, in three words."""
    return ended.ending.state, ended.ending.exit_reason, ended.ending.failure
