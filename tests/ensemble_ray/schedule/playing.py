"""Runs of nested plans played at random: any order of ends, any outcomes, verdicts and reviews; all machines checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from ensemble_ray import ExitReason, Plan
from ensemble_ray.schedule.instructions import Cancel, Evaluate, Instruction, Start
from ensemble_ray.schedule.nested import make_machine
from ensemble_ray.schedule.stimuli import Cancelled, CancelRequested, Completed, Evaluated, Exited, Failed, Stimulus
from ensemble_ray.schedule.unit import Execution, UnitMachine
from tests.ensemble_ray.schedule.nesting import Nest

#: What a review says; most of it asks for more.
ANSWERS = (
    "APPROVE",
    "RETRY: more",
    "RETRY: more",
    "RETRY_PREDECESSOR p0: more",
    "RETRY_PREDECESSOR p1: more",
    "REJECT: no",
)


class CheckedNest(Nest):
    """A run in which every machine is checked after every step."""

    def __init__(self, plan: Plan) -> None:
        self.machines: list[UnitMachine] = []
        super().__init__(plan=plan, make=self._make)

    def _make(self, execution: Execution) -> UnitMachine:
        machine = make_machine(execution)
        self.machines.append(machine)
        return machine

    def handle(self, *stimuli: Stimulus) -> list[Instruction]:
        """Tell the source."""
        done = super().handle(*stimuli)
        for machine in self.machines:
            if (validate := getattr(machine, "validate", None)) is not None:
                validate()
        return done


@dataclass(kw_only=True)
class Played:
    """A run that was played to its end."""

    nest: CheckedNest
    completed: list[str] = field(default_factory=list[str])
    has_failed: bool = False
    has_exited: bool = False
    is_cancelled: bool = False
    #: what was open after each group of words
    open_words: list[list[Instruction]] = field(default_factory=list[list[Instruction]])


def play(draw: st.DrawFn, plan: Plan, *, trouble: int = 3, most: int = 3000) -> Played:
    """Play a run to its end.

    Args:
        draw: Hypothesis's.
        plan: What to run.
        trouble: How many of 20 words say something else than success; 0: none is a failure, an exit or a cancellation.
        most: After so many groups of words it does not end.
    """
    played = Played(nest=CheckedNest(plan))
    nest = played.nest
    nest.begin()
    played.open_words.append(nest.source.list_unanswered())
    for at in range(1, most):
        if nest.ends:
            return played
        if trouble and not played.is_cancelled and draw(st.integers(0, 40)) == 0:
            played.is_cancelled = True
            group: list[Stimulus] = [CancelRequested(at=at)]
        else:
            group = _words(draw, nest.source.list_unanswered(), at, played, trouble)
        nest.handle(*group)
        played.open_words.append(nest.source.list_unanswered())
        if draw(st.integers(0, 9)) == 0:
            assert nest.handle(*(each for each in group if not isinstance(each, CancelRequested))) == []
            played.open_words.append(nest.source.list_unanswered())
    raise AssertionError(f"it does not end: {nest.wanted[-5:]}")


def _words(draw: st.DrawFn, todo: Sequence[Instruction], at: float, played: Played, trouble: int) -> list[Stimulus]:
    assert todo, "something is waited for"
    chosen = draw(st.lists(st.sampled_from(range(len(todo))), min_size=1, max_size=3, unique=True))
    words: list[Stimulus] = []
    for position in chosen:
        each = todo[position]
        if isinstance(each, Cancel):  # it may end in any way before it is stopped
            each = Start(instance=each.instance)
        if isinstance(each, Start):
            words.append(_end_of(draw, each, at, played, trouble))
        elif isinstance(each, Evaluate):
            is_raised = trouble > 0 and draw(st.integers(0, 19)) < trouble
            verdict = None if is_raised else draw(st.booleans())
            words.append(Evaluated(at=at, question=each.question, answer=verdict))
    return words


def _end_of(draw: st.DrawFn, start: Start, at: float, played: Played, trouble: int) -> Stimulus:
    way = draw(st.integers(0, 39)) if trouble else 39
    if played.is_cancelled and draw(st.booleans()):
        return Cancelled(at=at, instance=start.instance)
    if way < trouble:
        played.has_failed = True
        return Failed(at=at, instance=start.instance, error_type="ValueError")
    if way == trouble:
        played.has_exited = True
        return Exited(at=at, instance=start.instance, reason=ExitReason.TIMEOUT)
    played.completed.append(start.instance)
    text = draw(st.sampled_from(ANSWERS)) if start.wants_text else None
    return Completed(at=at, instance=start.instance, text=text)
