"""Journal each stimulus, pass it to the source of the run, and carry out the instructions; one class for every run.

A stimulus is journaled before the source handles it, but need not be committed: a lost one is repeated from the task's
facts (S-DUR-30). The coordinator waits for a cancellation, for an answer of user code (S-LOOP-54), and for completions
whose order matters (S-DUR-136). The first result of a task counts; a late result of a replaced process is not recorded
(S-PAR-12). Outputs stay unread, so a scheduler's process runs no user code.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, assert_never

from msgspec import Struct
from msgspec.structs import replace

from ensemble_ray.errors import ConstraintViolationError, RecordError, StaleEpochError
from ensemble_ray.execute.effects import recorded_output
from ensemble_ray.execute.orders import EvaluationFailed, HistoryPart, TaskOrder, TaskResult
from ensemble_ray.execute.redaction import clean_fact, record_values
from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.facts.runs import (
    DirectiveFact,
    DirectiveRecorded,
    ModelSwitched,
    PlanRecorded,
    RecordedError,
    RunInterrupted,
)
from ensemble_ray.plan.plan import LoopUnit, Plan
from ensemble_ray.ports import Clock, Journal, Persistence
from ensemble_ray.process.concurrency import USER_ERRORS
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.record.result import error_of_unit
from ensemble_ray.record.resume.reading import GivenDirectives
from ensemble_ray.record.units import EndedUnits
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    End,
    Evaluate,
    GraphResult,
    Inform,
    Instruction,
    IterationEnded,
    LoopResult,
    Question,
    Skip,
    Start,
    StepEnded,
    UnitQuestion,
    Warn,
    WarnLeftOut,
    WarnOversized,
)
from ensemble_ray.schedule.machine import Source
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    CancelRequested,
    Completed,
    Continued,
    Evaluated,
    Exited,
    Failed,
    Stimulus,
    Waiting,
)
from ensemble_ray.text.redaction import Redaction
from ensemble_ray.values.ids import RUN, instance_of, key_of
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.reviews import Directive, ModelSwitch, OpenReview, RunDirective
from ensemble_ray.values.task_output import TaskOutput

AnyOrder: TypeAlias = TaskOrder[Any, Any, Any]  # with objects inline, with bytes in a scheduler actor
AnyResult: TypeAlias = TaskResult[Any, Any]
OutcomeT_co = TypeVar("OutcomeT_co", covariant=True)


class Executor(Protocol):
    """Runs tasks. Results arrive through `Coordinator.deliver`."""

    def start(self, orders: Sequence[AnyOrder], /) -> None:
        """Run these tasks; never waits."""

    def stop(self, instances: Sequence[str], /) -> None:
        """Stop tasks; each is still reported within the grace period."""


class TaskReporter(Protocol):
    """The coordinator, from the view of its run's tasks."""

    def submit(self, orders: Sequence[AnyOrder]) -> None:
        """Submit orders to the executor."""

    def stop(self, instances: Sequence[str]) -> None:
        """Stop those of these tasks that run; each is still reported."""

    def notify(self, *stimuli: Stimulus) -> None:
        """Send stimuli to the source after all earlier ones."""

    def interrupt(self, ending: End) -> None:
        """Stop running tasks, start no more, and end this way without the source."""

    def break_off(self, error: BaseException) -> None:
        """End the run with an infrastructure error; it can be resumed."""


class InitialStep(Struct, frozen=True, kw_only=True):
    stimuli: Sequence[Stimulus] = ()
    instructions: Sequence[Instruction] = ()  # of a source after it replayed its recorded stimuli


