"""Which outputs a run shows, and in which order."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ensemble_ray import Plan
from ensemble_ray.plan.plan import LoopUnit
from ensemble_ray.record.units import EndedUnits
from ensemble_ray.schedule.instructions import GraphResult, LoopResult, PhaseResult, StepResult
from ensemble_ray.values.task_output import join_iterations
from tests.ensemble_ray.record.units.plans import (
    DRAFT,
    POLISH,
    PRINT,
    REFINE,
    TRIAGE,
    graph_plan,
    loop_plan,
    output,
    outputs,
    phase_plan,
)

#: Two iterations of writer and critic.
TWO = (
    ("loop:refine#0/write#0", "loop:refine#0/critic#0"),
    ("loop:refine#1/write#0", "loop:refine#1/critic#0"),
)
RAN = LoopResult(unit="loop:refine", iterations=TWO, termination_reason="predicate")
ALL = outputs(["facts#0", *TWO[0], *TWO[1]])


def _raws(ended: EndedUnits) -> list[str]:
    return [each.output.raw for each in ended.list_visible()]


@pytest.mark.parametrize(
    ("mode", "shown"),
    [
        ("last_iteration", ["facts#0", "loop:refine#1/write#0", "loop:refine#1/critic#0"]),
        ("final_task_only", ["facts#0", "loop:refine#1/critic#0"]),
        (
            "all_iterations",
            [
                "facts#0",
                "loop:refine#0/write#0\n\n--- iteration 2 ---\n\nloop:refine#1/write#0",
                "loop:refine#0/critic#0\n\n--- iteration 2 ---\n\nloop:refine#1/critic#0",
            ],
        ),
    ],
)
def test_loop_shows_what_its_mode_says(mode: str, shown: list[str]) -> None:
    """S-LOOP-70, S-LOOP-71, S-LOOP-72, S-LOOP-75: after the plain tasks, since none waits for it, in body order."""
    plan = loop_plan(replace(REFINE, output_mode=mode))
    ended = EndedUnits(plan=plan, results=[RAN], outputs=ALL)
    assert _raws(ended) == shown
    assert [each.key for each in ended.list_visible()] == (
        ["facts", "critic"] if mode == "final_task_only" else ["facts", "write", "critic"]
    )


def test_joined_iterations_have_all_else_from_the_first() -> None:
    """S-LOOP-72, S-LOOP-73, S-LOOP-74: a header for every iteration but the first, also where a text is empty."""
    first = output("one")
    joined = join_iterations([first, output(""), output("three")])
    assert joined.raw == "one\n\n--- iteration 2 ---\n\n\n\n--- iteration 3 ---\n\nthree"
    assert joined.parsed_output is None
    assert joined == first.model_copy(update={"raw": joined.raw, "parsed_output": None})
    assert join_iterations([first]).raw == "one"


def test_loops_come_in_declared_order_when_they_end_in_another() -> None:
    """S-LOOP-75, S-LOOP-76: behind a plain task that completed after them and waits for none of them."""
    polished = LoopResult(unit="loop:polish", iterations=(("loop:polish#0/shine#0",),), termination_reason="predicate")
    made = outputs(["loop:polish#0/shine#0", *TWO[0], *TWO[1], "facts#0"])
    ended = EndedUnits(plan=loop_plan(REFINE, POLISH), results=[polished, RAN], outputs=made)
    assert _raws(ended) == ["facts#0", "loop:refine#1/write#0", "loop:refine#1/critic#0", "loop:polish#0/shine#0"]


def _waiting(plan: Plan, waits_for: Mapping[str, tuple[str, ...]]) -> Plan:
    """Return the plan with what its tasks wait for."""
    return replace(plan, nodes=tuple(replace(node, context=waits_for.get(node.key, ())) for node in plan.nodes))


def _ran(*loops: LoopUnit, parent: str = "") -> tuple[list[LoopResult], list[str]]:
    """Return results of loops that ran once, and the instances of their tasks."""
    found = [(f"{parent}{loop.key}", tuple(f"{parent}{loop.key}#0/{key}#0" for key in loop.body)) for loop in loops]
    results = [LoopResult(unit=unit, iterations=(names,), termination_reason="predicate") for unit, names in found]
    return results, [name for _, names in found for name in names]


def test_loop_comes_before_the_tasks_that_wait_for_it() -> None:
    """S-LOOP-75, S-LOOP-76: right before the first of them; tasks stay in the order in which they completed."""
    plan = _waiting(
        loop_plan(REFINE, POLISH, plain=("facts", "report", "index", "cover")),
        {"report": ("facts", "loop:refine"), "cover": ("loop:refine", "loop:polish")},
    )
    results, inside = _ran(POLISH, REFINE)
    made = outputs([*inside, "facts#0", "index#0", "report#0", "cover#0"])
    refined = ["loop:refine#0/write#0", "loop:refine#0/critic#0"]
    assert _raws(EndedUnits(plan=plan, results=results, outputs=made)) == [
        "facts#0", "index#0", *refined, "report#0", "loop:polish#0/shine#0", "cover#0",
    ]  # fmt: skip


def test_loop_comes_before_the_loops_that_wait_for_it() -> None:
    """S-LOOP-75: whatever their declared order; those that none waits for stay in theirs, behind all tasks."""
    first = replace(REFINE, key="loop:first", body=("a",), context=("loop:third",))
    second, third = (replace(REFINE, key=f"loop:{name}", body=(name[0],)) for name in ("second", "third"))
    results, inside = _ran(second, third, first)
    made = outputs([*inside, "facts#0"])
    ended = EndedUnits(plan=loop_plan(first, second, third), results=results, outputs=made)
    assert [each.key for each in ended.list_visible()] == ["facts", "t", "a", "s"]
    plan = _waiting(ended.plan, {"facts": ("loop:first",)})
    ended = EndedUnits(plan=plan, results=results, outputs=made)
    assert [each.key for each in ended.list_visible()] == ["t", "a", "facts", "s"]


def test_loops_in_a_phase_have_their_places_too() -> None:
    """S-PHASE-123: before what waits for them, else behind the tasks of the phase, whatever order they completed in."""
    phase = replace(DRAFT, members=("plan", "write up", "loop:polish", "loop:refine"), workflow="parallel", review=None)
    plan = _waiting(phase_plan(phase, loops=[POLISH, REFINE]), {"write up": ("loop:refine",)})
    parent = "phase:draft#0/"
    results, inside = _ran(POLISH, REFINE, parent=parent)
    given = tuple(parent + each for each in ("loop:polish", "plan#0", "loop:refine", "write up#0"))
    made = outputs([*inside, f"{parent}plan#0", f"{parent}write up#0"])
    ended = EndedUnits(
        plan=plan, results=[*results, PhaseResult(unit="phase:draft", status="completed", outputs=given)], outputs=made
    )
    assert [each.key for each in ended.list_visible()] == ["plan", "write", "critic", "write up", "shine"]


def test_thousand_loops_that_wait_for_each_other_are_placed() -> None:
    """S-LOOP-75: a chain, declared backwards."""
    loops = [
        replace(POLISH, key=f"loop:{n}", body=(f"t{n}",), context=(f"loop:{n - 1}",) if n else ())
        for n in reversed(range(1000))
    ]
    results, inside = _ran(*loops)
    ended = EndedUnits(plan=loop_plan(*loops, plain=()), results=results, outputs=outputs(inside))
    assert [each.key for each in ended.list_visible()] == [f"t{n}" for n in range(1000)]


@pytest.mark.parametrize(
    ("last", "shown"),
    [
        (("loop:refine#1/write#0",), ["loop:refine#1/write#0"]),
        ((), ["loop:refine#0/write#0", "loop:refine#0/critic#0"]),
    ],
)
def test_loop_that_was_left_shows_the_last_iteration_that_gave_anything(
    last: tuple[str, ...], shown: list[str]
) -> None:
    """S-LOOP-112, S-LOOP-181: the unfinished one, unless a review ended it before its first task was done."""
    left = LoopResult(unit="loop:refine", iterations=(TWO[0], last), termination_reason="exit_early")
    ended = EndedUnits(plan=loop_plan(REFINE, plain=()), results=[left], outputs=outputs([*TWO[0], *last]))
    assert _raws(ended) == shown


def test_phases_come_in_the_order_in_which_they_completed() -> None:
    """S-PHASE-41, S-PHASE-64, S-PHASE-65: without reviews and without attempts that were not accepted."""
    first = ("phase:draft#0/plan#0", "phase:draft#0/write#0")
    second = ("phase:draft#1/plan#0", "phase:draft#1/write#0")
    reviews = ("phase:draft#0/check#0", "phase:draft#1/check#0")
    made = outputs([*first, reviews[0], *second, reviews[1], "phase:print#0/layout#0"])
    results = [
        PhaseResult(unit="phase:draft", status="completed", outputs=second, reviews=reviews, attempts=2),
        PhaseResult(unit="phase:print", status="completed", outputs=("phase:print#0/layout#0",), attempts=1),
    ]
    ended = EndedUnits(plan=phase_plan(PRINT, DRAFT), results=results, outputs=made)
    assert _raws(ended) == [*second, "phase:print#0/layout#0"]


def test_loop_in_a_phase_shows_what_its_mode_says() -> None:
    """S-PHASE-41, S-LOOP-71: in its place among the outputs of the phase."""
    phase = replace(DRAFT, members=("plan", "loop:refine"), review=None)
    iterations = tuple(tuple(f"phase:draft#0/{name}" for name in each) for each in TWO)
    results = [
        LoopResult(unit="phase:draft#0/loop:refine", iterations=iterations, termination_reason="predicate"),
        PhaseResult(
            unit="phase:draft",
            status="completed",
            outputs=("phase:draft#0/plan#0", "phase:draft#0/loop:refine"),
            attempts=1,
        ),
    ]
    plan = phase_plan(phase, loops=[replace(REFINE, output_mode="final_task_only")])
    made = outputs(["phase:draft#0/plan#0", *iterations[0], *iterations[1]])
    ended = EndedUnits(plan=plan, results=results, outputs=made)
    assert _raws(ended) == ["phase:draft#0/plan#0", "phase:draft#0/loop:refine#1/critic#0"]


def test_graph_shows_each_step_in_order() -> None:
    """S-GRAPH-70, S-GRAPH-120: a visit to a state that is a loop shows what the loop does."""
    loop = replace(REFINE, output_mode="last_iteration")
    graph = replace(TRIAGE, states=(replace(TRIAGE.states[0], member="loop:refine"), TRIAGE.states[1]))
    plan = graph_plan(graph, replace(loop, body=("write", "edit"), body_names=("write", "edit")))
    inside = ("graph:triage#0/loop:refine#0/write#0", "graph:triage#0/loop:refine#0/edit#0")
    results = [
        LoopResult(unit="graph:triage#0/loop:refine", iterations=(inside,), termination_reason="max_iterations"),
        GraphResult(
            unit="graph:triage",
            steps=(
                StepResult(state="write", instance="graph:triage#0/loop:refine", next_state="critique"),
                StepResult(state="critique", instance="graph:triage#1/critic#0", next_state="__END__"),
            ),
            termination_reason="terminal",
        ),
    ]
    ended = EndedUnits(plan=plan, results=results, outputs=outputs([*inside, "graph:triage#1/critic#0"]))
    assert _raws(ended) == [*inside, "graph:triage#1/critic#0"]
