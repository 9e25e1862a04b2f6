"""Histories and traces of loops, phases and graphs."""

from dataclasses import replace
from datetime import timedelta

import pytest
from msgspec import structs

from ensemble_ray.record.units import EndedUnits, graph_trace, loop_traces, phase_traces, unit_outputs
from ensemble_ray.schedule.instructions import GraphResult, LoopResult, PhaseResult, StepResult
from tests.ensemble_ray.record.units.plans import (
    DRAFT,
    POLISH,
    PRINT,
    REFINE,
    TRIAGE,
    graph_plan,
    loop_plan,
    outputs,
    phase_plan,
)
from tests.ensemble_ray.record.units.test_projection import ALL, RAN, TWO


@pytest.mark.parametrize("mode", ["last_iteration", "final_task_only", "all_iterations"])
def test_history_has_every_iteration_by_body_key(mode: str) -> None:
    """S-LOOP-4, S-LOOP-78, S-LOOP-80: the key of an unnamed task is its description; in every output mode."""
    ended = EndedUnits(plan=loop_plan(replace(REFINE, output_mode=mode)), results=[RAN], outputs=ALL)
    found = unit_outputs(ended).loops["refine"]
    assert [{key: each.raw for key, each in iteration.items()} for iteration in found.iterations] == [
        {"write": TWO[0][0], "Do critic": TWO[0][1]},
        {"write": TWO[1][0], "Do critic": TWO[1][1]},
    ]
    assert (found.termination_reason, found.is_flagged) == ("predicate", False)


@pytest.mark.parametrize(
    ("action", "reason", "is_flagged"),
    [
        ("return_with_flag", "max_iterations", True),
        ("return_last", "max_iterations", False),
        ("return_with_flag", "predicate", False),
        ("return_with_flag", "budget_exhausted", False),
    ],
)
def test_loop_is_flagged_only_by_its_cap_and_when_it_asks_for_that(
    action: str, reason: str, *, is_flagged: bool
) -> None:
    """S-LOOP-60, S-LOOP-63."""
    ended = EndedUnits(
        plan=loop_plan(replace(REFINE, on_max_iterations=action)),
        results=[structs.replace(RAN, termination_reason=reason)],
        outputs=ALL,
    )
    assert unit_outputs(ended).loops["refine"].is_flagged is is_flagged


def test_unfinished_iteration_has_the_tasks_that_completed() -> None:
    """S-LOOP-112."""
    left = structs.replace(RAN, iterations=(TWO[0], (TWO[1][0],)), termination_reason="exit_early")
    found = unit_outputs(EndedUnits(plan=loop_plan(REFINE), results=[left], outputs=ALL)).loops["refine"]
    assert [list(each) for each in found.iterations] == [["write", "Do critic"], ["write"]]
    assert found.termination_reason == "exit_early"


def test_trace_of_a_loop_says_what_it_was_and_what_ran() -> None:
    """S-LOOP-130, S-LOOP-131, S-LOOP-180: a loop that ran twice has two, and its history is that of the last."""
    loop = replace(POLISH, name="polish")
    once = [("graph:triage#0/loop:polish#0/shine#0",), ("graph:triage#0/loop:polish#1/shine#0",)]
    again = [("graph:triage#2/loop:polish#0/shine#0",)]
    results = [
        LoopResult(unit="graph:triage#0/loop:polish", iterations=tuple(once), termination_reason="max_iterations"),
        LoopResult(unit="graph:triage#2/loop:polish", iterations=tuple(again), termination_reason="predicate"),
    ]
    graph = replace(TRIAGE, states=(replace(TRIAGE.states[0], member="loop:polish"), TRIAGE.states[1]))
    made = outputs([name for each in (*once, *again) for name in each])
    ended = EndedUnits(plan=graph_plan(graph, loop), results=results, outputs=made)
    first, second = loop_traces(ended)
    assert first.model_dump() == {
        "loop_name": "polish",
        "path": "graph:triage#0/loop:polish",
        "iterations_run": 2,
        "max_iterations": 2,
        "termination_reason": "max_iterations",
        "on_max_iterations": "return_last",
        "output_mode": "last_iteration",
        "memory_mode": "accumulate",
        "iterations": (("shine",), ("shine",)),
    }
    assert (second.path, second.iterations_run, second.iterations) == ("graph:triage#2/loop:polish", 1, (("shine",),))
    assert len(unit_outputs(ended).loops["polish"].iterations) == 1