class RunTasks(Protocol[OutcomeT_co]):
    """The tasks of one run: their definitions, records and results."""

    @property
    def depends_on_order(self) -> bool:
        """Whether a resumed run needs the order of completions."""
        ...

    @property
    def directives(self) -> RunDirectives: ...

    async def open(self, source: Source, reporter: TaskReporter) -> InitialStep:
        """Begin or resume the run, and record that."""
        ...

    def encode(self, stimuli: Sequence[Stimulus]) -> Sequence[Fact]:
        """Return the facts of stimuli, unless these follow from other facts."""
        ...

    def look_up(self, start: Start) -> Sequence[Stimulus]:
        """Return the recorded result of a task, which then does not run again."""
        ...

    def make(self, starts: Sequence[Start]) -> None:
        """Create and submit orders, now or later; notify the source of orders that cannot be created."""

    def discard(self, instance: str) -> bool:
        """Drop a stopped task without an order; return whether its end will be reported."""
        ...

    def accept(self, result: AnyResult) -> Sequence[Stimulus]:
        """Store a result; return the stimuli for the source.

        `StaleEpochError` (another process owns this run) and `RecordError` are no failures of the task.
        """
        ...

    def evaluate(self, question: Question) -> None:
        """Call the user's code, and notify the source of the answer."""

    def announce(self, what: IterationEnded | StepEnded) -> None:
        """Notify listeners before later instructions are carried out."""

    def log(self, what: Inform | Warn | WarnLeftOut | WarnOversized) -> None: ...

    async def close(self, ending: End) -> OutcomeT_co: ...

    def detach(self) -> None:
        """Stop all waiting; called once at every kind of end."""


class Predicates(Protocol):
    """The user's predicates and conditions in their own process, one copy per run (S-LOOP-54)."""

    async def holds(
        self, question: UnitQuestion, *, sent_count: int, new: Sequence[HistoryPart[Any]]
    ) -> bool | EvaluationFailed | None:
        """Evaluate a predicate or condition, after the history parts in `new`; earlier questions sent `sent_count`.

        Return the verdict or error. None: a replaced process has fewer parts and needs the whole history.
        """
        ...

    def drop(self, unit: str) -> None: ...


class MemoryResets(Protocol):
    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        """Reset a loop's memory before an iteration (S-LOOP-91, S-LOOP-93); return an error."""
        ...


_log = bounded_logger(__name__)
_MANY = 64  # with more in flight, stimuli are handled together, since one by one costs 1.6 times the CPU
_GATHER_S = 0.004
_ENDS = Completed | Failed | Exited | Cancelled | Waiting

Outcome = TypeVar("Outcome")


