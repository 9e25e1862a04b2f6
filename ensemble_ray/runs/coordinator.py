"""Coordinator: journals the stimulus, asks the source, carries out.

One class for every run: of a plan or of tasks that are made on the way, inline, in the scheduler actor and in a process
that has the run's factories. What differs stands in the run's source, its `RunTasks` and its executor. Rules:
1. The source decides. It is told everything by one task of the loop, in order, which carries out what it answers.
2. A stimulus is in the journal before the source is told. It need not be committed: a task's own facts are, so that a lost
   one is told again (S-DUR-30). A wish to cancel and an answer of user code are nobody else's facts, and are waited for:
   what another process records must not follow from an answer that is lost (S-LOOP-54). So is a completion where their
   order decides what follows (S-DUR-136).
3. A task's first result counts; a late one of a process that was replaced is not even a fact (S-PAR-12).
4. It holds outputs as it got them and looks into none, so that a scheduler's process runs no user code.
5. A run that is about to wait for decisions looks once more for those that came meanwhile, and goes on with them (S-REV-124).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Protocol, TypeVar, assert_never

from ensemble_ray.errors import ConstraintViolationError, RecordError, StaleEpochError
from ensemble_ray.execute.effects import recorded_output
from ensemble_ray.facts.fact import Fact, FactData
from ensemble_ray.facts.runs import DirectiveRecorded, ModelSwitched, RecordedError, RunInterrupted
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.process.forks import USER_ERRORS
from ensemble_ray.record.failures import error_of_unit
from ensemble_ray.record.resume.reading import GivenDirectives
from ensemble_ray.record.units import EndedUnits
from ensemble_ray.schedule.hierarchy import violations_of
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    End,
    Evaluate,
    Forget,
    GraphResult,
    Inform,
    Instruction,
    LoopResult,
    Skip,
    Start,
    Wait,
    Warn,
    WarnLeftOut,
    WarnOversized,
)
from ensemble_ray.schedule.stimuli import (
    Begun,
    Cancelled,
    CancelRequested,
    Completed,
    Continued,
    Decided,
    Evaluated,
    Exited,
    Failed,
    Waiting,
)
from ensemble_ray.values.ids import RUN, key_of
from ensemble_ray.values.outputs import RunState
from ensemble_ray.values.reviews import Directive, ModelSwitch

if TYPE_CHECKING:
    from ensemble_ray.execute.orders import EvaluationFailed, FailureSummary, HistoryPart, TaskResult
    from ensemble_ray.facts.runs import DirectiveFact
    from ensemble_ray.plan.plan import LoopUnit, Plan
    from ensemble_ray.ports import Clock, Journal
    from ensemble_ray.schedule.instructions import EdgeMatches, IterationEnded, Question, StepEnded, UntilHolds
    from ensemble_ray.schedule.machine import Source
    from ensemble_ray.schedule.stimuli import Stimulus
    from ensemble_ray.values.reviews import OpenReview, RunDirective
    from ensemble_ray.values.task_output import TaskOutput


class WithInstance(Protocol):
    """An order or a result, as far as a coordinator looks into it."""

    @property
    def instance(self) -> str:
        """Return the task's instance."""
        ...


#: One task that should run now, as its executor takes it.
Order = TypeVar("Order", bound=WithInstance)
OrderT_contra = TypeVar("OrderT_contra", contravariant=True)
#: What came of it, as its executor delivers it.
Result = TypeVar("Result", bound=WithInstance)
ResultT_contra = TypeVar("ResultT_contra", contravariant=True)
OrderT_co = TypeVar("OrderT_co", covariant=True)
OutcomeT_co = TypeVar("OutcomeT_co", covariant=True)
#: How an output is held: the object itself inline, its bytes in a scheduler actor.
OutputT_contra = TypeVar("OutputT_contra", contravariant=True)


