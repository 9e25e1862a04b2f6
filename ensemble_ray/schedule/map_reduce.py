"""The machine of a map-reduce."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import assert_never

from msgspec.structs import replace

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
    Evaluated,
    Exited,
    Failed,
    ItemsPulled,
    Stimulus,
    TaskEnd,
    Waiting,
)
from ensemble_ray.values.outputs import ExitReason

#: Sums of millions of such counts fit 64 bits.
_MOST_TOKENS = 1 << 40


class MapReduceMachine:
    """The scheduling state of a map-reduce; some ten bytes per item.

    The stimuli of recorded tasks follow directly after their `Start` (S-MR-161). A ValueError: the recorded groups
    contradict each other or the rules.
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
        # Items before _next_map were started or refused; items before _pulled have arrived.
        self._pulled = 0
        self._next_map = 0
        self._refused: set[int] = set()  # from _next_map on
        self._requested = 0
        self._is_exhausted = False
        self._running: dict[str, Position] = {}
        #: tasks that wait for the token count of their output keep their slot
        self._counting: set[str] = set()
        self._completed_maps = 0
        self._final: Position | None = None
        self._is_final_completed = False
        self._is_begun = False
        self._is_stopped = False
        self._is_cancelled = False
        self._exit: ExitReason | None = None
        self._failure: FailureReason = ""
        self._is_ended = False

    @property
    def running(self) -> tuple[str, ...]:
        return tuple(self._running)

    @property
    def is_ended(self) -> bool:
        return self._is_ended

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """A ValueError: a stimulus is impossible."""
        done: list[Instruction] = []
        for stimulus in stimuli:
            if not self._is_ended:
                self._handle_one(stimulus, done)
        if not self._is_ended:
            self._advance(done)
        return done

    def _handle_one(self, stimulus: Stimulus, done: list[Instruction]) -> None:
        match stimulus:
            case Begun():
                self._is_begun = True
            case Evaluated():
                self._handle_answer(stimulus, done)
            case Completed() | Failed() | Cancelled() | Exited():
                if stimulus.instance in self._running:  # else it is late
                    self._handle_end(stimulus, done)
            case CancelRequested():
                self._is_cancelled = True
                self._stop(done)
            case Waiting() | Continued():
                raise TypeError(f"unexpected stimulus: {stimulus}")
            case _:
                assert_never(stimulus)

    def _handle_answer(self, answered: Evaluated, done: list[Instruction]) -> None:
        question, answer = answered.question, answered.answer
        if isinstance(question, CountTokens):
            if question.instance in self._counting:  # else the run is ending, and did not wait
                self._complete(question.instance, answer if isinstance(answer, int) else 0)
        elif isinstance(answer, ItemsPulled):
            self._add_items(answer, done)
        if answer is None:
            self._fail("source", done)  # S-MR-123

    def _add_items(self, pulled: ItemsPulled, done: list[Instruction]) -> None:
        if self._is_over:
            return
        if not 0 <= pulled.count <= self._requested:
            raise ValueError(f"{pulled.count} items arrived, {self._requested} were requested")
        self._requested = 0
        first, self._pulled = self._pulled, self._pulled + pulled.count
        self._is_exhausted = pulled.is_exhausted
        self._grouper.set_item_count(self._pulled, are_all=self._is_exhausted)
        for number in pulled.refused:
            if not first <= number < self._pulled:
                raise ValueError(f"item {number} is refused, {first} to {self._pulled - 1} arrived")
            if number not in self._refused and not self._is_over:
                self._refused.add(number)
                self._drop(self._name(MapItem(number=number)), (0, number), done)

    @property
    def _waiting(self) -> int:
        return self._pulled - self._next_map - len(self._refused)

    def _handle_end(self, end: TaskEnd, done: list[Instruction]) -> None:
        instance = end.instance
        match end:
            case Completed():
                self._handle_output(instance, end.output_tokens, done)
            case Failed() if end.ends_run:
                del self._running[instance]
                self._fail("source", done)
            case Failed() | Cancelled():  # a task that another process stopped has no output either
                self._drop(instance, self._running.pop(instance), done)
            case Exited():
                del self._running[instance]
                if self._failure != "source":
                    self._exit = self._exit or end.reason
            case _:
                assert_never(end)

    def _handle_output(self, instance: str, tokens: int | None, done: list[Instruction]) -> None:
        if tokens is not None and tokens < 0:
            raise ValueError(f"output_tokens must be >= 0, got: {tokens}")
        is_final = self._running[instance] == self._final  # its output joins no group
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

    def _drop(self, instance: str, position: Position, done: list[Instruction]) -> None:
        """Continue without a task's output, or fail. The final reduce always fails the run."""
        if self._is_over:
            return
        level, number = position
        if self._rules.fails_on_reduce if level else self._rules.fails_on_item:
            self._fail("first", done)
        elif position != self._final:
            done.append(WarnLeftOut(instance=instance))
            if self._rules.grouping is not Grouping.NONE:
                self._grouper.discard(level, number)

    # Ending. Cancelling outranks an early exit, an early exit a failed task (S-PAR-30); else the first cause counts.

    @property
    def _is_over(self) -> bool:
        return self._is_cancelled or self._exit is not None or self._failure != ""

    def _fail(self, failure: FailureReason, done: list[Instruction]) -> None:
        if not self._is_over:
            self._failure = failure
            self._stop(done)

    def _stop(self, done: list[Instruction]) -> None:
        if not self._is_stopped:
            self._is_stopped = True
            for instance in self._counting.copy():
                self._complete(instance, 0)  # no group follows
            done.extend(Cancel(instance=instance) for instance in self._running)

    def _end(self, done: list[Instruction]) -> None:
        self._is_ended = True
        end = end_of(is_cancelled=self._is_cancelled, exit_reason=self._exit, has_failed=self._failure != "")
        done.append(replace(end, failure=self._failure) if end.exit_reason is ExitReason.ERROR else end)

    # Starting tasks.

    def _advance(self, done: list[Instruction]) -> None:
        if self._is_over:
            if not self._running:
                self._end(done)
            return
        if not self._is_begun:
            return
        if self._is_idle:
            self._start_next_groups()
        if self._is_idle:
            self._end(done)
            return
        self._start(done)
        # Pull as many items as there will be slots; one question at a time (S-MR-121, S-MR-140).
        slots = self._rules.window - len(self._running) - self._waiting - len(self._groups)
        if slots > 0 and not (self._is_exhausted or self._requested):
            self._requested = slots
            done.append(Evaluate(question=PullItems(count=slots)))

    @property
    def _is_idle(self) -> bool:
        return self._is_exhausted and not self._waiting and not self._running and not len(self._groups)

    def _start_next_groups(self) -> None:
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
        cap, budget = self._rules.max_levels, self._rules.capacity
        if self._rules.grouping is Grouping.BUDGET and group.size > budget:
            if group.is_final and cap is not None and group.level > cap:
                done.append(
                    Warn(
                        text=f"max_reduce_levels {cap} is reached: the outputs have {group.size} tokens in all, "
                        f"more than the budget of {budget}; the final reduce runs all the same"
                    )
                )
            elif len(group.inputs) == 1:
                done.append(WarnOversized(output=group.inputs[0], tokens=group.size, budget_tokens=budget))
        position = (group.level, group.number)
        if group.is_final:
            self._final = position
        reduce = ReduceGroup(level=group.level, number=group.number, inputs=group.inputs, is_final=group.is_final)
        self._start_task(reduce, position, done)

    def _start_task(self, task: MapItem | ReduceGroup, position: Position, done: list[Instruction]) -> None:
        instance = self._name(task)
        self._running[instance] = position
        done.append(Start(instance=instance, changes=task))