class Coordinator(Generic[Outcome]):
    """Carries out one run: its source, its tasks, its end. Fulfils `TaskReporter`."""

    def __init__(
        self,
        journal: RunJournal,
        tasks: RunTasks[Outcome],
        find_decided: Callable[[], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        """`find_decided` returns suspended tasks whose gates were decided since; None: only this process decides."""
        self._journal = journal
        self._tasks = tasks
        self._find_decided = find_decided
        self._source: Source
        self._executor: Executor
        self._inbox: list[Stimulus] = []
        self._woken = asyncio.Event()
        self._in_flight: set[str] = set()  # submitted to the executor and not yet reported
        self._open: set[str] = set()  # started and not ended
        self._ending: End | None = None
        self._interruption: End | None = None  # the run's end once no task is in flight; overrides the source
        self._broken: BaseException | None = None
        #: done when the source handled a cancellation, or never will
        self._cancelling: asyncio.Future[None] | None = None
        self.has_ended = False
        #: done when the first tasks were started, or never will be
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, source: Source, executor: Executor) -> Outcome:
        """Carry out the run with a fresh source; raise `RecordError`, `StaleEpochError`, or a broken part's error."""
        self._source, self._executor = source, executor
        try:
            outcome = await self._tasks.close(await self._work())
        except Exception as error:
            if self.begun.done():
                await self._journal.record_break(error)
            raise
        else:
            self.has_ended = True
            return outcome
        finally:
            self._tasks.detach()
            for waiting in (self.begun, self._cancelling):
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)

    async def _work(self) -> End:
        if self._broken is not None:
            raise self._broken
        await self._begin()
        while (ending := await self._end()) is None:
            await self._woken.wait()
            if len(self._open) > _MANY:
                await self._journal.clock.sleep(_GATHER_S)
            self._woken.clear()
            if self._broken is not None:
                raise self._broken
            await self._handle()
        return ending

    def cancel(self) -> asyncio.Future[None]:
        """Request the end of the run; the future completes when that is recorded."""
        if self._cancelling is None:
            self._cancelling = asyncio.get_running_loop().create_future()
        if self._ending is None:
            self.notify(CancelRequested(at=self._journal.now()))
        elif not self._cancelling.done():
            self._cancelling.set_result(None)
        return self._cancelling

    async def inject(self, directive: RunDirective) -> bool:
        """Record a directive for later tasks; return False if none will start."""
        await asyncio.shield(self.begun)  # the record begins with the run
        if self._ending is not None or self._broken is not None:
            return False
        await self._tasks.directives.add(directive)
        return True

    def resume_tasks(self, instances: Sequence[str]) -> None:
        self.notify(Continued(at=self._journal.now(), instances=tuple(instances)))

    def deliver(self, results: Sequence[AnyResult]) -> None:
        try:
            for result in results:
                if result.instance in self._in_flight:
                    self._in_flight.remove(result.instance)
                    self.notify(*self._tasks.accept(result))
        except Exception as error:  # noqa: BLE001  such as a full disk: nobody else would tell the run
            self.break_off(error)

    def notify(self, *stimuli: Stimulus) -> None:
        self._inbox.extend(stimuli)
        for each in stimuli:
            if isinstance(each, _ENDS):
                self._open.discard(each.instance)
        self._woken.set()

    def submit(self, orders: Sequence[AnyOrder]) -> None:
        self._in_flight.update([order.instance for order in orders])
        self._executor.start(orders)

    def stop(self, instances: Sequence[str]) -> None:
        if stopping := [instance for instance in instances if instance in self._in_flight]:
            self._executor.stop(stopping)

    def interrupt(self, ending: End) -> None:
        if self._interruption is None:
            self._interruption = ending
            self.stop(list(self._in_flight))
            self._woken.set()

    def break_off(self, error: BaseException) -> None:
        self._broken = self._broken or error
        self._woken.set()

    def break_off_with(self, failed: asyncio.Future[None]) -> None:
        """End the run with the error of a broken part."""
        if not failed.cancelled() and (error := failed.exception()) is not None:
            self.break_off(error)

    async def _end(self) -> End | None:
        """Return the end of the run; None while it continues."""
        if self._interruption is not None:
            return None if self._in_flight else self._interruption
        ending = self._ending
        if ending is None or ending.state is not RunState.WAITING or self._find_decided is None:
            return ending
        self._ending = None  # handle a concurrent request to cancel
        if decided := await self._find_decided():
            self.resume_tasks(decided)
        if not self._inbox and self._broken is None:
            self._ending = ending
        return self._ending

    async def _begin(self) -> None:
        opening = await self._tasks.open(self._source, self)
        first = opening.stimuli
        if self._cancelling is not None:  # the run was cancelled before it began, and never begins
            first = [stimulus for stimulus in first if not isinstance(stimulus, Begun)]
        self._inbox = [*first, *self._inbox]
        if self._inbox:
            self._woken.set()
        self._carry_out(opening.instructions)
        if not self._inbox:
            self.begun.set_result(None)

    async def _handle(self) -> None:
        stimuli = self._next()
        if not stimuli or self._interruption is not None:
            return
        is_wish = isinstance(stimuli[0], CancelRequested)
        waited_for = (Evaluated, Completed) if self._tasks.depends_on_order else (Evaluated,)
        is_needed = is_wish or any(isinstance(each, waited_for) for each in stimuli)
        facts = self._tasks.encode(stimuli)
        if facts:
            await self._journal.append(*facts, until=Persistence.COMMITTED if is_needed else Persistence.QUEUED)
        self._carry_out(self._source.handle(*stimuli))
        if is_wish and self._cancelling is not None and not self._cancelling.done():
            self._cancelling.set_result(None)
        if not self.begun.done():
            self.begun.set_result(None)

    def _next(self) -> Sequence[Stimulus]:
        """A cancellation is handled alone: it is too late if the run ends before it."""
        stimuli, self._inbox = self._inbox, []
        if self._cancelling is not None and len(stimuli) > 1:
            wishes = [index for index, stimulus in enumerate(stimuli) if isinstance(stimulus, CancelRequested)]
            if wishes:
                cut = wishes[0] or 1
                stimuli, rest = stimuli[:cut], stimuli[cut:]
                self._inbox = [*rest, *self._inbox]
                self._woken.set()
        return stimuli

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        starts: list[Start] = []
        cancelled: list[str] = []
        for instruction in instructions:
            match instruction:
                case Start():
                    starts.append(instruction)
                case Cancel():
                    cancelled.append(instruction.instance)
                case Skip():
                    _log.debug("Task '%s' is skipped: %s", key_of(instruction.instance), instruction.reason)
                case Evaluate():
                    self._tasks.evaluate(instruction.question)
                case Announce():
                    self._tasks.announce(instruction.what)
                case Inform() | Warn() | WarnLeftOut() | WarnOversized():
                    self._tasks.log(instruction)
                case End():
                    self._ending = instruction
                    self._woken.set()
                case _:
                    assert_never(instruction)
        self._start_and_stop(starts, cancelled)

    def _start_and_stop(self, starts: Sequence[Start], cancelled: Sequence[str]) -> None:
        fresh: list[Start] = []
        for start in starts:
            if recorded := self._tasks.look_up(start):
                self.notify(*recorded)
            else:
                fresh.append(start)
        if fresh:
            self._open.update([start.instance for start in fresh])
            self._tasks.make(fresh)
        if cancelled:
            self.stop(cancelled)
        for instance in cancelled:
            # No executor will run it, or it stands for several tasks and reports its end itself.
            if instance not in self._in_flight and not self._tasks.discard(instance):
                self.notify(Cancelled(at=self._journal.now(), instance=instance))


