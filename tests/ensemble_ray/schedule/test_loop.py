"""One loop: iterations, the predicate, caps, feedback, context, memory, ends."""

from __future__ import annotations

import pytest

from ensemble_ray import ExitReason, RunState
from ensemble_ray.schedule.instructions import (
    Announce,
    ContextPart,
    Evaluate,
    FollowUpQuestions,
    IterationEnded,
    LoopResult,
    ResetMemory,
    Start,
    TaskChanges,
    UnitFailure,
    UntilHolds,
)
from ensemble_ray.schedule.loop import LOOP_TRANSITIONS, LoopState
from tests.ensemble_ray.schedule.nesting import Nest, announced, loop, nested

UNIT = "loop:refine"


def written(iteration: int) -> str:
    """Instance of the writer, 0-based."""
    return f"{UNIT}#{iteration}/writer#0"


def criticised(iteration: int) -> str:
    """Instance of the critic, 0-based."""
    return f"{UNIT}#{iteration}/critic#0"


def until(iteration: int) -> UntilHolds:
    """The question after an iteration, 1-based."""
    return UntilHolds(unit=UNIT, iteration=iteration)


def result_of(nest: Nest) -> LoopResult:
    """What became of the one loop."""
    (result,) = nest.end.units
    assert isinstance(result, LoopResult)
    return result


def begun(**fields: object) -> Nest:
    """A run of one loop of a writer and a critic, begun."""
    nest = Nest(plan=nested({}, loop(**fields), inside={"writer": (), "critic": ("writer",)}))  # type: ignore[arg-type]  # fields of a loop
    nest.begin()
    return nest


def test_body_runs_in_order() -> None:
    """S-LOOP-3, S-LOOP-40: the critic starts when the writer has completed."""
    nest = begun()
    assert nest.started == [written(0)]
    nest.complete(written(0))
    assert nest.started == [written(0), criticised(0)]


def test_body_runs_in_order_when_the_run_is_parallel() -> None:
    """S-LOOP-3: whatever the ensemble's workflow."""
    nest = Nest(plan=nested({}, loop("refine", "a", "b"), workflow="parallel"))
    nest.begin()
    assert nest.started == ["loop:refine#0/a#0"]


def test_iteration_is_announced_and_then_the_predicate_is_asked() -> None:
    """S-LOOP-107, S-LOOP-40: event first, then the question; with the instances in body order."""
    nest = begun()
    nest.complete(written(0))
    ended = IterationEnded(unit=UNIT, iteration=1, instances=(written(0), criticised(0)), duration_s=2.0)
    assert nest.complete(criticised(0)) == [Announce(what=ended), Evaluate(question=until(1))]


def test_last_task_of_an_iteration_says_what_will_be_asked() -> None:
    """S-LOOP-189: the question and whose outputs it is about; no other task of the body does."""
    nest = begun()
    wanted = {each.instance: each.asks_after for each in nest.source.list_unanswered() if isinstance(each, Start)}
    assert wanted == {written(0): None}
    (start,) = nest.complete(written(0))
    assert isinstance(start, Start)
    assert start.asks_after == FollowUpQuestions(
        questions=(until(1),), names=("writer", "critic"), instances=(written(0), criticised(0))
    )
    *_, asked = nest.complete(criticised(0))
    assert asked == Evaluate(question=until(1))


def test_loop_without_a_predicate_says_that_nothing_will_be_asked() -> None:
    """S-LOOP-189, S-LOOP-43: its body runs as often as the cap says."""
    nest = begun(has_until=False)
    (start,) = nest.complete(written(0))
    assert isinstance(start, Start)
    assert start.asks_after is None


def test_loop_ends_when_the_predicate_holds() -> None:
    """S-LOOP-44: reason `predicate`."""
    nest = begun().play(lambda question: question == until(2))
    assert nest.asked == [until(1), until(2)]
    assert nest.started == [written(0), criticised(0), written(1), criticised(1)]
    assert result_of(nest) == LoopResult(
        unit=UNIT,
        iterations=((written(0), criticised(0)), (written(1), criticised(1))),
        termination_reason="predicate",
    )
    assert nest.end.state is RunState.COMPLETED