class Executor(Protocol[OrderT_contra]):
    """Where tasks run. Results come back through `Coordinator.deliver`."""

    def start(self, orders: Sequence[OrderT_contra], /) -> None:
        """Run these tasks; never waits."""
        ...

    def stop(self, instances: Sequence[str], /) -> None:
        """Stop these tasks; each is still reported, within the executor's grace."""
        ...


class TaskReporter(Protocol[OrderT_contra]):
    """A coordinator, as the tasks of its run see it."""

    def submit(self, orders: Sequence[OrderT_contra]) -> None:
        """Hand orders to the executor."""
        ...

    def stop(self, instances: Sequence[str]) -> None:
        """Have the executor stop those of these that it has; each is still reported."""
        ...

    def notify(self, *stimuli: Stimulus) -> None:
        """Tell the source, after everything that it was told before."""
        ...

    def interrupt(self, ending: End) -> None:
        """Stop what runs, start no more, then end the run this way without asking its source."""
        ...

    def break_off(self, error: BaseException) -> None:
        """End the run with an error of everything around it; what was recorded can be gone on with."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a run begins, or goes on."""

    #: what the source is told first
    stimuli: Sequence[Stimulus] = ()
    #: what a source wants that was told its recorded stimuli again
    instructions: Sequence[Instruction] = ()


class RunTasks(Protocol[OrderT_co, ResultT_contra, OutcomeT_co]):
    """The tasks of one run: what they are made of, what is recorded of them, what came of them."""

    @property
    def depends_on_order(self) -> bool:
        """Whether a run that goes on must find the order in which tasks completed, and not only that they did."""
        ...

    @property
    def directives(self) -> RunDirectives:
        """What people told the run, for the orders that are made from then on."""
        ...

    async def open(self, source: Source, reporter: TaskReporter[OrderT_co]) -> Opening:
        """Begin, or go on: put that on record."""
        ...

    def encode(self, stimuli: Sequence[Stimulus]) -> Sequence[Fact]:
        """Return the facts of what the source is about to be told; none for runs whose stimuli follow from other facts."""
        ...

    def look_up(self, start: Start) -> Sequence[Stimulus]:
        """Return what the record says came of a task, which then does not run again; nothing where it says nothing."""
        ...

    def make(self, starts: Sequence[Start]) -> None:
        """Make orders and submit them, now or later; what cannot be made is notified of."""
        ...

    def discard(self, instance: str) -> bool:
        """Make no order of a task that was stopped before it had one; whether its end will be notified of from here."""
        ...

    def accept(self, result: ResultT_contra) -> Sequence[Stimulus]:
        """Keep what came of a task; return what the source is told.

        Raises:
            StaleEpochError: somebody else has this run now.
            RecordError: an executor could not write its facts. Neither is a failure of the task.
        """
        ...

    def evaluate(self, question: Question) -> None:
        """Ask the user's code, and notify of the answer."""
        ...

    def announce(self, what: IterationEnded | StepEnded) -> None:
        """Tell listeners of an iteration or a step, before whatever the source wants after it."""
        ...

    def say(self, what: Inform | Warn | WarnLeftOut | WarnOversized) -> None:
        """Log what the source says."""
        ...

    def forget(self, instances: Sequence[str]) -> None:
        """Let outputs go."""
        ...

    async def close(self, ending: End) -> OutcomeT_co:
        """Put the end on record, and return how the run ended."""
        ...

    def leave(self) -> None:
        """Wait for nothing any more; called once, however the run ended."""
        ...


