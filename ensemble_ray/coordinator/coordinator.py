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
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, assert_never

from ensemble_ray.coordinator.ports import Order, Result
from ensemble_ray.ports import Persistence
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    End,
    Evaluate,
    Forget,
    Inform,
    Instruction,
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
from ensemble_ray.values.ids import key_of
from ensemble_ray.values.outputs import RunState

if TYPE_CHECKING:
    from ensemble_ray.coordinator.ports import Executor, RunTasks
    from ensemble_ray.coordinator.run_journal import RunJournal
    from ensemble_ray.schedule.machine import Source
    from ensemble_ray.schedule.stimuli import Stimulus
    from ensemble_ray.values.reviews import RunDirective

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
