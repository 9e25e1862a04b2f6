"""Map-reduce while it is fed: items are pulled, maps and reduces are made as places become free. Room: schedule.

Rules:
1. `handle` is the one door. The same stimuli give the same instructions; no clock, no I/O, no randomness.
2. Never more works in flight than the window, and never more items pulled ahead than there are places for
   (S-MR-121, S-MR-140). A reduce that may start goes before further maps.
3. Groups follow the order of work: level by level, pipelined, or pipelined in order (`map_reduce_groupers`).
4. A failed map or reduce is left out, or it ends the run: what runs is stopped, nothing starts any more. The final
   reduce always ends it.
5. An early exit starts nothing more and lets what runs finish (S-PAR-30). A cancelled run stops what runs. A source
   that raised does too (S-MR-123). First come, first served, but cancelling outranks all, an early exit a failed work.
6. A stimulus for a work that is not in flight is ignored: it is late.
7. The run ends exactly once, when nothing runs and nothing is left to make.

The machine is told of recorded works like of others, right after it wanted them started (S-MR-161).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from ensemble_ray.schedule.map_reduce_groupers import grouper_of
from ensemble_ray.schedule.map_reduce_groups import Group, Groups, Work
from ensemble_ray.schedule.map_reduce_words import (
    Begun,
    CancelRequested,
    EndFed,
    Failure,
    FedInstruction,
    FedStimulus,
    Grouping,
    ItemRefused,
    ItemsPulled,
    MapReduceRules,
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
from ensemble_ray.values.outputs import ExitReason, RunState

__all__ = ["MapReduceMachine"]

#: More tokens than any text has: sums of millions of such weights fit 64 bits.
_MOST_TOKENS = 1 << 40


class MapReduceMachine:
    """A fed run's scheduling state; some ten bytes for an item.

    Args:
        rules: What it goes by.
        recorded_groups: Groups of the record in its order, which are made again (S-MR-161).

    Raises:
        ValueError: the recorded groups contradict each other or the rules.
    """

    def __init__(self, rules: MapReduceRules, recorded_groups: Iterable[StartReduce] = ()) -> None:
        self._rules = rules
        self._groups = Groups(recorded_groups)
        self._grouper = grouper_of(rules, self._groups)
        # Items: those before _next_map were started or refused, those before _pulled are there.
        self._pulled = 0
        self._next_map = 0
        self._refused: set[int] = set()  # among those not yet passed
        self._asked = 0
        self._is_exhausted = False
        #: works in flight, in the order in which they started
        self._running: dict[Work, None] = {}
        self._completed_maps = 0
        self._final: Work | None = None
        self._is_final_completed = False
        # How it ends.
        self._is_begun = False
        self._is_stopped = False
        self._is_cancelled = False
        self._exit: ExitReason | None = None
        self._failure: Failure = ""
        self._is_ended = False

    # What may be asked.

    @property
    def running(self) -> tuple[Work, ...]:
        """Level and number of the works in flight, in the order in which they started."""
        return tuple(self._running)

    @property
    def is_ended(self) -> bool:
        """Whether the last instruction was given."""
        return self._is_ended

    # The door.

    def handle(self, *stimuli: FedStimulus) -> list[FedInstruction]:
        """Take facts, give what is to be done now, in order.

        Raises:
            ValueError: a fact that cannot be: items nobody asked for, an item that is not there, a negative weight.
        """
        done: list[FedInstruction] = []
        for stimulus in stimuli:
            if not self._is_ended:
                self._take(stimulus, done)
        if not self._is_ended:
            self._go_on(done)
        return done

    def _take(self, stimulus: FedStimulus, done: list[FedInstruction]) -> None:
        match stimulus:
            case Begun():
                self._is_begun = True
            case ItemsPulled():
                self._add_items(stimulus)
            case ItemRefused():
                self._refuse(stimulus.number, done)
            case SourceFailed():
                self._fail("source", done)
            case WorkCompleted() | WorkFailed() | WorkCancelled() | WorkExited():
                work = (stimulus.level, stimulus.number)
                if isinstance(stimulus, WorkCompleted) and stimulus.weight_tokens < 0:
                    raise ValueError(f"weight_tokens must be >= 0, got: {stimulus.weight_tokens}")
                if work in self._running:  # else it is late (rule 6)
                    del self._running[work]
                    self._take_end(work, stimulus, done)
            case CancelRequested():
                self._is_cancelled = True
                self._stop(done)
            case _:
                assert_never(stimulus)

    # Items.

    def _add_items(self, stimulus: ItemsPulled) -> None:
        if self._is_over:
            return  # nobody waits for them any more
        if not 0 <= stimulus.count <= self._asked:
            raise ValueError(f"{stimulus.count} items came, {self._asked} were asked for")
        self._asked = 0
        self._pulled += stimulus.count
        self._is_exhausted = stimulus.is_exhausted
        self._grouper.know_items(self._pulled, are_all=self._is_exhausted)

    def _refuse(self, number: int, done: list[FedInstruction]) -> None:
        if (0, number) in self._running:
            del self._running[0, number]
            self._lose((0, number), done)
        elif not self._is_over:
            if not 0 <= number < self._pulled:
                raise ValueError(f"item {number} is refused, {self._pulled} were pulled")
            if number >= self._next_map and number not in self._refused:
                self._refused.add(number)
                self._lose((0, number), done)

    @property
    def _waiting(self) -> int:
        """Items that were pulled and not started."""
        return self._pulled - self._next_map - len(self._refused)

    # Works.

    def _take_end(
        self, work: Work, end: WorkCompleted | WorkFailed | WorkCancelled | WorkExited, done: list[FedInstruction]
    ) -> None:
        match end:
            case WorkCompleted():
                self._complete(work, end.weight_tokens)
            case WorkFailed() | WorkCancelled():  # one that nobody wanted stopped has no output either
                self._lose(work, done)
            case WorkExited():
                if self._failure != "source":
                    self._exit = self._exit or end.reason
            case _:
                assert_never(end)

    def _complete(self, work: Work, weight_tokens: int) -> None:
        level, number = work
        if not level:
            self._completed_maps += 1
        if work == self._final:
            self._is_final_completed = True
        elif not self._is_over and self._rules.grouping is not Grouping.NONE:
            is_by_weight = self._rules.grouping is Grouping.BUDGET
            self._grouper.completed(level, number, min(weight_tokens, _MOST_TOKENS) if is_by_weight else 1)

    def _lose(self, work: Work, done: list[FedInstruction]) -> None:
        """A work has no output, and never will have."""
        if self._is_over:
            return
        level, number = work
        if self._rules.fails_on_reduce if level else self._rules.fails_on_item:
            self._fail("first", done)
        elif work != self._final:
            done.append(TellLeftOut(level=level, number=number))
            if self._rules.grouping is not Grouping.NONE:
                self._grouper.lost(level, number)

    # Ending.

    @property
    def _is_over(self) -> bool:
        """Whether nothing starts any more."""
        return self._is_cancelled or self._exit is not None or self._failure != ""

    def _fail(self, failure: Failure, done: list[FedInstruction]) -> None:
        if not self._is_over:
            self._failure = failure
            self._stop(done)

    def _stop(self, done: list[FedInstruction]) -> None:
        """Stop what runs, once."""
        if not self._is_stopped:
            self._is_stopped = True
            done.extend(StopWork(level=level, number=number) for level, number in self._running)

    def _end(self, done: list[FedInstruction]) -> None:
        self._is_ended = True
        if self._is_cancelled:
            end = EndFed(state=RunState.CANCELLED, exit_reason=ExitReason.CANCELLED)
        elif self._exit is not None:
            is_spent = self._exit is ExitReason.BUDGET_EXHAUSTED  # more may be done with a larger budget (S-BUD-6)
            state = RunState.BUDGET_EXHAUSTED if is_spent else RunState.COMPLETED
            end = EndFed(state=state, exit_reason=self._exit)
        elif self._failure:
            end = EndFed(state=RunState.FAILED, exit_reason=ExitReason.ERROR, failure=self._failure)
        else:
            end = EndFed(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)
        done.append(end)

    # Going on.

    def _go_on(self, done: list[FedInstruction]) -> None:
        if self._is_over:
            if not self._running:
                self._end(done)
            return
        if not self._is_begun:
            return
        if self._is_quiet:
            self._settle()
        if self._is_quiet:
            self._end(done)
            return
        self._start(done)
        self._pull(done)

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is in flight or can start, now or later, as things are."""
        return self._is_exhausted and not self._waiting and not self._running and not len(self._groups)

    def _settle(self) -> None:
        """Let the next groups be made; without any, the run has ended, and why."""
        if not self._completed_maps:
            self._failure = "all_maps" if self._pulled else "empty"
        elif self._final is not None:
            self._failure = "" if self._is_final_completed else "level"
        elif self._rules.grouping is not Grouping.NONE:
            self._grouper.settle()
            self._failure = "" if len(self._groups) else "level"

    def _start(self, done: list[FedInstruction]) -> None:
        while len(self._groups) and len(self._running) < self._rules.window:
            self._start_reduce(self._groups.take(), done)
        while self._next_map < self._pulled:
            number = self._next_map
            if number in self._refused:
                self._refused.remove(number)
            elif len(self._running) < self._rules.window:
                self._running[0, number] = None
                done.append(StartMap(number=number))
            else:
                return
            self._next_map += 1

    def _start_reduce(self, group: Group, done: list[FedInstruction]) -> None:
        if self._rules.grouping is Grouping.BUDGET and group.weight > self._rules.capacity:
            self._tell_overweight(group, done)
        work = (group.level, group.number)
        if group.is_final:
            self._final = work
        self._running[work] = None
        done.append(StartReduce(level=group.level, number=group.number, inputs=group.inputs, is_final=group.is_final))

    def _tell_overweight(self, group: Group, done: list[FedInstruction]) -> None:
        cap, budget = self._rules.max_levels, self._rules.capacity
        if group.is_final and cap is not None and group.level > cap:
            done.append(
                Tell(
                    text=f"max_reduce_levels {cap} is reached: the outputs have {group.weight} tokens in all, "
                    f"more than the budget of {budget}; the final reduce runs all the same"
                )
            )
        elif len(group.inputs) == 1:
            level, number = group.inputs[0]
            done.append(TellOversized(level=level, number=number, tokens=group.weight))

    def _pull(self, done: list[FedInstruction]) -> None:
        """Ask for as many items as there will be places for; one question at a time."""
        if self._is_exhausted or self._asked:
            return
        places = self._rules.window - len(self._running) - self._waiting - len(self._groups)
        if places > 0:
            self._asked = places
            done.append(PullItems(count=places))

    # Invariants, for tests and for hunting defects.

    def validate(self) -> None:
        """Check the invariants that hold between any two calls of `handle`.

        Raises:
            AssertionError: one does not hold.
        """
        assert len(self._running) <= self._rules.window, "window"  # noqa: S101  invariants
        assert 0 <= self._next_map <= self._pulled, "maps start after their items came"  # noqa: S101
        assert self._waiting >= 0, "refused items are pulled ones"  # noqa: S101
        assert self._waiting + self._asked <= self._rules.window, "never more than the window ahead"  # noqa: S101
        if self._is_ended:
            assert not self._running, "nothing runs at the end"  # noqa: S101
        elif self._is_begun:
            assert self._running or self._asked, "something is waited for"  # noqa: S101
        self._groups.validate()
        self._grouper.validate()
