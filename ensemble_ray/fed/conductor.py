"""MapReduceConductor: carries out what the machine of a fed run wants, in the process that has its factories. Room: fed.

In: items as they are pulled, results as they come. Out: tasks for the houses, facts for the record, outputs for the body
store, results for whoever reads them. Rules:
1. The machine decides. It is told everything by one task of the loop, in order, which carries out what it answers.
2. A group is on record before its reduce begins (S-MR-161). What the record knows is not made, asked or done again.
3. What a source or a factory raises ends the run and reaches the caller as it is (S-MR-106, S-MR-123).
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ensemble_ray.errors import RecordError, StaleEpochError, ValidationError, message_of
from ensemble_ray.execute.orders import TaskOrder
from ensemble_ray.fed.bodies import node_type
from ensemble_ray.fed.ports import FedEnded, FedFailure
from ensemble_ray.ids import instance_of
from ensemble_ray.items.pulling import RefusedItem
from ensemble_ray.ports import Until
from ensemble_ray.record.map_reduce_data import (
    DIRECT,
    FINAL,
    group_fact,
    item_digest,
    items_fact,
    map_key,
    reduce_key,
)
from ensemble_ray.schedule.map_reduce_words import (
    Begun,
    CancelRequested,
    EndFed,
    FedInstruction,
    FedStimulus,
    ItemRefused,
    ItemsPulled,
    PullItems,
    SourceFailed,
    StartMap,
    StartReduce,
    StopWork,
    Tell,
    TellLeftOut,
    TellOversized,
    WorkCancelled,
    WorkCompleted,
    WorkExited,
    WorkFailed,
)
from ensemble_ray.threads import USER_ERRORS

if TYPE_CHECKING:
    from ensemble_ray.definition.agent import Agent
    from ensemble_ray.definition.task import Task
    from ensemble_ray.execute.kinds import Kinds
    from ensemble_ray.execute.orders import TaskResult
    from ensemble_ray.fed.bodies import FedBodies
    from ensemble_ray.fed.ports import FedFactories, FedRecord, FedWatch
    from ensemble_ray.fed.tasks import MadeTask, TaskMaker
    from ensemble_ray.items.pulling import ItemReader
    from ensemble_ray.messages import Fact
    from ensemble_ray.outputs import TaskOutput
    from ensemble_ray.ports import Clock, Journal
    from ensemble_ray.runtime import FedHouses
    from ensemble_ray.schedule.map_reduce import MapReduceMachine

__all__ = ["FedParts", "MapReduceConductor"]

_log = logging.getLogger(__name__)
#: Factories called in one go: so many tasks wait for the slowest of them.
_BATCH = 64
#: Failures that an error of the whole run shows, of the hundred thousand there may be.
_MOST_FAILURES = 100


class _ToldError(Exception):
    """The machine has been told of what went wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedParts:
    """What a conductor works with."""

    reader: ItemReader
    factories: FedFactories
    maker: TaskMaker
    kinds: Kinds
    bodies: FedBodies
    watch: FedWatch
    journal: Journal
    clock: Clock
    #: of a group, for people
    capacity: int
    #: tokens of an output (S-MR-60)
    weigh: Callable[[TaskOutput], int]


@dataclass(frozen=True, slots=True)
class _Work:
    """A work that was handed out and has not been reported."""

    level: int
    number: int
    kind: str
    agent: Agent | None
    task_description: str
    agent_role: str