class Predicates(Protocol[OutputT_contra]):
    """The user's predicates and edge conditions, asked where they live: one copy for the whole run (S-LOOP-54)."""

    async def holds(
        self, question: UntilHolds | EdgeMatches, *, sent_count: int, new: Sequence[HistoryPart[OutputT_contra]]
    ) -> bool | EvaluationFailed | None:
        """Ask one.

        Args:
            question: Which predicate, and of which iteration or step.
            sent_count: How many parts of this unit's history were sent with earlier questions.
            new: The parts that follow those; none where another edge of the same step is asked.

        Returns:
            The verdict, or what was raised. None: those who are asked have fewer than `lookup_recorded` parts, since their process
            was replaced; they are to be asked again with `sent_count=0` and the whole history.
        """
        ...

    def forget(self, unit: str) -> None:
        """Let the history of a unit go that has ended."""
        ...


class MemoryResets(Protocol):
    """The memory of an ensemble, as its loops reset it."""

    async def reset(self, unit: LoopUnit) -> EvaluationFailed | None:
        """Do to a loop's memory scopes what its mode says before an iteration (S-LOOP-91, S-LOOP-93).

        Returns:
            What was raised, such as that the store cannot clear (S-LOOP-92); None: it is done.
        """
        ...


_log = bounded_logger(__name__)
#: With more tasks in flight, what comes within that time is taken together, s: one by one costs 1.6 times the processor.
_MANY = 64
_GATHER_S = 0.004
_ENDS = Completed | Failed | Exited | Cancelled | Waiting

Outcome = TypeVar("Outcome")


