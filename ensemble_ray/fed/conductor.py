"""MapReduceConductor: carries out what the machine of a fed run wants, in the process that has its factories. Room: fed.

In: items as they are pulled, results as they come. Out: tasks for the houses, facts for the record, outputs for the body
store, results for whoever reads them. Rules:
1. The machine decides. It is told everything by one task of the loop, in order, which carries out what it answers.
2. A group is on record before its reduce begins (S-MR-161). What the record knows is not made, asked or done again.
3. What a source, a factory or an estimator raises ends the run and reaches the caller as it is (S-MR-106, S-MR-123).
4. A run that ends waits for no code of the user's: what is being made when it is to be stopped counts as stopped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ensemble_ray.bounded_log import bounded_logger
from ensemble_ray.error_texts import brief, message_of
from ensemble_ray.errors import BudgetExhaustedError, RecordError, StaleEpochError, ValidationError
from ensemble_ray.execute.exits import exhaustion_told
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.items import ItemsRecorded
from ensemble_ray.fed.failures import FailureLog, failure_of
from ensemble_ray.fed.jobs import Jobs, as_error
from ensemble_ray.fed.making import NotMade
from ensemble_ray.fed.ports import FedEnded, FedFailure
from ensemble_ray.ids import RUN
from ensemble_ray.outputs import ExitReason, TaskOutput
from ensemble_ray.provider_errors import is_refusal
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

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import TaskResult
    from ensemble_ray.fed.bodies import FedBodies
    from ensemble_ray.fed.intake import Intake
    from ensemble_ray.fed.making import Envelope, OrderMaker, Work
    from ensemble_ray.fed.ports import FedRecord, FedWatch
    from ensemble_ray.fed.weights import Weights
    from ensemble_ray.runtime import FedHouses
    from ensemble_ray.schedule.map_reduce import MapReduceMachine

__all__ = ["FedParts", "MapReduceConductor"]

_log = bounded_logger(__name__)
#: With more tasks in flight, what comes within that time is taken together, s: one by one costs 1.6 times the processor.
_MANY = 64
_GATHER_S = 0.004
#: Factories called in one go: so many tasks wait for the slowest of them.
_BATCH = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class FedParts:
    """What a conductor works with."""

    intake: Intake
    orders: OrderMaker
    bodies: FedBodies
    watch: FedWatch
    #: of a group, for people
    capacity: int
    #: tokens of outputs (S-MR-60)
    weights: Weights
    #: what the record knows of a run that goes on; None: it begins
    record: FedRecord | None = None


class MapReduceConductor:
    """One fed run: its machine, its works, its end."""

    def __init__(self, envelope: Envelope, parts: FedParts) -> None:
        """Make one, of a run and what it works with."""
        self._envelope = envelope
        self._parts = parts
        self._orders, self._record = parts.orders, parts.record
        self._houses: FedHouses
        self._machine: MapReduceMachine
        self._inbox: list[FedStimulus] = []
        self._woken = asyncio.Event()
        self._ended: EndFed | None = None
        self._broken: BaseException | None = None
        self._cause: BaseException | None = None
        self._spent: BudgetExhaustedError | None = None
        self._refusal: FedFailure | None = None
        #: works that were handed out and have not been reported, by level and number, and by key
        self._works: dict[tuple[int, int], Work] = {}
        self._by_key: dict[str, Work] = {}
        self._final: tuple[int, int] | None = None
        #: works that were stopped before a house had them
        self._unwanted: set[tuple[int, int]] = set()
        #: works that are done, and whose outputs are being weighed
        self._weighed: set[tuple[int, int]] = set()
        self._jobs = Jobs(self._fail, self.break_off)
        self._failures = FailureLog()
        self._why: dict[tuple[int, int], str] = {}

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
                if len(self._works) > _MANY:
                    await clock.sleep(_GATHER_S)
                self._woken.clear()
                if self._broken is not None:
                    raise self._broken
                told, self._inbox = self._inbox, []
                self._carry_out(self._machine.handle(*told) if told else ())
        finally:
            self._jobs.leave()
        return FedEnded(
            ending=self._ended,
            started_at=started_at,
            completed_at=clock.now(),
            failures=self._failures.first,
            failed_maps=self._failures.failed_maps,
            cause=self._cause,
            refusal=self._refusal,
            warning="" if self._spent is None else exhaustion_told((self._spent,)),
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
        try:
            for result in results:
                self._take(result)
        except Exception as error:  # noqa: BLE001  such as a full disk: nobody else would tell the run
            self.break_off(error)

    def _tell(self, *stimuli: FedStimulus) -> None:
        self._inbox.extend(stimuli)
        self._woken.set()

    def _lost(self, failed: asyncio.Future[None]) -> None:
        if not failed.cancelled() and (error := failed.exception()) is not None:
            self.break_off(error)

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
                    self._jobs.do(self._pull(instruction.count))
                case StartReduce():
                    self._start_reduce(instruction)
                case StopWork():
                    self._stop(instruction.level, instruction.number)
                case Tell():
                    _log.warning("%s", instruction.text)
                case TellLeftOut():
                    place = (instruction.level, instruction.number)
                    told = (self._orders.key(*place), self._why.pop(place, ""))
                    _log.warning("Run %s: %s failed and is left out%s", self._envelope.run_id, *told)
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
        intake = self._parts.intake
        room = await self._parts.watch.room(lambda: intake.in_flight)
        taken = await intake.pull(min(count, room))
        now = self._envelope.clock.now()
        if taken.is_news:
            told = ItemsRecorded.of(taken.indices, taken.digests, are_all=taken.is_exhausted)
            await self._envelope.append(Fact(run=self._envelope.run_id, name=RUN, at=now, data=told))
        for number, entry in taken.refused.items():
            self._lose_item(number, entry.text, entry.error, now)
        pulled = ItemsPulled(at=now, count=taken.count, is_exhausted=taken.is_exhausted)
        self._tell(pulled, *(ItemRefused(at=now, number=number) for number in taken.refused))

    def _lose_item(self, number: int, about: str, error: BaseException, now: float) -> None:
        """Fail the map of an item before it begins: its line is no item (S-MR-125), or its factory raised (S-MR-154)."""
        self._failures.add(FedFailure(level=0, at=now, task_description=about, agent_role="", error=error))
        self._item_failed(number, error, attempts=0)

    # Works.

    def _start_maps(self, numbers: Sequence[int]) -> None:
        fresh = [number for number in numbers if not self._is_known(0, number)]
        for first in range(0, len(fresh), _BATCH):
            batch = fresh[first : first + _BATCH]
            self._jobs.do(self._make([(0, number) for number in batch], self._orders.maps(batch, self._is_unwanted)))

    def _start_reduce(self, group: StartReduce) -> None:
        if group.is_final:
            self._final = (group.level, group.number)
        if not self._is_known(group.level, group.number):
            making = self._orders.reduce(group, self._is_unwanted)
            self._jobs.do(self._make([(group.level, group.number)], making))

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
        failure = record.failure(level, number)
        if failure is not None:
            self._failures.add(failure)
            if not level:
                self._item_failed(number, failure.error, attempts=failure.attempts)
            self._tell(WorkFailed(at=self._envelope.clock.now(), level=level, number=number))
            return True
        return False

    async def _make(self, works: Sequence[tuple[int, int]], making: Awaitable[list[Work | NotMade]]) -> None:
        """Make works and hand them out; where they cannot be made, nobody else will report anything of them."""
        try:
            made = await making
        except (RecordError, StaleEpochError):
            raise
        except BudgetExhaustedError as spent:  # whoever makes agents asks a model, too
            self._spent = self._spent or spent
            now, reason = self._envelope.clock.now(), ExitReason.BUDGET_EXHAUSTED
            self._tell(*(WorkExited(at=now, level=level, number=number, reason=reason) for level, number in works))
            return
        except BaseException as error:
            if self._jobs.is_left:
                raise
            self._fail(as_error(error))
            now = self._envelope.clock.now()
            self._tell(*(WorkCancelled(at=now, level=level, number=number) for level, number in works))
            return
        begun: list[Work] = []
        for work in made:
            if self._is_unwanted(work.level, work.number):
                continue
            if isinstance(work, NotMade):
                now = self._envelope.clock.now()
                self._why[0, work.number] = f": {brief(message_of(work.error))}"
                self._lose_item(work.number, f"Item {self._parts.intake.index(work.number)}", work.error, now)
                self._tell(WorkFailed(at=now, level=0, number=work.number))
            else:
                self._works[work.level, work.number] = self._by_key[work.order.key] = work
                begun.append(work)
        if begun:
            self._houses.start([work.order for work in begun])

    # Stopping.

    def _stop(self, level: int, number: int) -> None:
        """Stop a work, wherever it is: with a house, about to be made, or done and being weighed."""
        work, now = self._works.get((level, number)), self._envelope.clock.now()
        if work is not None:
            self._houses.stop([work.order.instance])
        elif (level, number) in self._weighed:
            self._tell(WorkCompleted(at=now, level=level, number=number, weight_tokens=0))  # grouped no more
        else:
            self._unwanted.add((level, number))
            self._tell(WorkCancelled(at=now, level=level, number=number))

    def _is_unwanted(self, level: int, number: int) -> bool:
        """Whether a work that is about to be made was stopped."""
        return (level, number) in self._unwanted

    # Results.

    def _take(self, result: TaskResult) -> None:
        work = self._by_key.pop(result.key, None)
        if work is None:
            return  # it was reported before
        level, number, error = work.level, work.number, result.error
        del self._works[level, number]
        bodies, item = self._parts.bodies, None if level else self._parts.intake.item(number)
        if result.status == "completed" and result.output is not None:
            output = bodies.keep(level, number, result.output, work.kind, item=item)
            if not level:
                self._parts.watch.completed(number, self._parts.intake.index(number), item, output)
            self._completed(level, number, output)
            return
        bodies.lose(level, number, result.trace, work.kind, item=item)
        match result.status:
            case "failed" if isinstance(error, RecordError | StaleEpochError):
                self.break_off(error)
            case "failed" if error is not None and is_refusal(error) and work.order.task.handler is None:
                self._refusal = self._refusal or failure_of(level, work.order, result, error)
                self._tell(SourceFailed(at=result.at), WorkCancelled(at=result.at, level=level, number=number))
            case "failed" if isinstance(error, ValidationError):
                self._fail(error)  # what a factory gave cannot be done (S-SET-38)
                self._tell(WorkCancelled(at=result.at, level=level, number=number))
            case "failed":
                self._failed(work, result, error or RuntimeError("task failed without an error"))
            case "exited":
                self._spent = self._spent or (error if isinstance(error, BudgetExhaustedError) else None)
                self._tell(WorkExited(at=result.at, level=level, number=number, reason=result.exit_reason))
            case _:
                self._tell(WorkCancelled(at=result.at, level=level, number=number))
        if not level:
            self._parts.intake.done(number)

    def _completed(self, level: int, number: int, output: TaskOutput) -> None:
        if not level:
            self._parts.intake.done(number)
        is_final = (level, number) == self._final  # it comes together with nothing
        weight = 0 if is_final else self._parts.weights.known(output)
        if weight is None:
            self._weighed.add((level, number))
            self._jobs.do(self._weigh(level, number, output))
        else:
            at = output.completed_at.timestamp()
            self._tell(WorkCompleted(at=at, level=level, number=number, weight_tokens=weight))

    async def _weigh(self, level: int, number: int, output: TaskOutput) -> None:
        try:
            weight = await self._parts.weights.asked(output)
        except BaseException:
            # It is done, whatever becomes of the run.
            self._tell(WorkCompleted(at=self._envelope.clock.now(), level=level, number=number, weight_tokens=0))
            raise
        finally:
            self._weighed.discard((level, number))
        at = output.completed_at.timestamp()
        self._tell(WorkCompleted(at=at, level=level, number=number, weight_tokens=weight))

    def _failed(self, work: Work, result: TaskResult, error: BaseException) -> None:
        self._why[work.level, work.number] = f": {brief(message_of(error))}"
        self._failures.add(failure_of(work.level, work.order, result, error))
        if not work.level:
            self._item_failed(work.number, error, attempts=result.attempts)
        self._tell(WorkFailed(at=result.at, level=work.level, number=work.number))

    def _item_failed(self, number: int, error: BaseException, *, attempts: int) -> None:
        intake = self._parts.intake
        self._parts.watch.failed(intake.index(number), intake.done(number), error, attempts)