class MapReduceConductor:
    """One fed run: its machine, its works, its end."""

    def __init__(
        self,
        parts: FedParts,
        *,
        run_id: str,
        epoch: int = 0,
        record: FedRecord | None = None,
        is_direct: bool = False,
    ) -> None:
        """Make one.

        Args:
            parts: What it works with.
            run_id: The run's id.
            epoch: What this owner of the run writes under.
            record: What is recorded of a run that goes on; None: it begins.
            is_direct: Whether its only task is that of the short-circuit (S-MR-81).
        """
        self._parts = parts
        self._run_id = run_id
        self._epoch = epoch
        self._record = record
        self._is_direct = is_direct
        self._houses: FedHouses
        self._machine: MapReduceMachine
        self._inbox: list[FedStimulus] = []
        self._woken = asyncio.Event()
        self._ended: EndFed | None = None
        self._broken: BaseException | None = None
        self._cause: BaseException | None = None
        #: index of each item by its number
        self._indices = array("q")
        #: items by number, from their pull to their end
        self._items: dict[int, object] = {}
        self._works: dict[str, _Work] = {}
        #: instances of those works by level and number
        self._instances: dict[tuple[int, int], str] = {}
        #: works to be stopped that no house has yet
        self._unwanted: set[tuple[int, int]] = set()
        self._making = asyncio.Lock()
        self._jobs: set[asyncio.Task[None]] = set()
        self._failures: list[FedFailure] = []
        self._failed_maps = 0

    # The run.

    async def conduct(self, houses: FedHouses, machine: MapReduceMachine) -> FedEnded:
        """Carry the run out to its end.

        Args:
            houses: Where its tasks are done; they deliver here.
            machine: What decides; fresh.

        Raises:
            RecordError, StaleEpochError: the record cannot be written, or is somebody else's now.
            EnsembleError: the houses are gone.
        """
        self._houses, self._machine = houses, machine
        houses.failed.add_done_callback(self._lost)
        clock = self._parts.clock
        started_at = clock.now()
        self._tell(Begun(at=started_at))
        try:
            while self._ended is None:
                await self._woken.wait()
                self._woken.clear()
                if self._broken is not None:
                    raise self._broken
                told, self._inbox = self._inbox, []
                self._carry_out(self._machine.handle(*told) if told else ())
        finally:
            for job in self._jobs:
                job.cancel()
            await self._parts.reader.close()
        return FedEnded(
            ending=self._ended,
            started_at=started_at,
            completed_at=clock.now(),
            failures=self._failures,
            map_count=len(self._indices),
            failed_maps=self._failed_maps,
            cause=self._cause,
        )

    def cancel(self) -> None:
        """End the run soon."""
        self._tell(CancelRequested(at=self._parts.clock.now()))

    def break_off(self, error: BaseException) -> None:
        """End the run with an error of everything around it; what was recorded can be gone on with."""
        self._broken = self._broken or error
        self._woken.set()

    def deliver(self, results: Sequence[TaskResult]) -> None:
        """Take results of the houses."""
        for result in results:
            self._take(result)

    def _tell(self, *stimuli: FedStimulus) -> None:
        self._inbox.extend(stimuli)
        self._woken.set()

    def _lost(self, failed: asyncio.Future[None]) -> None:
        if not failed.cancelled() and (error := failed.exception()) is not None:
            self.break_off(error)

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside the machine; what fails there is the user's, and ends the run."""

        async def done() -> None:
            try:
                await work
            except (RecordError, StaleEpochError) as error:
                self.break_off(error)
            except _ToldError:
                return
            except USER_ERRORS as error:
                self._fail(error)

        job = asyncio.get_running_loop().create_task(done())
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    def _fail(self, error: BaseException) -> None:
        """The source or a factory raised, or what it gave cannot be done."""
        self._cause = self._cause or error
        self._tell(SourceFailed(at=self._parts.clock.now()))

    # What the machine wants.

    def _carry_out(self, instructions: Sequence[FedInstruction]) -> None:
        maps: list[int] = []
        for instruction in instructions:
            match instruction:
                case StartMap():
                    maps.append(instruction.number)
                case PullItems():
                    self._do(self._pull(instruction.count))
                case StartReduce():
                    self._start_reduce(instruction)
                case StopWork():
                    self._stop(instruction.level, instruction.number)
                case Tell():
                    _log.warning("%s", instruction.text)
                case TellLeftOut():
                    key = self._key(instruction.level, instruction.number)
                    _log.warning("Run %s: %s failed and is left out; the others go on", self._run_id, key)
                case TellOversized():
                    self._tell_oversized(instruction)
                case EndFed():
                    self._ended = instruction
        self._start_maps(maps)

    def _tell_oversized(self, told: TellOversized) -> None:
        role = self._parts.bodies.output(told.level, told.number).agent_role
        _log.warning(
            "An output of '%s' (%s) has %d tokens, more than the budget of %d: it has a group of its own",
            role, self._key(told.level, told.number), told.tokens, self._parts.capacity,
        )  # fmt: skip

    def _key(self, level: int, number: int, *, is_final: bool = False) -> str:
        if self._is_direct:
            return DIRECT
        if is_final:
            return FINAL
        return reduce_key(level, number) if level else map_key(self._indices[number])

    # Items.

    async def _pull(self, count: int) -> None:
        await self._parts.watch.ready()
        pulled = await self._parts.reader.next(count)
        first = len(self._indices)
        refused: list[FedStimulus] = []
        digests: list[str] = []
        now = self._parts.clock.now()
        for number, entry in enumerate(pulled.items, start=first):
            if isinstance(entry, RefusedItem):
                index, item = entry.index, cast("object", entry.text)
                refused.append(ItemRefused(at=now, number=number))
            else:
                index, item = entry
            self._indices.append(index)
            self._items[number] = item
            digests.append(item_digest(item))
            if isinstance(entry, RefusedItem):
                self._refused(number, entry)
        await self._note_items(first, digests, is_exhausted=pulled.is_exhausted)
        self._tell(ItemsPulled(at=now, count=len(pulled.items), is_exhausted=pulled.is_exhausted), *refused)

    def _refused(self, number: int, entry: RefusedItem) -> None:
        """A line that is no item; its map has failed before it could begin (S-MR-125)."""
        now = self._parts.clock.now()
        failure = FedFailure(level=0, at=now, task_description=entry.text, agent_role="", error=entry.error)
        if len(self._failures) < _MOST_FAILURES:
            self._failures.append(failure)
        self._item_failed(number, entry.error, attempts=0)

    async def _note_items(self, first: int, digests: Sequence[str], *, is_exhausted: bool) -> None:
        """Put the items' hashes on record, unless they are there; then they are compared (S-MR-162)."""
        indices = self._indices[first:]
        if self._record is not None:
            known = self._record.check_items(first, indices, digests)
            if is_exhausted:
                self._record.check_end(len(self._indices))
            indices, digests = indices[known:], digests[known:]
        if digests:
            fact = items_fact(self._run_id, self._parts.clock.now(), indices=indices, digests=digests)
            await self._append(fact)

    async def _append(self, *facts: Fact, until: Until = Until.TAKEN) -> None:
        await self._parts.journal.append(facts, epoch=self._epoch, until=until)

    # Works.

    def _start_maps(self, numbers: Sequence[int]) -> None:
        fresh = [number for number in numbers if not self._is_known(0, number)]
        for first in range(0, len(fresh), _BATCH):
            self._do(self._make_maps(fresh[first : first + _BATCH]))

    def _start_reduce(self, group: StartReduce) -> None:
        if not self._is_known(group.level, group.number):
            self._do(self._make_reduce(group))

    def _is_known(self, level: int, number: int) -> bool:
        """Whether the record knows what came of a work; then the machine is told."""
        record = self._record
        if record is None:
            return False
        bodies, item = self._parts.bodies, None if level else self._items.get(number)
        if bodies.has(level, number):
            output = bodies.output(level, number)
            if not level:
                self._parts.watch.completed(number, self._indices[number], item, output)
            self._completed(level, number, output)
            return True
        failed = record.failure(level, number)
        if failed is not None:
            error, attempts = failed
            if not level:
                self._item_failed(number, error, attempts=attempts)
            self._tell(WorkFailed(at=self._parts.clock.now(), level=level, number=number))
            return True
        return False

    async def _make_maps(self, numbers: Sequence[int]) -> None:
        async with self._making:
            wanted = [number for number in numbers if not self._is_unwanted(0, number)]
            if not wanted:
                return
            with self._losing([(0, number) for number in wanted]):
                tasks = await self._parts.factories.maps([self._items[number] for number in wanted])
                made = await self._ready(tasks, [self._key(0, number) for number in wanted])
        kind = node_type(0, is_direct=self._is_direct)
        orders = [self._order(each, 0, number, kind) for number, each in zip(wanted, made, strict=True)]
        self._hand_out([order for order in orders if order is not None])

    async def _make_reduce(self, group: StartReduce) -> None:
        level, number = group.level, group.number
        key = self._key(level, number, is_final=group.is_final)
        inputs = [self._key(*each) for each in group.inputs]
        at = self._parts.clock.now()
        fact = group_fact(self._run_id, at, key=key, level=level, number=number, inputs=inputs)
        await self._append(fact, until=Until.WRITTEN)
        async with self._making:
            if self._is_unwanted(level, number):
                return
            with self._losing([(level, number)]):
                outputs = [self._parts.bodies.output(*each) for each in group.inputs]
                task, wanted = await self._parts.factories.reduce(outputs)
                (made,) = await self._ready([task], [key])
        kind = node_type(level, is_final=group.is_final)
        order = self._order(made, level, number, kind, [outputs[position] for position in wanted])
        self._hand_out([] if order is None else [order])

    async def _ready(self, tasks: Sequence[Task], keys: Sequence[str]) -> list[MadeTask]:
        """Make tasks ready, and put what was asked of a model for that on record."""
        maker = self._parts.maker
        try:
            return await maker.ready(tasks, keys)
        finally:
            if asked := maker.taken_facts():
                await self._append(*asked, until=Until.WRITTEN)

    @contextmanager
    def _losing(self, works: Sequence[tuple[int, int]]) -> Iterator[None]:
        """What cannot be made ends the run; of these works nobody else will report anything."""
        try:
            yield
        except USER_ERRORS as error:
            self._fail(error)
            self._unwanted.difference_update(works)
            now = self._parts.clock.now()
            self._tell(*(WorkCancelled(at=now, level=level, number=number) for level, number in works))
            raise _ToldError from error

    def _order(
        self, made: MadeTask, level: int, number: int, kind: str, context: Sequence[TaskOutput] = ()
    ) -> TaskOrder | None:
        """The order for a task that was made; None where it is unwanted by now."""
        if self._is_unwanted(level, number):
            return None
        record = self._record
        occurrence = 0 if record is None else record.occurrence(level, number)
        task = made.task
        order = TaskOrder(
            run_id=self._run_id,
            key=made.key,
            instance=instance_of(made.key, occurrence=occurrence),
            epoch=self._epoch,
            index=number + 1,
            task=task,
            agent_key=None if made.agent is None else self._parts.kinds.kind_of(made.agent),
            agent_role=made.agent_role,
            agent=made.agent,
            context=tuple(context),
            is_streaming=made.is_streaming,
            input_guardrails=len(task.input_guardrails),
            output_guardrails=len(task.output_guardrails),
        )
        self._instances[level, number] = order.instance
        self._works[order.key] = _Work(level, number, kind, made.agent, task.description, made.agent_role)
        return order

    def _hand_out(self, orders: Sequence[TaskOrder]) -> None:
        if orders:
            self._houses.start(orders)

    # Stopping.

    def _stop(self, level: int, number: int) -> None:
        """Stop a work, wherever it is: with a house, or about to be made."""
        instance = self._instances.get((level, number))
        if instance is None:
            self._unwanted.add((level, number))
        else:
            self._houses.stop([instance])

    def _is_unwanted(self, level: int, number: int) -> bool:
        """Whether a work that is about to be made was stopped; the machine is told that it is."""
        if (level, number) not in self._unwanted:
            return False
        self._unwanted.discard((level, number))
        self._tell(WorkCancelled(at=self._parts.clock.now(), level=level, number=number))
        return True

    # Results.

    def _take(self, result: TaskResult) -> None:
        work = self._works.pop(result.key, None)
        if work is None:
            return  # it was reported before
        level, number, error = work.level, work.number, result.error
        del self._instances[level, number]
        bodies, item = self._parts.bodies, self._items.get(work.number) if not work.level else None
        if result.status == "completed" and result.output is not None:
            output = bodies.keep(level, number, result.output, work.kind, agent=work.agent, item=item)
            if not level:
                self._parts.watch.completed(number, self._indices[number], item, output)
            self._completed(level, number, output)
            return
        bodies.lose(level, number, result.trace, work.kind, agent=work.agent, item=item)
        match result.status:
            case "failed" if isinstance(error, RecordError | StaleEpochError):
                self.break_off(error)
            case "failed" if isinstance(error, ValidationError):
                self._fail(error)  # what a factory gave cannot be done (S-SET-38)
                self._tell(WorkCancelled(at=result.at, level=level, number=number))
            case "failed":
                self._failed(work, result, error or RuntimeError("task failed without an error"))
            case "exited":
                self._tell(WorkExited(at=result.at, level=level, number=number, reason=result.exit_reason))
            case _:
                self._tell(WorkCancelled(at=result.at, level=level, number=number))
        self._items.pop(number, None) if not level else None

    def _completed(self, level: int, number: int, output: TaskOutput) -> None:
        if not level:
            self._items.pop(number, None)
        weight = self._parts.weigh(output)
        at = output.completed_at.timestamp()
        self._tell(WorkCompleted(at=at, level=level, number=number, weight_tokens=weight))

    def _failed(self, work: _Work, result: TaskResult, error: BaseException) -> None:
        _log.debug("%s failed: %s", result.key, message_of(error))
        if len(self._failures) < _MOST_FAILURES:
            self._failures.append(
                FedFailure(
                    level=work.level,
                    at=result.at,
                    task_description=work.task_description,
                    agent_role=work.agent_role,
                    error=error,
                )
            )
        if not work.level:
            self._item_failed(work.number, error, attempts=result.attempts)
        self._tell(WorkFailed(at=result.at, level=work.level, number=work.number))

    def _item_failed(self, number: int, error: BaseException, *, attempts: int) -> None:
        self._failed_maps += 1
        self._parts.watch.failed(self._indices[number], self._items.pop(number), error, attempts)
