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
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ensemble_ray.errors import RecordError, StaleEpochError, ValidationError, message_of
from ensemble_ray.fed.ports import FedEnded, FedFailure
from ensemble_ray.record.map_reduce_data import (
    items_fact,
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
    from ensemble_ray.execute.orders import TaskResult
    from ensemble_ray.fed.bodies import FedBodies
    from ensemble_ray.fed.intake import Intake
    from ensemble_ray.fed.making import Envelope, OrderMaker, Work
    from ensemble_ray.fed.ports import FedRecord, FedWatch
    from ensemble_ray.items.pulling import RefusedItem
    from ensemble_ray.outputs import TaskOutput
    from ensemble_ray.runtime import FedHouses
    from ensemble_ray.schedule.map_reduce import MapReduceMachine

__all__ = ["FedParts", "MapReduceConductor"]

_log = logging.getLogger(__name__)
#: Factories called in one go: so many tasks wait for the slowest of them.
_BATCH = 64
#: Failures that an error of the whole run shows, of the hundred thousand there may be.
_MOST_FAILURES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class FedParts:
    """What a conductor works with."""

    intake: Intake
    orders: OrderMaker
    bodies: FedBodies
    watch: FedWatch
    #: of a group, for people
    capacity: int
    #: tokens of an output (S-MR-60)
    weigh: Callable[[TaskOutput], int]
    #: what the record knows of a run that goes on; None: it begins
    record: FedRecord | None = None


class MapReduceConductor:
    """One fed run: its machine, its works, its end."""

    def __init__(self, envelope: Envelope, parts: FedParts) -> None:
        """Make one, of a run and what it works with."""
        self._envelope = envelope
        self._parts = parts
        self._orders = parts.orders
        self._record = parts.record
        self._houses: FedHouses
        self._machine: MapReduceMachine
        self._inbox: list[FedStimulus] = []
        self._woken = asyncio.Event()
        self._ended: EndFed | None = None
        self._broken: BaseException | None = None
        self._cause: BaseException | None = None
        #: works that were handed out and have not been reported, by level and number, and by key
        self._works: dict[tuple[int, int], Work] = {}
        self._by_key: dict[str, Work] = {}
        #: works to be stopped that no house has yet
        self._unwanted: set[tuple[int, int]] = set()
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
        clock = self._envelope.clock
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
            await self._parts.intake.close()
        return FedEnded(
            ending=self._ended,
            started_at=started_at,
            completed_at=clock.now(),
            failures=self._failures,
            map_count=self._parts.intake.count,
            failed_maps=self._failed_maps,
            cause=self._cause,
        )

    def cancel(self) -> None:
        """End the run soon."""
        self._tell(CancelRequested(at=self._envelope.clock.now()))

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
            except USER_ERRORS as error:
                self._fail(error)

        job = asyncio.get_running_loop().create_task(done())
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    def _fail(self, error: BaseException) -> None:
        """The source or a factory raised, or what it gave cannot be done."""
        self._cause = self._cause or error
        self._tell(SourceFailed(at=self._envelope.clock.now()))

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
                    key = self._orders.key(instruction.level, instruction.number)
                    _log.warning("Run %s: %s failed and is left out; the others go on", self._envelope.run_id, key)
                case TellOversized():
                    self._tell_oversized(instruction)
                case EndFed():
                    self._ended = instruction
        self._start_maps(maps)

    def _tell_oversized(self, told: TellOversized) -> None:
        role = self._parts.bodies.output(told.level, told.number).agent_role
        _log.warning(
            "An output of '%s' (%s) has %d tokens, more than the budget of %d: it has a group of its own",
            role, self._orders.key(told.level, told.number), told.tokens, self._parts.capacity,
        )  # fmt: skip

    # Items.

    async def _pull(self, count: int) -> None:
        await self._parts.watch.ready()
        taken = await self._parts.intake.pull(count)
        now = self._envelope.clock.now()
        if taken.digests:
            await self._envelope.append(
                items_fact(self._envelope.run_id, now, indices=taken.indices, digests=taken.digests)
            )
        for number, entry in taken.refused.items():
            self._refused(number, entry, now)
        pulled = ItemsPulled(at=now, count=taken.count, is_exhausted=taken.is_exhausted)
        self._tell(pulled, *(ItemRefused(at=now, number=number) for number in taken.refused))

    def _refused(self, number: int, entry: RefusedItem, now: float) -> None:
        """A line that is no item; its map has failed before it could begin (S-MR-125)."""
        failure = FedFailure(level=0, at=now, task_description=entry.text, agent_role="", error=entry.error)
        if len(self._failures) < _MOST_FAILURES:
            self._failures.append(failure)
        self._item_failed(number, entry.error, attempts=0)

    # Works.

    def _start_maps(self, numbers: Sequence[int]) -> None:
        fresh = [number for number in numbers if not self._is_known(0, number)]
        for first in range(0, len(fresh), _BATCH):
            batch = fresh[first : first + _BATCH]
            self._do(self._make([(0, number) for number in batch], self._orders.maps(batch, self._is_unwanted)))

    def _start_reduce(self, group: StartReduce) -> None:
        if not self._is_known(group.level, group.number):
            making = self._orders.reduce(group, self._is_unwanted)
            self._do(self._make([(group.level, group.number)], making))

    def _is_known(self, level: int, number: int) -> bool:
        """Whether the record knows what came of a work; then the machine is told."""
        record = self._record
        if record is None:
            return False
        bodies, item = self._parts.bodies, None if level else self._parts.intake.item(number)
        if bodies.has(level, number):
            output = bodies.output(level, number)
            if not level:
                self._parts.watch.completed(number, self._parts.intake.index(number), item, output)
            self._completed(level, number, output)
            return True
        failed = record.failure(level, number)
        if failed is not None:
            error, attempts = failed
            if not level:
                self._item_failed(number, error, attempts=attempts)
            self._tell(WorkFailed(at=self._envelope.clock.now(), level=level, number=number))
            return True
        return False

    async def _make(self, works: Sequence[tuple[int, int]], making: Awaitable[list[Work]]) -> None:
        """Make works and hand them out; where they cannot be made, nobody else will report anything of them."""
        try:
            made = await making
        except (RecordError, StaleEpochError):
            raise
        except USER_ERRORS as error:
            self._fail(error)
            self._unwanted.difference_update(works)
            now = self._envelope.clock.now()
            self._tell(*(WorkCancelled(at=now, level=level, number=number) for level, number in works))
            return
        made = [work for work in made if not self._is_unwanted(work.level, work.number)]
        for work in made:
            self._works[work.level, work.number] = self._by_key[work.order.key] = work
        if made:
            self._houses.start([work.order for work in made])

    # Stopping.

    def _stop(self, level: int, number: int) -> None:
        """Stop a work, wherever it is: with a house, or about to be made."""
        work = self._works.get((level, number))
        if work is None:
            self._unwanted.add((level, number))
        else:
            self._houses.stop([work.order.instance])

    def _is_unwanted(self, level: int, number: int) -> bool:
        """Whether a work that is about to be made was stopped; the machine is told that it is."""
        if (level, number) not in self._unwanted:
            return False
        self._unwanted.discard((level, number))
        self._tell(WorkCancelled(at=self._envelope.clock.now(), level=level, number=number))
        return True

    # Results.

    def _take(self, result: TaskResult) -> None:
        work = self._by_key.pop(result.key, None)
        if work is None:
            return  # it was reported before
        level, number, error = work.level, work.number, result.error
        del self._works[level, number]
        bodies, item = self._parts.bodies, None if level else self._parts.intake.item(number)
        if result.status == "completed" and result.output is not None:
            output = bodies.keep(level, number, result.output, work.kind, agent=work.agent, item=item)
            if not level:
                self._parts.watch.completed(number, self._parts.intake.index(number), item, output)
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
        if not level:
            self._parts.intake.done(number)

    def _completed(self, level: int, number: int, output: TaskOutput) -> None:
        if not level:
            self._parts.intake.done(number)
        weight = self._parts.weigh(output)
        at = output.completed_at.timestamp()
        self._tell(WorkCompleted(at=at, level=level, number=number, weight_tokens=weight))

    def _failed(self, work: Work, result: TaskResult, error: BaseException) -> None:
        _log.debug("%s failed: %s", result.key, message_of(error))
        if len(self._failures) < _MOST_FAILURES:
            self._failures.append(
                FedFailure(
                    level=work.level,
                    at=result.at,
                    task_description=work.order.task.description,
                    agent_role=work.order.agent_role,
                    error=error,
                )
            )
        if not work.level:
            self._item_failed(work.number, error, attempts=result.attempts)
        self._tell(WorkFailed(at=result.at, level=work.level, number=work.number))

    def _item_failed(self, number: int, error: BaseException, *, attempts: int) -> None:
        self._failed_maps += 1
        intake = self._parts.intake
        self._parts.watch.failed(intake.index(number), intake.done(number), error, attempts)