def test_predicate_is_asked_after_the_last_iteration_too() -> None:
    """S-LOOP-41, S-LOOP-42: it wins over the cap, whose action is not applied."""
    nest = begun(max_iterations=2, on_max_iterations="throw").play(lambda question: question == until(2))
    assert result_of(nest).termination_reason == "predicate"
    assert nest.end.state is RunState.COMPLETED


def test_body_runs_as_often_as_the_cap_says_when_there_is_no_predicate() -> None:
    """S-LOOP-43: exactly `max_iterations` times; nothing is asked."""
    nest = begun(has_until=False, max_iterations=3).play()
    assert (nest.asked, len(result_of(nest).iterations)) == ([], 3)
    assert result_of(nest).termination_reason == "max_iterations"
    assert len(announced(nest.wanted)) == 3


@pytest.mark.parametrize("action", ["return_last", "return_with_flag"])
def test_run_goes_on_when_the_cap_ends_a_loop(action: str) -> None:
    """S-LOOP-60, S-LOOP-63."""
    nest = begun(max_iterations=1, on_max_iterations=action).play()
    assert (nest.end.state, nest.end.unit_failures) == (RunState.COMPLETED, ())
    assert result_of(nest).termination_reason == "max_iterations"


@pytest.mark.parametrize("has_until", [True, False])
def test_run_fails_when_the_cap_raises(*, has_until: bool) -> None:
    """S-LOOP-61, S-LOOP-43: with and without a predicate."""
    nest = begun(max_iterations=1, on_max_iterations="throw", has_until=has_until).play()
    assert nest.end.unit_failures == (UnitFailure(unit=UNIT, at=nest.at, reason="cap", completed_before=2),)
    assert nest.end.state is RunState.FAILED
    assert len(result_of(nest).iterations) == 1


def test_run_fails_when_the_predicate_raises() -> None:
    """S-LOOP-53: with the type and the text of the error."""
    nest = begun()
    nest.complete(written(0))
    nest.complete(criticised(0))
    nest.answer(until(1), None, "RuntimeError", "boom")
    (failure,) = nest.end.unit_failures
    assert (failure.reason, failure.error_type, failure.message) == ("evaluation", "RuntimeError", "boom")
    assert (failure.unit, failure.completed_before) == (UNIT, 2)
    assert (nest.end.state, result_of(nest).termination_reason) == (RunState.FAILED, None)


def test_iterations_over_the_tokens_end_a_loop() -> None:
    """S-LOOP-141: after the iteration in which the sum reached them; both tasks count."""
    nest = begun(max_tokens=30, max_iterations=9).play(tokens=10)
    assert len(result_of(nest).iterations) == 2
    assert result_of(nest).termination_reason == "budget_exhausted"
    assert nest.end.state is RunState.COMPLETED


def test_tokens_end_a_loop_as_its_cap_does() -> None:
    """S-LOOP-141: `throw` raises."""
    nest = begun(max_tokens=1, on_max_iterations="throw").play(tokens=10)
    assert [failure.reason for failure in nest.end.unit_failures] == ["cap"]
    assert result_of(nest).termination_reason == "budget_exhausted"


def test_predicate_and_cap_win_over_the_tokens() -> None:
    """S-LOOP-141: asked first; both caps reached is the cap on iterations."""
    assert result_of(begun(max_tokens=1).play(lambda _: True, tokens=9)).termination_reason == "predicate"
    assert result_of(begun(max_tokens=1, max_iterations=1).play(tokens=9)).termination_reason == "max_iterations"


def test_unknown_tokens_count_as_none() -> None:
    """S-LOOP-141: a provider that tells nothing never ends a loop."""
    assert result_of(begun(max_tokens=1, max_iterations=2).play(tokens=-1)).termination_reason == "max_iterations"