def test_phases_have_outputs_by_name_and_traces_of_all_attempts() -> None:
    """S-PHASE-40, S-PHASE-44, S-PHASE-57, S-PHASE-64: a skipped one has a trace and no outputs."""
    names = ["phase:draft#0/plan#0", "phase:draft#0/write#0", "phase:draft#0/check#0"]
    names += ["phase:draft#1/plan#0", "phase:draft#1/write#0", "phase:draft#1/check#0"]
    results = [
        PhaseResult(
            unit="phase:draft",
            status="completed",
            outputs=(names[3], names[4]),
            reviews=(names[2], names[5]),
            attempts=2,
            started_at=0.0,
            completed_at=9.0,
        ),
        PhaseResult(unit="phase:print", status="skipped", started_at=9.0, completed_at=9.0),
    ]
    ended = EndedUnits(plan=phase_plan(DRAFT, PRINT), results=results, outputs=outputs(names))
    found = unit_outputs(ended).phases
    assert {name: [each.raw for each in of_phase] for name, of_phase in found.items()} == {"draft": names[3:5]}
    traces = [(name, each.trace) for name, each in ended.outputs.items() if each.trace is not None]
    draft, review, skipped = phase_traces(ended, traces)
    assert (draft.name, draft.status, draft.attempts, draft.duration) == (
        *("draft", "completed", 2),
        timedelta(seconds=9),
    )
    assert [each.final_output for each in draft.task_traces] == [names[0], names[1], names[3], names[4]]
    assert (review.name, review.attempts) == ("__review__draft", 2)
    assert [each.final_output for each in review.task_traces] == [names[2], names[5]]
    assert (skipped.name, skipped.status, skipped.task_traces, skipped.attempts) == ("print", "skipped", (), 0)


def test_graph_has_its_steps_and_why_it_ended() -> None:
    """S-GRAPH-51, S-GRAPH-72, S-GRAPH-73, S-GRAPH-74, S-GRAPH-81: at the cap, the state that was not run any more."""
    steps = tuple(
        StepResult(state="write", instance=f"graph:triage#{number}/write#0", next_state="write") for number in range(4)
    )
    result = GraphResult(unit="graph:triage", steps=steps, termination_reason="max_steps")
    graph = replace(TRIAGE, on_max_steps="return_with_flag")
    ended = EndedUnits(plan=graph_plan(graph), results=[result], outputs=outputs(step.instance for step in steps))
    history = unit_outputs(ended).graph
    assert history is not None
    assert [(each.state_name, each.step_number, each.output.raw, each.next_state) for each in history.steps] == [
        ("write", number, f"graph:triage#{number - 1}/write#0", "write") for number in range(1, 5)
    ]
    assert (history.termination_reason, history.is_flagged) == ("max_steps", True)
    trace = graph_trace(ended)
    assert trace is not None
    assert (trace.path, trace.graph_name, trace.start_state, trace.termination_reason) == (
        *("graph:triage", "triage"),
        *("write", "max_steps"),
    )
    assert (trace.steps_run, trace.max_steps) == (4, 4)
    assert trace.steps[3].model_dump() == {
        "path": "graph:triage#3",
        "state_name": "write",
        "step_number": 4,
        "next_state": "write",
    }


def test_run_without_units_has_no_histories() -> None:
    """S-LOOP-80, S-PHASE-40, S-GRAPH-72, S-GRAPH-74."""
    ended = EndedUnits(plan=loop_plan(), outputs=outputs(["facts#0"]))
    found = unit_outputs(ended)
    assert (dict(found.loops), dict(found.phases), found.graph) == ({}, {}, None)
    assert (loop_traces(ended), phase_traces(ended, ()), graph_trace(ended)) == ((), (), None)
