"""Runs with loops played with at random: bodies, outcomes, verdicts, caps, batches, cancellations and late words."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray import ExitReason, Plan, RunState
from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.schedule.instructions import (
    Announce,
    Cancel,
    End,
    Evaluate,
    IterationEnded,
    LoopResult,
    Question,
    Start,
)
from ensemble_ray.schedule.stimuli import Cancelled, CancelRequested, Completed, Evaluated, Exited, Failed, Stimulus
from tests.ensemble_ray.schedule.nesting import Nest, loop, nested

SEEDED = settings(max_examples=40)


@dataclass(kw_only=True)
class Played:
    """A run that was played to its end."""

    nest: Nest
    completed: list[str] = field(default_factory=list)
    is_cancelled: bool = False
    has_exited: bool = False
    most_at_once: int = 0

    @property
    def loops(self) -> list[LoopResult]:
        """What became of the loops."""
        return [each for each in self.nest.end.units if isinstance(each, LoopResult)]


@st.composite
def loops(draw: st.DrawFn, number: int, tasks: list[str]) -> LoopUnit:
    """Any loop."""
    return loop(
        f"l{number}",
        *(f"l{number}-{position}" for position in range(draw(st.integers(1, 3)))),
        max_iterations=draw(st.integers(1, 4)),
        has_until=draw(st.booleans()),
        on_max_iterations=draw(st.sampled_from(["return_last", "throw", "return_with_flag"])),
        output_mode=draw(st.sampled_from(["last_iteration", "final_task_only", "all_iterations"])),
        memory_mode=draw(st.sampled_from(["accumulate", "fresh_per_iteration", "window"])),
        memory_scopes=draw(st.sampled_from([(), ("notes",)])),
        context=tuple(draw(st.lists(st.sampled_from(tasks), unique=True, max_size=2))) if tasks else (),
        max_tokens=draw(st.none() | st.integers(1, 9)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any tasks and loops, of which later tasks may depend, under any rules."""
    tasks: dict[str, list[str]] = {}
    for number in range(draw(st.integers(0, 3))):
        known = list(tasks)
        tasks[f"t{number}"] = draw(st.lists(st.sampled_from(known), unique=True)) if known else []
    units = [draw(loops(number, list(tasks))) for number in range(draw(st.integers(1, 3)))]
    workflow = draw(st.sampled_from(["sequential", "parallel"]))
    if workflow == "parallel" and draw(st.booleans()):
        tasks["after"] = [unit.key for unit in units]
    return nested(
        tasks,
        *units,
        workflow=workflow,
        error_strategy=draw(st.sampled_from(["fail_fast", "continue_on_error"])),
        cap=draw(st.none() | st.integers(1, 3)),
    )


def _end_of(draw: st.DrawFn, instance: str, at: float, played: Played) -> Stimulus:
    way = draw(st.sampled_from(["completed"] * 7 + ["failed", "exited"]))
    if played.is_cancelled and draw(st.booleans()):
        return Cancelled(at=at, instance=instance)
    if way == "failed":
        return Failed(at=at, instance=instance, error_type="ValueError")
    if way == "exited":
        played.has_exited = True
        return Exited(at=at, instance=instance, reason=ExitReason.TIMEOUT)
    played.completed.append(instance)
    return Completed(at=at, instance=instance, total_tokens=draw(st.integers(-1, 3)))


def _answer_to(draw: st.DrawFn, question: Question, at: float) -> Stimulus:
    answer = draw(st.sampled_from([False, False, False, True, None]))
    return Evaluated(at=at, question=question, answer=answer, error_type="" if answer is not None else "ValueError")