class RunBackgroundTasks:
    def __init__(self, break_off: Callable[[BaseException], None]) -> None:
        self._break_off = break_off
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_left = False

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            try:
                await work
            except BaseException as error:  # no code cancels these tasks during the run, so any error breaks it
                if self.is_left:
                    raise
                self._break_off(as_error(error))

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def detach(self) -> None:
        self.is_left = True
        for task in self._tasks:
            task.cancel()


def as_error(raised: BaseException) -> BaseException:
    """Return an error of user code that is safe to raise: a cancellation would cancel the caller."""
    if isinstance(raised, USER_ERRORS):
        return raised
    error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


class RunJournal(Struct, frozen=True, kw_only=True):
    run_id: str
    epoch: int
    journal: Journal
    clock: Clock
    redaction: Redaction | None = None  # None: no redactor

    def now(self) -> float:
        return self.clock.now()

    def fact(self, name: str, data: FactData, at: float | None = None) -> Fact:
        moment = self.clock.now() if at is None else at
        return Fact(run=self.run_id, name=name, at=moment, data=data, epoch=self.epoch)

    async def append(self, *facts: Fact, until: Persistence = Persistence.QUEUED) -> None:
        if (redaction := self.redaction) is not None:
            facts = tuple([replace(fact, data=clean_fact(redaction, fact.data)) for fact in facts])
            if facts and isinstance(facts[0].data, PlanRecorded):  # the first fact of the run, before all others
                await self.journal.append(facts[:1], epoch=self.epoch)
                facts = facts[1:]
            await record_values(redaction, self._append_value, run_id=self.run_id, at=self.now(), epoch=self.epoch)
        await self.journal.append(facts, epoch=self.epoch, until=until)

    async def _append_value(self, fact: Fact) -> None:
        await self.journal.append([fact], epoch=self.epoch)

    async def record_break(self, error: Exception) -> None:
        """Record why a run stopped without an end, if possible (S-ERR-69)."""
        if not isinstance(error, StaleEpochError):
            with contextlib.suppress(RecordError, StaleEpochError):  # the error itself is raised
                await self.append(self.fact(RUN, RunInterrupted.of(RecordedError.of(error))))