class Coordinator(Generic[Order, Result, Outcome]):
    """One run: its source, its tasks, its end. Fulfils `TaskReporter`."""

    def __init__(
        self,
        journal: RunJournal,
        tasks: RunTasks[Order, Result, Outcome],
        find_decided: Callable[[], Awaitable[Sequence[str]]] | None = None,
    ) -> None:
        """Make one that has not begun.

        Args:
            journal: The run's.
            tasks: The run's.
            find_decided: Returns tasks that were put down and whose gates were decided since; None: nobody else decides.
        """
        self._journal = journal
        self._tasks = tasks
        self._find_decided = find_decided
        self._source: Source
        self._executor: Executor[Order]
        self._inbox: list[Stimulus] = []
        self._woken = asyncio.Event()
        #: instances that the executor has, and that it has not reported
        self._in_flight: set[str] = set()
        #: instances that were started and have not ended, wherever they are
        self._open: set[str] = set()
        #: gates that wait for a decision
        self._gates: set[str] = set()
        self._ending: End | None = None
        #: how the run ends once nothing is in flight, whatever its source says
        self._interruption: End | None = None
        self._broken: BaseException | None = None
        #: done when the source heard of a wish to cancel, or will not any more
        self._cancelling: asyncio.Future[None] | None = None
        #: whether the run ended, and nothing broke it
        self.has_ended = False
        #: done when the first tasks were started, or never will be
        self.begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def run(self, source: Source, executor: Executor[Order]) -> Outcome:
        """Carry the run out to its end.

        Args:
            source: What decides; fresh.
            executor: Where tasks are done; it delivers here.

        Raises:
            RecordError, StaleEpochError: the record cannot be written, or is somebody else's now.
            Exception: what `break_off` was told.
        """
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
            self._tasks.leave()
            for waiting in (self.begun, self._cancelling):
                if waiting is not None and not waiting.done():
                    waiting.set_result(None)

    async def _work(self) -> End:
        """Begin, and return how the run ends when nothing is left to do."""
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
        """Ask for the end of the run; return what is done when that is on record. A run that ended stays as it is."""
        if self._cancelling is None:
            self._cancelling = asyncio.get_running_loop().create_future()
        if self._ending is None:
            self.notify(CancelRequested(at=self._journal.now()))
        elif not self._cancelling.done():
            self._cancelling.set_result(None)
        return self._cancelling

    def decide(self, gate: str, verdict: Literal["approve", "edit", "exit"], text: str = "") -> bool:
        """Decide about a gate; return whether it waited for that, since the first decision counts."""
        if gate not in self._gates:
            return False
        self._gates.remove(gate)
        self.notify(Decided(at=self._journal.now(), gate=gate, verdict=verdict, text=text))
        return True

    async def inject(self, directive: RunDirective) -> bool:
        """Tell the tasks that start from now on; return, when it is on record, whether any may: False for a run that ended.

        Raises:
            RecordError, StaleEpochError: it cannot be recorded.
        """
        await asyncio.shield(self.begun)  # the record begins with the run
        if self._ending is not None or self._broken is not None:
            return False
        await self._tasks.directives.add(directive)
        return True

    def go_on(self, instances: Sequence[str]) -> None:
        """Start these tasks again, which were put down at gates."""
        self.notify(Continued(at=self._journal.now(), instances=tuple(instances)))

    def deliver(self, results: Sequence[Result]) -> None:
        """Take results of the executor."""
        try:
            for result in results:
                if result.instance in self._in_flight:
                    self._in_flight.remove(result.instance)
                    self.notify(*self._tasks.accept(result))
        except Exception as error:  # noqa: BLE001  such as a full disk: nobody else would tell the run
            self.break_off(error)

    def notify(self, *stimuli: Stimulus) -> None:
        """Tell the source, after everything that it was told before."""
        self._inbox.extend(stimuli)
        for each in stimuli:
            if isinstance(each, _ENDS):
                self._open.discard(each.instance)
        self._woken.set()

    def submit(self, orders: Sequence[Order]) -> None:
        """Hand orders to the executor."""
        self._in_flight.update([order.instance for order in orders])
        self._executor.start(orders)

    def stop(self, instances: Sequence[str]) -> None:
        """Have the executor stop those of these that it has; each is still reported."""
        if stopping := [instance for instance in instances if instance in self._in_flight]:
            self._executor.stop(stopping)

    def interrupt(self, ending: End) -> None:
        """Stop what runs, start no more, then end the run this way without asking its source."""
        if self._interruption is None:
            self._interruption = ending
            self.stop(list(self._in_flight))
            self._woken.set()

    def break_off(self, error: BaseException) -> None:
        """End the run with an error of everything around it; what was recorded can be gone on with."""
        self._broken = self._broken or error
        self._woken.set()

    def break_off_with(self, failed: asyncio.Future[None]) -> None:
        """End the run with the error of what cannot work any more, such as its executor."""
        if not failed.cancelled() and (error := failed.exception()) is not None:
            self.break_off(error)

    async def _end(self) -> End | None:
        """Return how the run ends; None while it goes on."""
        if self._interruption is not None:
            return None if self._in_flight else self._interruption
        ending = self._ending
        if ending is None or ending.state is not RunState.WAITING or self._find_decided is None:
            return ending
        self._ending = None  # who cancels meanwhile is heard
        if decided := await self._find_decided():
            self.go_on(decided)
        if not self._inbox and self._broken is None:
            self._ending = ending
        return self._ending

    async def _begin(self) -> None:
        opening = await self._tasks.open(self._source, self)
        first = opening.stimuli
        if self._cancelling is not None:  # it was cancelled before it began, and never does
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
        """Take what came together; a wish to cancel is told alone, since it comes too late where the run ends before it."""
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
        for instruction in instructions:
            match instruction:
                case Start() | Cancel():
                    pass  # all of them together, below
                case Skip():
                    _log.debug("Task '%s' is skipped: %s", key_of(instruction.instance), instruction.reason)
                case Evaluate():
                    self._tasks.evaluate(instruction.question)
                case Wait():
                    self._gates.add(instruction.gate)
                case Forget():
                    self._tasks.forget(instruction.instances)
                case Announce():
                    self._tasks.announce(instruction.what)
                case Inform() | Warn() | WarnLeftOut() | WarnOversized():
                    self._tasks.say(instruction)
                case End():
                    self._ending = instruction
                    self._woken.set()
                case _:
                    assert_never(instruction)
        self._start([each for each in instructions if isinstance(each, Start)])
        self._stop([each.instance for each in instructions if isinstance(each, Cancel)])

    def _start(self, starts: Sequence[Start]) -> None:
        fresh: list[Start] = []
        for start in starts:
            if recorded := self._tasks.look_up(start):
                self.notify(*recorded)
            else:
                fresh.append(start)
        if fresh:
            self._open.update([start.instance for start in fresh])
            self._tasks.make(fresh)

    def _stop(self, instances: Sequence[str]) -> None:
        self.stop(instances)
        for instance in instances:
            # No executor has it, and none will; or it is more than one task, which tells of its end itself.
            if instance not in self._in_flight and not self._tasks.discard(instance):
                self.notify(Cancelled(at=self._journal.now(), instance=instance))