def test_first_task_gets_feedback_from_the_second_iteration_on() -> None:
    """S-LOOP-100, S-LOOP-101, S-LOOP-105: exact text, the last task's output, made anew each time."""
    nest = begun(max_iterations=3).play()
    changes = {start.instance: start.changes for start in nest.all(Start)}
    assert changes == {
        written(0): None,
        criticised(0): None,
        written(1): TaskChanges(
            attempt=1,
            feedback="Loop iteration 2 of 3. Prior iteration's final body output is shown above; revise based on it.",
            prior=criticised(0),
        ),
        criticised(1): None,
        written(2): TaskChanges(
            attempt=2,
            feedback="Loop iteration 3 of 3. Prior iteration's final body output is shown above; revise based on it.",
            prior=criticised(1),
        ),
        criticised(2): None,
    }


def test_tasks_stay_as_they_are_without_feedback() -> None:
    """S-LOOP-104."""
    nest = begun(inject_feedback=False, max_iterations=3).play()
    assert {start.changes for start in nest.all(Start)} == {None}


def test_later_tasks_get_this_iterations_outputs() -> None:
    """S-LOOP-103: in every iteration."""
    nest = begun(max_iterations=3).play()
    context = {start.instance: start.context for start in nest.all(Start)}
    assert [context[criticised(i)] for i in range(3)] == [(ContextPart((written(i),)),) for i in range(3)]
    assert {context[written(i)] for i in range(3)} == {()}


def test_first_task_is_shown_what_the_loop_waits_for() -> None:
    """S-LOOP-124: in every iteration, before its own context, and no other task is."""
    plan = nested({"facts": (), "style": ()}, loop(context=("facts", "style"), max_iterations=2))
    nest = Nest(plan=plan).play()
    context = {start.instance: start.context for start in nest.all(Start)}
    outer = (ContextPart(("facts#0",)), ContextPart(("style#0",)))
    assert context[written(0)] == context[written(1)] == outer
    assert context[criticised(0)] == context[criticised(1)] == ()


def test_memory_is_left_alone_when_it_accumulates() -> None:
    """S-LOOP-90."""
    assert begun(memory_scopes=("notes",), has_until=False, max_iterations=3).play().asked == []


@pytest.mark.parametrize("mode", ["fresh_per_iteration", "window"])
def test_memory_is_reset_before_every_iteration_but_the_first(mode: str) -> None:
    """S-LOOP-91, S-LOOP-93: before iterations 2..n, never after the last."""
    nest = begun(memory_mode=mode, memory_scopes=("notes",), has_until=False, max_iterations=3).play()
    assert nest.asked == [ResetMemory(unit=UNIT, iteration=2), ResetMemory(unit=UNIT, iteration=3)]


def test_next_iteration_waits_for_the_reset() -> None:
    """S-LOOP-40: memory first, then the body."""
    nest = begun(memory_mode="window", memory_scopes=("notes",), has_until=False)
    nest.complete(written(0))
    nest.complete(criticised(0))
    assert nest.started == [written(0), criticised(0)]
    nest.answer(ResetMemory(unit=UNIT, iteration=2), answer=True)
    assert nest.started[-1] == written(1)


def test_memory_is_not_reset_when_no_scope_is_declared() -> None:
    """S-LOOP-94."""
    assert begun(memory_mode="fresh_per_iteration", has_until=False, max_iterations=2).play().asked == []


def test_run_fails_when_memory_cannot_be_cleared() -> None:
    """S-LOOP-92: at the start of iteration 2; a loop that stops after 1 never asks."""
    nest = begun(memory_mode="fresh_per_iteration", memory_scopes=("notes",), has_until=False)
    nest.complete(written(0))
    nest.complete(criticised(0))
    nest.answer(ResetMemory(unit=UNIT, iteration=2), None, "NotImplementedError", "cannot clear")
    (failure,) = nest.end.unit_failures
    assert (failure.reason, failure.error_type) == ("evaluation", "NotImplementedError")
    assert begun(memory_mode="window", memory_scopes=("notes",)).play(lambda _: True).asked == [until(1)]