class OwnReason(NamedTuple):
    """`at` is Unix time, s."""

    at: float
    error: RecordedError


async def unit_reasons(
    plan: Plan, ending: End, raised: Mapping[str, RecordedError], journal: Journal
) -> Sequence[OwnReason]:
    """Return why units failed; `raised` has errors of user code by path of the unit."""
    outputs: dict[str, TaskOutput] = {}
    steps = [step for each in ending.units if isinstance(each, GraphResult) for step in each.steps]
    for failure in ending.unit_failures:
        if failure.reason == "no_edge":
            shown = next((step.instance for step in steps if step.number == failure.step), "")
            loops = [each for each in ending.units if isinstance(each, LoopResult) and each.unit == shown]
            for instance in (shown, *(one for loop in loops for names in loop.iterations for one in names)):
                output = recorded_output(await journal.lookup_recorded(instance), instance)
                if output is not None:
                    outputs[instance] = output
    ended = EndedUnits(plan=plan, results=ending.units, failures=ending.unit_failures, outputs=outputs)
    found: list[OwnReason] = []
    for each in ending.unit_failures:
        reason = raised.get(each.unit) or RecordedError.of(error_of_unit(ended, each, None))
        path = instance_of(each.unit, occurrence=each.step - 1) if each.step else each.unit
        found.append(OwnReason(each.at, reason._replace(instance=path)))
    return found


def constraint_reasons(plan: Plan, delegated_roles: Collection[str], at: float) -> Sequence[OwnReason]:
    """Return the unmet constraints of a manager as one reason (S-HIER-50)."""
    violations = () if plan.hierarchy is None else violations_of(plan.hierarchy, delegated_roles)
    return [OwnReason(at, RecordedError.of(ConstraintViolationError(violations)))] if violations else []


class SuspendedTasks:
    def __init__(self, is_waiting: Callable[[str], bool]) -> None:
        """`is_waiting` returns whether a task starts again when the run resumes, unless it was cancelled meanwhile."""
        self._is_waiting = is_waiting
        self._reviews: dict[str, tuple[OpenReview, ...]] = {}

    @property
    def reviews(self) -> Mapping[str, Sequence[OpenReview]]:
        return {instance: reviews for instance, reviews in self._reviews.items() if self._is_waiting(instance)}

    def add(self, result: AnyResult) -> Waiting:
        self._reviews[result.instance] = result.open_reviews
        return Waiting(at=result.at, instance=result.instance)

    def reactivate(self, instance: str) -> bool:
        """Drop the gates of a dispatched task; return whether it was suspended."""
        return self._reviews.pop(instance, None) is not None

    def open_gates(self, ending: End) -> tuple[OpenReview, ...]:
        if ending.state is not RunState.WAITING:
            return ()
        return tuple(each for reviews in self.reviews.values() for each in reviews)


class RunDirectives:
    def __init__(self, journal: RunJournal, recorded: Sequence[DirectiveFact] = ()) -> None:
        self._journal = journal
        self._given = GivenDirectives(recorded)

    @property
    def switches(self) -> tuple[ModelSwitch, ...]:
        """For later tasks, if they differ from the agents' own."""
        return self._given.switches

    async def add(self, directive: RunDirective) -> None:
        now = self._journal.now()
        match directive:
            case Directive(text=text, ttl_s=ttl_s, given_by=given_by):
                expires_at = None if ttl_s is None else now + ttl_s
                if (redaction := self._journal.redaction) is not None:
                    text = redaction.clean(text)
                data: DirectiveFact = DirectiveRecorded(text=text, expires_at=expires_at, given_by=given_by)
            case ModelSwitch(model=model, agent=agent, given_by=given_by):
                data = ModelSwitched(model=model, agent=agent, given_by=given_by)
            case _:
                assert_never(directive)
        await self._journal.append(self._journal.fact(RUN, data, now), until=Persistence.COMMITTED)
        self._given.apply(data)

    def active(self) -> tuple[str, ...]:
        """Return the texts for a new task, in the order in which users sent them."""
        return self._given.active(self._journal.now()) if self._given.has_texts else ()
