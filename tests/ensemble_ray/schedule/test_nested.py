"""Units inside of a run: order, places, exits, failures, cancelling, context across units."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ensemble_ray import ExitReason, RunState
from ensemble_ray.plan.plan import EdgeEntry, GraphUnit, PhaseUnit, StateEntry
from ensemble_ray.schedule import machine_for
from ensemble_ray.schedule.instructions import (
    ContextPart,
    End,
    GraphResult,
    Inform,
    Instruction,
    LoopResult,
    Skip,
    Start,
    TaskChanges,
    UntilHolds,
)
from ensemble_ray.schedule.machine import ParallelMachine, SequentialMachine, TaskState
from ensemble_ray.schedule.nested import NestedSource, make_machine
from ensemble_ray.schedule.stimuli import Begun, Completed
from ensemble_ray.schedule.unit import HistoryEntry, Parts, StopRequested, UnitMember, UnitStimulus
from tests.ensemble_ray.schedule.nesting import Nest, cancelled, loop, nested, node

A = loop("a", "x", max_iterations=2, has_until=False)
B = loop("b", "y", max_iterations=2, has_until=False)


def reasons(nest: Nest) -> list[tuple[str, str | None]]:
    """What became of the loops."""
    return [(each.unit, each.termination_reason) for each in nest.end.units if isinstance(each, LoopResult)]


def test_plan_without_units_has_the_machine_of_its_workflow() -> None:
    """S-PAR-10: nothing of nests is in its way."""
    assert isinstance(machine_for(nested({"a": ()})), SequentialMachine)
    assert isinstance(machine_for(nested({"a": ()}, workflow="parallel")), ParallelMachine)
    assert isinstance(machine_for(nested({}, A)), NestedSource)


def test_all_tasks_run_before_all_loops_when_the_run_is_sequential() -> None:
    """S-LOOP-120: tasks in declared order, then loops in declared order."""
    nest = Nest(plan=nested({"first": (), "last": ()}, A, B)).play()
    assert nest.started == ["first#0", "last#0", "loop:a#0/x#0", "loop:a#1/x#0", "loop:b#0/y#0", "loop:b#1/y#0"]
    assert reasons(nest) == [("loop:a", "max_iterations"), ("loop:b", "max_iterations")]


def test_task_that_waits_for_a_loop_runs_behind_it_when_the_run_is_sequential() -> None:
    """S-LOOP-168: itself or by way of others; what is left stays in order."""
    plan = nested({"report": ("loop:a",), "print": ("report",), "alone": ()}, A, B)
    nest = Nest(plan=plan).play()
    assert [each for each in nest.started if each.endswith("#0") and "#1" not in each] == [
        "alone#0",
        "loop:a#0/x#0",
        "report#0",
        "print#0",
        "loop:b#0/y#0",
    ]


def test_independent_loops_run_side_by_side_when_the_run_is_parallel() -> None:
    """S-LOOP-121: a loop without context starts with the root tasks."""
    nest = Nest(plan=nested({"task": ()}, A, B, workflow="parallel"))
    nest.begin()
    assert nest.started == ["task#0", "loop:a#0/x#0", "loop:b#0/y#0"]


def test_loop_waits_for_its_context_when_the_run_is_parallel() -> None:
    """S-LOOP-121, S-LOOP-124: it starts when those tasks are done, and shows them."""
    nest = Nest(plan=nested({"facts": (), "other": ()}, loop("a", "x", context=("facts",)), workflow="parallel"))
    nest.begin()
    assert nest.started == ["facts#0", "other#0"]
    assert nest.complete("facts#0") == [Start(instance="loop:a#0/x#0", context=(ContextPart(("facts#0",)),))]


def test_loop_is_skipped_when_its_context_failed() -> None:
    """S-LOOP-122: and has no result."""
    unit = loop("a", "x", context=("facts",))
    nest = Nest(plan=nested({"facts": ()}, unit, workflow="parallel", error_strategy="continue_on_error"))
    nest.begin()
    done = nest.fail("facts#0")
    assert done[0] == Skip(instance="loop:a#0", reason="context task 'facts' did not complete")
    assert nest.end.units == ()


@pytest.mark.parametrize(
    ("mode", "parts"),
    [
        ("last_iteration", (ContextPart(("loop:refine#1/writer#0", "loop:refine#1/critic#0")),)),
        ("final_task_only", (ContextPart(("loop:refine#1/critic#0",)),)),
        (
            "all_iterations",
            (
                ContextPart(("loop:refine#0/writer#0", "loop:refine#1/writer#0"), is_joined=True),
                ContextPart(("loop:refine#0/critic#0", "loop:refine#1/critic#0"), is_joined=True),
            ),
        ),
    ],
)
def test_task_gets_what_a_loop_projects(mode: str, parts: tuple[ContextPart, ...]) -> None:
    """S-LOOP-146, S-LOOP-70, S-LOOP-71, S-LOOP-72: in the place of the entry; no iteration before is shown."""
    unit = loop(max_iterations=2, has_until=False, output_mode=mode)
    plan = nested({"facts": (), "report": ("facts", "loop:refine")}, unit, workflow="parallel")
    nest = Nest(plan=plan).play()
    (start,) = [each for each in nest.all(Start) if each.instance == "report#0"]
    assert start.context == (ContextPart(("facts#0",)), *parts)
    assert nest.started[-1] == "report#0"


def test_missing_context_is_named_when_the_run_is_sequential() -> None:
    """S-ENG-11: the first entry without an output."""
    nest = Nest(plan=nested({"early": ("late",), "late": ()}, A))
    nest.begin()
    assert nest.wanted == [Start(instance="early#0", context=(), missing="late")]


def test_tasks_in_loops_count_among_the_places() -> None:
    """S-LOOP-144: of the whole run, in the order in which they were wanted; a loop takes none."""
    nest = Nest(plan=nested({"task": ()}, A, B, workflow="parallel", cap=2))
    nest.begin()
    assert nest.started == ["task#0", "loop:a#0/x#0"]
    nest.complete("loop:a#0/x#0")
    assert nest.started[2:] == ["loop:b#0/y#0"]
    nest.complete("task#0")
    assert nest.started[3:] == ["loop:a#1/x#0"]
    assert nest.play().end.state is RunState.COMPLETED


def test_later_units_do_not_run_when_a_loop_exits() -> None:
    """S-LOOP-112: in sequence."""
    nest = Nest(plan=nested({}, A, B))
    nest.begin()
    nest.exit("loop:a#0/x#0")
    assert (nest.end.state, nest.end.exit_reason) == (RunState.COMPLETED, ExitReason.USER_EXIT_EARLY)
    assert reasons(nest) == [("loop:a", "exit_early")]


def test_loops_do_not_run_when_a_task_exits() -> None:
    """S-LOOP-111."""
    nest = Nest(plan=nested({"task": ()}, A))
    nest.begin()
    nest.exit("task#0")
    assert (nest.end.units, nest.end.exit_reason) == ((), ExitReason.USER_EXIT_EARLY)


def test_running_loop_starts_nothing_more_when_the_run_exits() -> None:
    """S-LOOP-142, S-PAR-30: its running task ends; the iteration that is over by that is told of."""
    nest = Nest(plan=nested({"task": ()}, A, loop("w"), workflow="parallel"))
    nest.begin()
    nest.exit("task#0", ExitReason.TIMEOUT)
    assert not nest.ends
    nest.complete("loop:w#0/writer#0")
    nest.complete("loop:a#0/x#0")
    assert reasons(nest) == [("loop:w", "exit_early"), ("loop:a", "exit_early")]
    assert [len(each.iterations) for each in nest.end.units if isinstance(each, LoopResult)] == [1, 1]
    assert nest.started == ["task#0", "loop:a#0/x#0", "loop:w#0/writer#0"]
    assert nest.end.exit_reason is ExitReason.TIMEOUT


def test_running_loop_starts_nothing_more_when_the_run_fails_fast() -> None:
    """S-LOOP-142, S-PAR-21: it has no reason."""
    nest = Nest(plan=nested({"task": ()}, A, workflow="parallel"))
    nest.begin()
    nest.fail("task#0")
    nest.complete("loop:a#0/x#0")
    assert (nest.end.state, reasons(nest)) == (RunState.FAILED, [("loop:a", None)])


def test_loop_whose_predicate_is_asked_ends_at_once_when_the_run_exits() -> None:
    """S-LOOP-142: nobody waits for the verdict."""
    nest = Nest(plan=nested({"task": ()}, loop("w", "x"), workflow="parallel"))
    nest.begin()
    nest.complete("loop:w#0/x#0")
    nest.exit("task#0")
    assert reasons(nest) == [("loop:w", "exit_early")]
    assert nest.answer(UntilHolds(unit="loop:w", iteration=1), answer=True) == []


def test_others_go_on_when_a_loop_fails_and_the_strategy_says_so() -> None:
    """S-LOOP-62: the loop is one failed node; its dependents are skipped, the rest goes on."""
    unit = loop("a", "x", max_iterations=1, has_until=False, on_max_iterations="throw")
    plan = nested({"after": ("loop:a",), "alone": ()}, unit, B, workflow="parallel", error_strategy="continue_on_error")
    nest = Nest(plan=plan)
    nest.begin()
    done = nest.complete("loop:a#0/x#0")
    assert done[1:] == [
        Inform(text="Loop 'a' reached its cap of 1 iterations: throw"),
        Skip(instance="after#0", reason="context task 'loop:a' did not complete"),
    ]
    nest.play()
    assert nest.end.state is RunState.FAILED
    assert [(each.unit, each.reason) for each in nest.end.unit_failures] == [("loop:a", "cap")]
    assert reasons(nest)[-1] == ("loop:b", "max_iterations")


def test_task_that_waits_for_a_place_is_taken_back_when_the_run_fails_fast() -> None:
    """S-PAR-21: nothing that has not started starts."""
    nest = Nest(plan=nested({"one": (), "two": ()}, A, workflow="parallel", cap=1))
    nest.begin()
    done = nest.fail("one#0")
    skipped = [each.instance for each in done if isinstance(each, Skip)]
    assert skipped == ["two#0", "loop:a#0/x#0"]
    assert (nest.started, nest.end.state) == (["one#0"], RunState.FAILED)


def test_everything_that_runs_is_cancelled() -> None:
    """S-SET-27: in every unit; what waits for a place never runs."""
    nest = Nest(plan=nested({"task": ()}, A, B, workflow="parallel", cap=2))
    nest.begin()
    assert cancelled(nest.cancel()) == ["task#0", "loop:a#0/x#0"]
    nest.stopped("task#0")
    nest.stopped("loop:a#0/x#0")
    assert (nest.end.state, nest.started) == (RunState.CANCELLED, ["task#0", "loop:a#0/x#0"])


def test_run_that_is_cancelled_before_it_began_ends() -> None:
    """S-SET-27: without a start."""
    nest = Nest(plan=nested({"task": ()}, A))
    nest.cancel()
    assert (nest.started, nest.end.state) == ([], RunState.CANCELLED)


def test_run_that_goes_on_wants_what_has_no_answer() -> None:
    """S-LOOP-143: what ran with its context and changes, and the open question; nothing that is recorded."""
    plan = nested({"task": ()}, loop("w", "x"), B, workflow="parallel")
    first = Nest(plan=plan)
    first.begin()
    first.complete("loop:w#0/x#0")
    first.answer(UntilHolds(unit="loop:w", iteration=1), answer=False)
    first.complete("loop:b#0/y#0")
    first.complete("loop:w#1/x#0")
    again = Nest(plan=plan)
    for group in first.told:
        again.handle(*group)
    assert again.source.list_unanswered() == first.source.list_unanswered()
    assert [each.instance for each in again.source.list_unanswered() if isinstance(each, Start)] == [
        "task#0",
        "loop:b#1/y#0",
    ]
    assert again.wanted == first.wanted


# Machines below a path, as phases hold them.


def test_machine_starts_its_members_below_its_path() -> None:
    """S-PHASE-81: with what the attempt changes; the prior output of each is its own."""
    changes = TaskChanges(attempt=1, feedback="shorter", prior="phase:p#0")
    machine = SequentialMachine([node("a"), node("b")], parent="phase:p#1", changes=changes)
    assert machine.handle(Begun(at=0.0)) == [
        Start(instance="phase:p#1/a#0", changes=TaskChanges(attempt=1, feedback="shorter", prior="phase:p#0/a#0"))
    ]
    machine.handle(Completed(at=1.0, instance="phase:p#1/a#0"))
    machine.handle(Completed(at=2.0, instance="phase:p#1/b#0"))
    assert machine.projection() == (ContextPart(("phase:p#1/a#0", "phase:p#1/b#0")),)


def test_machine_waits_for_its_own_members_alone() -> None:
    """S-PHASE-35: what it needs of another phase is there already."""
    machine = ParallelMachine([UnitMember("a", ("elsewhere",)), UnitMember("b", ("a",))], parent="phase:p#0")
    assert machine.handle(Begun(at=0.0)) == [Start(instance="phase:p#0/a#0")]


@pytest.mark.parametrize(("reason", "state"), [(None, RunState.CANCELLED), (ExitReason.TIMEOUT, RunState.COMPLETED)])
def test_machine_that_is_to_stop_starts_nothing_more(reason: ExitReason | None, state: RunState) -> None:
    """S-PHASE-56: what runs ends; it ends as the run around it does."""
    machine = SequentialMachine([node("a"), node("b")], parent="phase:p#0")
    machine.handle(Begun(at=0.0))
    assert machine.handle(StopRequested(at=1.0, exit_reason=reason)) == [
        Skip(instance="phase:p#0/b#0", reason="run ending early")
    ]
    assert machine.is_stopping
    (end,) = machine.handle(Completed(at=2.0, instance="phase:p#0/a#0"))
    assert end == End(state=state, exit_reason=reason or ExitReason.CANCELLED)


def test_machine_that_has_started_all_just_ends() -> None:
    """S-PHASE-56: there is nothing to be left out."""
    machine = ParallelMachine([node("a"), node("b")])
    machine.handle(Begun(at=0.0))
    assert machine.handle(StopRequested(at=1.0, exit_reason=ExitReason.TIMEOUT)) == []
    (end,) = machine.handle(Completed(at=2.0, instance="a#0"), Completed(at=2.0, instance="b#0"))
    assert end == End(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)
    assert set(machine.states.values()) == {TaskState.COMPLETED}


class TwoAttempts:
    """A run of one phase that is tried twice, as a review has it."""

    is_stopping = False
    history: Sequence[HistoryEntry] = ()

    def handle(self, *stimuli: UnitStimulus) -> list[Instruction]:
        """Start the second attempt after the first."""
        (stimulus,) = stimuli
        if isinstance(stimulus, Begun):
            return [Start(instance="phase:p#0")]
        if isinstance(stimulus, Completed) and stimulus.instance == "phase:p#0":
            return [Start(instance="phase:p#1", changes=TaskChanges(attempt=1, feedback="shorter", prior="phase:p#0"))]
        return [End(state=RunState.COMPLETED, exit_reason=ExitReason.COMPLETED)]

    def projection(self) -> Parts:
        """Show nothing."""
        return ()


def test_loop_in_a_phase_that_is_tried_again_gets_the_feedback() -> None:
    """S-LOOP-140: its first task, once, with the loop's last output; then its own feedback."""
    unit = loop("l", "w", "c", max_iterations=2, has_until=False)
    plan = nested({}, unit, PhaseUnit(key="phase:p", name="p", members=("loop:l",)))
    nest = Nest(plan=plan, make=lambda it: make_machine(it) if it.instance else TwoAttempts()).play()
    changes = {start.instance: start.changes for start in nest.all(Start)}
    assert changes["phase:p#1/loop:l#0/w#0"] == TaskChanges(
        attempt=1, feedback="shorter", prior="phase:p#0/loop:l#1/c#0"
    )
    second = changes["phase:p#1/loop:l#1/w#0"]
    assert isinstance(second, TaskChanges)
    assert (second.attempt, second.prior) == (1, "phase:p#1/loop:l#0/c#0")
    assert changes["phase:p#1/loop:l#0/c#0"] is None
    assert [result.unit for result in nest.end.units if isinstance(result, LoopResult)] == [
        "phase:p#0/loop:l",
        "phase:p#1/loop:l",
    ]


@pytest.mark.parametrize(("has_output", "steps"), [(True, ("graph:g#0/loop:a",)), (False, ())])
def test_loop_that_a_gate_ends_is_a_step_if_it_gave_anything(has_output: bool, steps: tuple[str, ...]) -> None:  # noqa: FBT001  a parameter
    """S-REV-110, S-GRAPH-53, S-LOOP-181: what the loop projects is the step's output."""
    graph = GraphUnit(
        key="graph:g",
        name="g",
        states=(StateEntry(name="s", member="loop:a"),),
        edges=(EdgeEntry(from_state="s", to_state="__END__", has_condition=False),),
        start="s",
    )
    nest = Nest(plan=nested({}, A, graph))
    nest.begin()
    nest.exit("graph:g#0/loop:a#0/x#0", has_output=has_output)
    (result,) = [each for each in nest.end.units if isinstance(each, GraphResult)]
    assert tuple(step.instance for step in result.steps) == steps
    assert nest.end.exit_reason is ExitReason.USER_EXIT_EARLY