class RunBackgroundTasks:
    """The background tasks of one run."""

    def __init__(self, break_off: Callable[[BaseException], None]) -> None:
        """Begin with none; `break_off` is called with what one raises."""
        self._break_off = break_off
        self._tasks: set[asyncio.Task[None]] = set()
        #: the run has ended, and waits for none of them
        self.is_left = False

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin one."""
        task = asyncio.get_running_loop().create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self) -> None:
        """Stop what can be stopped, since the run has ended."""
        self.is_left = True
        for task in self._tasks:
            task.cancel()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BaseException as error:  # not ours to raise while the run lasts: nobody cancels a task of it
            if self.is_left:
                raise
            self._break_off(as_error(error))


def as_error(raised: BaseException) -> BaseException:
    """Return what user code raised as something that a caller can be given: a cancellation would cancel the caller."""
    if isinstance(raised, USER_ERRORS):
        return raised
    error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error


@dataclass(frozen=True, slots=True, kw_only=True)
class RunJournal:
    """What all orders of a run say, and what its facts are written under."""

    run_id: str
    epoch: int
    journal: Journal
    clock: Clock

    def now(self) -> float:
        """Return the time, Unix time, s."""
        return self.clock.now()

    def fact(self, name: str, data: FactData, at: float | None = None) -> Fact:
        """Return a fact of this run."""
        moment = self.clock.now() if at is None else at
        return Fact(run=self.run_id, name=name, at=moment, data=data, epoch=self.epoch)

    async def append(self, *facts: Fact, until: Persistence = Persistence.QUEUED) -> None:
        """Put facts on record.

        Raises:
            RecordError, StaleEpochError: it cannot be, or is not ours any more.
        """
        await self.journal.append(facts, epoch=self.epoch, until=until)

    async def record_break(self, error: Exception) -> None:
        """Put on record why a run that began stopped without an end, if the record can still be written (S-ERR-69)."""
        if not isinstance(error, StaleEpochError):
            with contextlib.suppress(RecordError, StaleEpochError):  # the error itself is raised
                await self.append(self.fact(RUN, RunInterrupted.of(RecordedError.of(error))))


class OwnReason(NamedTuple):
    """A reason, and when it came about, Unix time, s."""

    at: float
    error: RecordedError


async def unit_reasons(
    plan: Plan, ending: End, raised: Mapping[str, RecordedError], journal: Journal
) -> Sequence[OwnReason]:
    """Return why loops, phases and graphs failed.

    Args:
        plan: What ran.
        ending: How it ended.
        raised: By path of the unit: what its predicates and conditions raised.
        journal: Has the text of a state that no edge matched.
    """
    outputs = {
        instance: output
        for failure in ending.unit_failures
        if failure.reason == "no_edge"
        for instance in _instances_of_step(ending, failure.step)
        if (output := await _find_output(journal, instance)) is not None
    }
    ended = EndedUnits(plan=plan, results=ending.units, failures=ending.unit_failures, outputs=outputs)
    return [
        OwnReason(each.at, raised.get(each.unit) or RecordedError.of(error_of_unit(ended, each, None)))
        for each in ending.unit_failures
    ]


def constraint_reasons(plan: Plan, delegated_roles: Collection[str], at: float) -> Sequence[OwnReason]:
    """Return which constraints of a manager were not met, as one reason; none where it met all (S-HIER-50)."""
    violations = () if plan.hierarchy is None else violations_of(plan.hierarchy, delegated_roles)
    return [OwnReason(at, RecordedError.of(ConstraintViolationError(violations)))] if violations else []


def _instances_of_step(ending: End, number: int) -> Iterator[str]:
    """Return the instances that a step of the graph shows: one, or those of a loop."""
    steps = [step for each in ending.units if isinstance(each, GraphResult) for step in each.steps]
    shown = next((step.instance for step in steps if step.number == number), "")
    yield shown
    for each in ending.units:
        if isinstance(each, LoopResult) and each.unit == shown:
            yield from (instance for iteration in each.iterations for instance in iteration)


async def _find_output(journal: Journal, instance: str) -> TaskOutput | None:
    return recorded_output(await journal.lookup_recorded(instance), instance)


class PutDown:
    """Tasks that wait, with their open gates."""

    def __init__(self, is_waiting: Callable[[str], bool]) -> None:
        """Make one that has none.

        Args:
            is_waiting: Says whether a task is started again when the run goes on; one that was cancelled meanwhile, as by a
                join of a graph, is not.
        """
        self._is_waiting = is_waiting
        self._reviews: dict[str, tuple[OpenReview, ...]] = {}

    @property
    def reviews(self) -> Mapping[str, Sequence[OpenReview]]:
        """The open gates of the tasks that wait, by instance, in the order in which they came to them."""
        return {instance: reviews for instance, reviews in self._reviews.items() if self._is_waiting(instance)}

    def keep(self, result: TaskResult[object, FailureSummary]) -> Waiting:
        """Keep the gates that a task waits for; return what the source is told."""
        self._reviews[result.instance] = result.open_reviews
        return Waiting(at=result.at, instance=result.instance)

    def pick_up(self, instance: str) -> bool:
        """Forget the gates of a task that is handed out; return whether it had been put down."""
        return self._reviews.pop(instance, None) is not None

    def waited_for(self, ending: End) -> tuple[OpenReview, ...]:
        """Return the gates that a run waits for that ends so; none where it has ended for good."""
        if ending.state is not RunState.WAITING:
            return ()
        return tuple(each for reviews in self.reviews.values() for each in reviews)


class RunDirectives:
    """The directives of one run."""

    def __init__(self, journal: RunJournal, recorded: Sequence[DirectiveFact] = ()) -> None:
        """Make them, with those that are recorded of a run that goes on."""
        self._journal = journal
        self._given = GivenDirectives(recorded)

    @property
    def switches(self) -> tuple[ModelSwitch, ...]:
        """Which models tasks ask that start now, where those are not their agents' own."""
        return self._given.switches

    async def add(self, directive: RunDirective) -> None:
        """Put a directive on record; tasks that start from then on follow it.

        Raises:
            RecordError, StaleEpochError: it cannot be, or the run is somebody else's now.
        """
        now = self._journal.now()
        data = _fact_of(directive, now)
        await self._journal.append(self._journal.fact(RUN, data, now), until=Persistence.COMMITTED)
        self._given.apply(data)

    def active(self) -> tuple[str, ...]:
        """Return the texts that a task is told which starts now, in the order in which they were given."""
        return self._given.active(self._journal.now())


def _fact_of(directive: RunDirective, now: float) -> DirectiveFact:
    match directive:
        case Directive(text=text, ttl_s=ttl_s, given_by=given_by):
            return DirectiveRecorded(text=text, expires_at=None if ttl_s is None else now + ttl_s, given_by=given_by)
        case ModelSwitch(model=model, agent=agent, given_by=given_by):
            return ModelSwitched(model=model, agent=agent, given_by=given_by)
        case _:
            assert_never(directive)