@st.composite
def plays(draw: st.DrawFn) -> Played:
    """Any run, in which what is open is answered in any order, some together, and some words come twice."""
    nest = Nest(plan=draw(plans()))
    played = Played(nest=nest)
    nest.begin()
    late: list[Stimulus] = []
    for at in range(1, 2000):
        if nest.ends:
            break
        if not played.is_cancelled and draw(st.integers(0, 19)) == 0:
            played.is_cancelled = True
            nest.handle(CancelRequested(at=at))
            continue
        open_words = nest.source.list_unanswered()
        assert open_words, "something is waited for"
        played.most_at_once = max(played.most_at_once, len(nest.source.running))
        chosen = draw(st.lists(st.sampled_from(range(len(open_words))), min_size=1, max_size=3, unique=True))
        group: list[Stimulus] = []
        for position in chosen:
            word = open_words[position]
            if isinstance(word, Start | Cancel):
                group.append(_end_of(draw, word.instance, at, played))
            elif isinstance(word, Evaluate):
                group.append(_answer_to(draw, word.question, at))
        nest.handle(*group)
        late += group
        if draw(st.integers(0, 4)) == 0:
            nest.handle(
                draw(
                    st.sampled_from(
                        [each for each in late if isinstance(each, Completed | Failed | Exited | Cancelled)]
                        or group[:1]
                    )
                )
            )
    return played


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_run_ends_once_and_every_loop_ends_once(played: Played) -> None:
    """S-PAR-12: the end is the last word; nothing is started twice; every loop that began has one result."""
    nest = played.nest
    assert isinstance(nest.wanted[-1], End)
    assert len(nest.ends) == 1
    assert len(set(nest.started)) == len(nest.started)
    units = [each.unit for each in played.loops]
    assert len(set(units)) == len(units)
    assert {each.partition("#")[0] for each in nest.started if each.startswith("loop:")} <= set(units)
    assert nest.source.running == ()
    assert nest.source.list_unanswered() == []


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_histories_are_what_completed(played: Played) -> None:
    """S-LOOP-112, S-LOOP-131: in iterations and body order; whole iterations were announced, each once, in order."""
    units = {unit.key: unit for unit in played.nest.plan.units if isinstance(unit, LoopUnit)}
    inside = [each for each in played.completed if each.startswith("loop:")]
    assert sorted(inside) == sorted(each for one in played.loops for iteration in one.iterations for each in iteration)
    announced = [each.what for each in played.nest.all(Announce) if isinstance(each.what, IterationEnded)]
    for one in played.loops:
        unit = units[one.unit]
        whole = [iteration for iteration in one.iterations if len(iteration) == len(unit.body)]
        assert [each.instances for each in announced if each.unit == one.unit] == whole
        assert [each.iteration for each in announced if each.unit == one.unit] == list(range(1, len(whole) + 1))
        assert len(one.iterations) - len(whole) in {0, 1}
        assert len(one.iterations) <= unit.max_iterations
        if one.termination_reason == "max_iterations":
            assert len(whole) == unit.max_iterations
        if one.termination_reason in {"predicate", "budget_exhausted"}:
            assert whole == list(one.iterations)


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_places_are_kept(played: Played) -> None:
    """S-LOOP-144: never more tasks than places, wherever they run."""
    cap = played.nest.plan.max_parallel_tasks
    assert cap is None or played.most_at_once <= cap


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_end_says_what_happened(played: Played) -> None:
    """S-PAR-30, S-SET-27: a cancellation outranks an exit, and an exit a failure; a failed unit fails the run."""
    end = played.nest.end
    if played.is_cancelled:
        assert end.state is RunState.CANCELLED
        return
    if played.has_exited:
        assert (end.state, end.exit_reason) == (RunState.COMPLETED, ExitReason.TIMEOUT)
    elif end.unit_failures:
        assert end.state is RunState.FAILED
    assert {each.unit for each in end.unit_failures} <= {each.unit for each in played.loops}


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_same_words_give_the_same_run(played: Played) -> None:
    """S-LOOP-143: a run that is told again what it was told stands where it stood, after every group of words."""
    again = Nest(plan=played.nest.plan)
    for group in played.nest.told:
        again.handle(*group)
    assert again.wanted == played.nest.wanted


@pytest.mark.heavy
@SEEDED
@given(plays())
def test_nothing_starts_after_a_cancellation(played: Played) -> None:
    """S-SET-27: and what ran is stopped."""
    again = Nest(plan=played.nest.plan)
    is_cancelled = False
    for group in played.nest.told:
        running = set(again.source.running)
        done = again.handle(*group)
        if isinstance(group[0], CancelRequested):
            is_cancelled = True
            assert {each.instance for each in done if isinstance(each, Cancel)} == running
        if is_cancelled:
            assert not [each for each in done if isinstance(each, Start | Evaluate)]
