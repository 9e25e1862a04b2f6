"""Map-reduce: items are pulled, maps and reduces are made as slots become free.

Rules:
1. `handle` is the one door. The same stimuli give the same instructions; no clock, no I/O, no randomness.
2. Never more tasks in flight than the window, and never more items pulled ahead than there are slots for
   (S-MR-121, S-MR-140). A reduce that may start goes before further maps.
3. Groups follow the order of work: level by level, pipelined, or pipelined in order (`map_reduce_groupers`).
4. A failed map or reduce is left out, or it ends the run: what runs is stopped, nothing starts any more. The final
   reduce always ends it.
5. An early exit starts nothing more and lets what runs finish (S-PAR-30). A cancelled run stops what runs. User code
   that raised does too (S-MR-123). First come, first served, but cancelling outranks all, an early exit a failed task.
6. A task whose output's tokens are being counted keeps its place; in a run that is ending it is done.
7. A stimulus for a task that is not in flight is ignored: it is late.
8. The run ends exactly once, when nothing runs and nothing is left to make.

The machine is told of recorded tasks like of others, right after it wanted them started (S-MR-161).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import assert_never

from ensemble_ray.schedule.instructions import (
    Cancel,
    CountTokens,
    Evaluate,
    FailureReason,
    Instruction,
    MapItem,
    Position,
    PullItems,
    ReduceGroup,
    Start,
    Warn,
    WarnLeftOut,
    WarnOversized,
)
from ensemble_ray.schedule.machine import end_of
from ensemble_ray.schedule.map_reduce_groups import Group, Grouping, Groups, MapReduceRules, grouper_of
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
    ItemsPulled,
    Stimulus,
    Waiting,
)
from ensemble_ray.values.outputs import ExitReason

#: More tokens than any text has: sums of millions of such counts fit 64 bits.
_MOST_TOKENS = 1 << 40


class MapReduceMachine:
    """A map-reduce's scheduling state; some ten bytes for an item.

    Args:
        rules: What it goes by.
        name: Gives the instance of a task by what it is made of.
        recorded_groups: Groups of the record in its order, which are made again (S-MR-161).

    Raises:
        ValueError: the recorded groups contradict each other or the rules.
    """

    def __init__(
        self,
        rules: MapReduceRules,
        name: Callable[[MapItem | ReduceGroup], str],
        recorded_groups: Iterable[ReduceGroup] = (),
    ) -> None:
        self._rules = rules
        self._name = name
        self._groups = Groups(recorded_groups)
        self._grouper = grouper_of(rules, self._groups)
        # Items: those before _next_map were started or refused, those before _pulled are there.
        self._pulled = 0
        self._next_map = 0
        self._refused: set[int] = set()  # among those not yet passed
        self._asked = 0
        self._is_exhausted = False
        #: positions of tasks in flight by instance, in the order in which they started
        self._running: dict[str, Position] = {}
        #: those among them whose outputs' tokens are being counted
        self._counting: set[str] = set()
        self._completed_maps = 0
        self._final: Position | None = None
        self._is_final_completed = False
        # How it ends.
        self._is_begun = False
        self._is_stopped = False
        self._is_cancelled = False
        self._exit: ExitReason | None = None
        self._failure: FailureReason = ""
        self._is_ended = False

    # What may be asked.

    @property
    def running(self) -> tuple[str, ...]:
        """Return the tasks in flight, in the order in which they started."""
        return tuple(self._running)

    @property
    def is_ended(self) -> bool:
        """Whether the last instruction was given."""
        return self._is_ended

    # The door.

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Take facts, give what is to be done now, in order.

        Raises:
            ValueError: a fact that cannot be: items nobody asked for, an item that is not there, a negative count.
        """
        done: list[Instruction] = []
        for stimulus in stimuli:
            if not self._is_ended:
                self._handle_one(stimulus, done)
        if not self._is_ended:
            self._go_on(done)
        return done

    def _handle_one(self, stimulus: Stimulus, done: list[Instruction]) -> None:
        match stimulus:
            case Begun():
                self._is_begun = True
            case Evaluated():
                self._handle_answer(stimulus, done)
            case Completed() | Failed() | Cancelled() | Exited():
                if stimulus.instance in self._running:  # else it is late (rule 7)
                    self._handle_end(stimulus, done)
            case CancelRequested():
                self._is_cancelled = True
                self._stop(done)
            case Decided() | Waiting() | Continued():
                raise TypeError(f"unexpected stimulus: {stimulus}")
            case _:
                assert_never(stimulus)

    def _handle_answer(self, stimulus: Evaluated, done: list[Instruction]) -> None:
        question, answer = stimulus.question, stimulus.answer
        if isinstance(question, CountTokens):
            if question.instance in self._counting:  # else the run was ending, and did not wait for it
                self._complete(question.instance, answer if isinstance(answer, int) else 0)
        elif isinstance(answer, ItemsPulled):
            self._add_items(answer, done)
        if answer is None:
            self._fail("source", done)

    # Items.

    def _add_items(self, pulled: ItemsPulled, done: list[Instruction]) -> None:
        if self._is_over:
            return  # nobody waits for them any more
        if not 0 <= pulled.count <= self._asked:
            raise ValueError(f"{pulled.count} items came, {self._asked} were asked for")
        self._asked = 0
        first, self._pulled = self._pulled, self._pulled + pulled.count
        self._is_exhausted = pulled.is_exhausted
        self._grouper.know_items(self._pulled, are_all=self._is_exhausted)
        for number in pulled.refused:
            if not first <= number < self._pulled:
                raise ValueError(f"item {number} is refused, {first} to {self._pulled - 1} came")
            if number not in self._refused and not self._is_over:
                self._refused.add(number)
                self._lose(self._name(MapItem(number=number)), (0, number), done)

    @property
    def _waiting(self) -> int:
        """Items that were pulled and not started."""
        return self._pulled - self._next_map - len(self._refused)

    # Tasks.

    def _handle_end(self, end: Completed | Failed | Cancelled | Exited, done: list[Instruction]) -> None:
        instance = end.instance
        match end:
            case Completed():
                self._handle_output(instance, end.output_tokens, done)
            case Failed() if end.ends_run:
                del self._running[instance]
                self._fail("source", done)
            case Failed() | Cancelled():  # one that nobody wanted stopped has no output either
                self._lose(instance, self._running.pop(instance), done)
            case Exited():
                del self._running[instance]
                if self._failure != "source":
                    self._exit = self._exit or end.reason
            case _:
                assert_never(end)

    def _handle_output(self, instance: str, tokens: int | None, done: list[Instruction]) -> None:
        if tokens is not None and tokens < 0:
            raise ValueError(f"output_tokens must be >= 0, got: {tokens}")
        is_final = self._running[instance] == self._final  # it comes together with nothing
        if tokens is None and not is_final and not self._is_over:
            self._counting.add(instance)
            done.append(Evaluate(question=CountTokens(instance=instance)))
        else:
            self._complete(instance, tokens or 0)

    def _complete(self, instance: str, tokens: int) -> None:
        if tokens < 0:
            raise ValueError(f"tokens of {instance} must be >= 0, got: {tokens}")
        self._counting.discard(instance)
        position = level, number = self._running.pop(instance)
        if not level:
            self._completed_maps += 1
        if position == self._final:
            self._is_final_completed = True
        elif not self._is_over and self._rules.grouping is not Grouping.NONE:
            is_by_tokens = self._rules.grouping is Grouping.BUDGET
            self._grouper.add(level, number, min(tokens, _MOST_TOKENS) if is_by_tokens else 1)

    def _lose(self, instance: str, position: Position, done: list[Instruction]) -> None:
        """Note that a task has no output, and never will have."""
        if self._is_over:
            return
        level, number = position
        if self._rules.fails_on_reduce if level else self._rules.fails_on_item:
            self._fail("first", done)
        elif position != self._final:
            done.append(WarnLeftOut(instance=instance))
            if self._rules.grouping is not Grouping.NONE:
                self._grouper.discard(level, number)

    # Ending.

    @property
    def _is_over(self) -> bool:
        """Whether nothing starts any more."""
        return self._is_cancelled or self._exit is not None or self._failure != ""

    def _fail(self, failure: FailureReason, done: list[Instruction]) -> None:
        if not self._is_over:
            self._failure = failure
            self._stop(done)

    def _stop(self, done: list[Instruction]) -> None:
        """Stop what runs, once."""
        if not self._is_stopped:
            self._is_stopped = True
            for instance in self._counting.copy():
                self._complete(instance, 0)  # grouped no more
            done.extend(Cancel(instance=instance) for instance in self._running)

    def _end(self, done: list[Instruction]) -> None:
        self._is_ended = True
        end = end_of(is_cancelled=self._is_cancelled, exit_reason=self._exit, has_failed=self._failure != "")
        done.append(replace(end, failure=self._failure) if end.exit_reason is ExitReason.ERROR else end)

    # Going on.

    def _go_on(self, done: list[Instruction]) -> None:
        if self._is_over:
            if not self._running:
                self._end(done)
            return
        if not self._is_begun:
            return
        if self._is_quiet:
            self._start_next_groups()
        if self._is_quiet:
            self._end(done)
            return
        self._start(done)
        self._pull(done)

    @property
    def _is_quiet(self) -> bool:
        """Whether nothing is in flight or can start, now or later, as things are."""
        return self._is_exhausted and not self._waiting and not self._running and not len(self._groups)

    def _start_next_groups(self) -> None:
        """Let the next groups be made; without any, the run has ended, and why."""
        if not self._completed_maps:
            self._failure = "all_maps" if self._pulled else "empty"
        elif self._final is not None:
            self._failure = "" if self._is_final_completed else "level"
        elif self._rules.grouping is not Grouping.NONE:
            self._grouper.group_rest()
            self._failure = "" if len(self._groups) else "level"

    def _start(self, done: list[Instruction]) -> None:
        while len(self._groups) and len(self._running) < self._rules.window:
            self._start_reduce(self._groups.pop(), done)
        while self._next_map < self._pulled:
            number = self._next_map
            if number in self._refused:
                self._refused.remove(number)
            elif len(self._running) < self._rules.window:
                self._start_task(MapItem(number=number), (0, number), done)
            else:
                return
            self._next_map += 1

    def _start_reduce(self, group: Group, done: list[Instruction]) -> None:
        if self._rules.grouping is Grouping.BUDGET and group.size > self._rules.capacity:
            self._warn_of_tokens(group, done)
        position = (group.level, group.number)
        if group.is_final:
            self._final = position
        reduce = ReduceGroup(level=group.level, number=group.number, inputs=group.inputs, is_final=group.is_final)
        self._start_task(reduce, position, done)

    def _start_task(self, unit: MapItem | ReduceGroup, position: Position, done: list[Instruction]) -> None:
        instance = self._name(unit)
        self._running[instance] = position
        done.append(Start(instance=instance, changes=unit))

    def _warn_of_tokens(self, group: Group, done: list[Instruction]) -> None:
        cap, budget = self._rules.max_levels, self._rules.capacity
        if group.is_final and cap is not None and group.level > cap:
            done.append(
                Warn(
                    text=f"max_reduce_levels {cap} is reached: the outputs have {group.size} tokens in all, "
                    f"more than the budget of {budget}; the final reduce runs all the same"
                )
            )
        elif len(group.inputs) == 1:
            done.append(WarnOversized(output=group.inputs[0], tokens=group.size, budget_tokens=budget))

    def _pull(self, done: list[Instruction]) -> None:
        """Ask for as many items as there will be slots for; one question at a time."""
        if self._is_exhausted or self._asked:
            return
        slots = self._rules.window - len(self._running) - self._waiting - len(self._groups)
        if slots > 0:
            self._asked = slots
            done.append(Evaluate(question=PullItems(count=slots)))

    # Invariants, for tests and for hunting defects.

    def validate(self) -> None:
        """Check the invariants that hold between any two calls of `handle`.

        Raises:
            AssertionError: one does not hold.
        """
        assert len(self._running) <= self._rules.window, "window"
        assert self._counting <= self._running.keys(), "only what is in flight is counted"
        assert 0 <= self._next_map <= self._pulled, "maps start after their items came"
        assert self._waiting >= 0, "refused items are pulled ones"
        assert self._waiting + self._asked <= self._rules.window, "never more than the window ahead"
        if self._is_ended:
            assert not self._running, "nothing runs at the end"
        elif self._is_begun:
            assert self._running or self._asked, "something is waited for"
        self._groups.validate()
        self._grouper.validate()