def test_loop_ends_when_a_task_fails() -> None:
    """S-LOOP-110, S-LOOP-109: no further iteration, and no event of this one."""
    nest = begun()
    nest.complete(written(0))
    nest.fail(criticised(0))
    assert (nest.end.state, nest.end.unit_failures) == (RunState.FAILED, ())
    assert result_of(nest) == LoopResult(unit=UNIT, iterations=((written(0),),), termination_reason=None)
    assert announced(nest.wanted) == []


def test_loop_ends_when_a_task_exits_early() -> None:
    """S-LOOP-112: the unfinished iteration has what completed; the run's reason is the task's."""
    nest = begun()
    nest.complete(written(0))
    nest.exit(criticised(0), ExitReason.TIMEOUT)
    assert (nest.end.state, nest.end.exit_reason) == (RunState.COMPLETED, ExitReason.TIMEOUT)
    assert result_of(nest) == LoopResult(unit=UNIT, iterations=((written(0),),), termination_reason="exit_early")


def test_iteration_has_the_task_whose_gate_ends_the_run() -> None:
    """S-LOOP-112, S-REV-32: its output is there; the predicate is not asked."""
    nest = begun()
    nest.complete(written(0))
    nest.exit(criticised(0), has_output=True)
    assert result_of(nest) == LoopResult(
        unit=UNIT, iterations=((written(0), criticised(0)),), termination_reason="exit_early"
    )


def test_no_iteration_is_noted_when_its_first_task_exits() -> None:
    """S-LOOP-112: nothing completed in it."""
    nest = begun()
    nest.exit(written(0))
    assert result_of(nest).iterations == ()


def test_run_that_is_cancelled_stops_the_task_of_a_loop() -> None:
    """S-SET-27: and asks nothing more."""
    nest = begun()
    nest.cancel()
    assert nest.stopped(written(0)) == [nest.end]
    assert (nest.end.state, result_of(nest).termination_reason) == (RunState.CANCELLED, None)


def test_run_that_is_cancelled_waits_for_no_predicate() -> None:
    """S-SET-27: a verdict that comes later is late."""
    nest = begun()
    nest.complete(written(0))
    nest.complete(criticised(0))
    nest.cancel()
    assert nest.end.state is RunState.CANCELLED
    assert nest.answer(until(1), answer=True) == []


def test_answer_to_a_question_that_was_not_asked_is_ignored() -> None:
    """S-PAR-12: late or foreign words change nothing."""
    nest = begun()
    assert nest.answer(until(1), answer=True) == []
    assert nest.complete(criticised(0)) == []
    assert nest.play(lambda _: True).end.state is RunState.COMPLETED


def test_history_is_not_copied_from_iteration_to_iteration() -> None:
    """S-LOOP-145: the predicate's history grows in place, its entries stay the same objects."""
    nest = begun(max_iterations=1000)
    nest.play(lambda question: question == until(2))
    long = begun(max_iterations=1000)
    long.begin()
    seen = long.source.history_of(UNIT)
    for iteration in range(400):
        long.complete(written(iteration))
        long.complete(criticised(iteration))
        entry = seen[-1]
        assert long.source.history_of(UNIT) is seen
        long.answer(until(iteration + 1), answer=False)
        assert seen[iteration] is entry
    assert len(seen) == 400


def test_every_iteration_wants_as_much_as_any_other() -> None:
    """S-LOOP-145: and scopes of iterations that are over are let go."""
    nest = begun(max_iterations=1000)
    wanted: list[int] = []
    for iteration in range(300):
        before = len(nest.wanted)
        nest.complete(written(iteration))
        nest.complete(criticised(iteration))
        nest.answer(until(iteration + 1), answer=False)
        wanted.append(len(nest.wanted) - before)
        assert nest.source.scope_count <= 2
    assert set(wanted) == {4}


def test_table_knows_every_state() -> None:
    """S-LOOP-40: every state is reached, every state that is not an end is left, and no end is."""
    before = {state for state, _ in LOOP_TRANSITIONS}
    after = set(LOOP_TRANSITIONS.values())
    assert before == {state for state in LoopState if not state.is_over}
    assert after == set(LoopState) - {LoopState.PENDING}
