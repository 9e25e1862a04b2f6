"""Units in the tree that `ensemble-ray trace` shows."""

from dataclasses import replace

import pytest

from ensemble_ray.record.trace import fold_trace
from ensemble_ray.record.units import PredicateAnswer
from ensemble_ray.record.view.tree import is_named, render_tree, tree_rows
from tests.ensemble_ray.record.units.plans import REFINE, graph_plan, loop_plan
from tests.ensemble_ray.record.units.test_run_results import LINE, LOOP_STATE, TWO_PHASES
from tests.ensemble_ray.record.units.walked import walked


def _lines(text: str) -> list[str]:
    """Return the lines of units and tasks, without times and answers."""
    return [line.split("  [")[0] for line in text.splitlines()[1:] if "answer:" not in line]


def test_iterations_stand_below_their_loop() -> None:
    """S-LOOP-130, S-LOOP-184: by the path that `--task` and `fork` take, with how often it ran and why it ended."""
    text = render_tree(fold_trace(walked(loop_plan(replace(REFINE, max_iterations=2))).facts))
    assert _lines(text) == [
        "├─ r: facts#0",
        "└─ loop:refine",
        "   ├─ loop:refine#0",
        "   │  ├─ r: loop:refine#0/write#0",
        "   │  └─ r: loop:refine#0/critic#0",
        "   └─ loop:refine#1",
        "      ├─ r: loop:refine#1/write#0",
        "      └─ r: loop:refine#1/critic#0",
    ]
    assert "[7 + 3 tokens]  [loop:refine#1/critic#0]" in text
    assert "loop:refine  [4.00 s]  [2 of at most 2 iterations]  [max_iterations]" in text


def test_steps_of_a_graph_say_where_they_led() -> None:
    """S-GRAPH-74, S-GRAPH-121: also a state that is a loop, with its iterations."""
    text = render_tree(fold_trace(walked(LOOP_STATE).facts))
    assert _lines(text) == [
        "└─ graph:triage",
        "   ├─ graph:triage#0",
        "   │  └─ graph:triage#0/loop:polish",
        "   │     ├─ graph:triage#0/loop:polish#0",
        "   │     │  └─ r: graph:triage#0/loop:polish#0/shine#0",
        "   │     └─ graph:triage#0/loop:polish#1",
        "   │        └─ r: graph:triage#0/loop:polish#1/shine#0",
        "   └─ graph:triage#1",
        "      └─ r: graph:triage#1/critic#0",
    ]
    assert "graph:triage  [3.00 s]  [2 of at most 4 steps]  [terminal]" in text
    assert "graph:triage#0  [2.00 s]  [write → critique]" in text
    assert "loop:polish  [2.00 s]  [2 of at most 2 iterations]  [max_iterations]" in text


def test_attempts_stand_below_their_phase() -> None:
    """S-PHASE-44, S-PHASE-121: a phase that was skipped has a line too."""
    run = walked(TWO_PHASES, lambda instance: "fail" if "write" in instance else "")
    text = render_tree(fold_trace(run.facts))
    assert "phase:draft  [2.00 s]  [failed, 1 attempt]".replace(", ", "]  [") in text
    assert "phase:draft#0" in text
    assert "├─ phase:print  [skipped]" in text


def test_verdicts_stand_below_what_they_judged() -> None:
    """S-LOOP-183: with their times from the start of the run; a raised error is marked."""
    trace = fold_trace(walked(loop_plan(replace(REFINE, max_iterations=2), plain=())).facts)
    verdicts = [
        PredicateAnswer(path="loop:refine#0", edge=None, answer=False, at=2.5),
        PredicateAnswer(path="loop:refine#1", edge=None, answer=None, at=4.5, error="RuntimeError: boom"),
    ]
    rows = [row for row in tree_rows(trace, verdicts) if row.kind == "verdict"]
    assert [(row.title, row.details, row.is_bad) for row in rows] == [
        ("until: false", ("after 2.50 s",), False),
        ("until: raised RuntimeError: boom", ("after 4.50 s",), True),
    ]
    graph = fold_trace(walked(graph_plan(LINE)).facts)
    (row,) = [
        row
        for row in tree_rows(graph, [PredicateAnswer(path="graph:triage#0", edge=1, answer=True, at=1.0)])
        if row.kind == "verdict"
    ]
    assert row.title == "edge 1: true"


@pytest.mark.parametrize(
    ("name", "is_meant"),
    [
        ("write", True),
        ("loop:refine", True),
        ("loop:refine#2", True),
        ("loop:refine#2/write#0", True),
        ("loop:refine#1", False),
        ("loop:ref", False),
        ("critic", False),
    ],
)
def test_task_is_named_by_key_or_path(name: str, *, is_meant: bool) -> None:
    """S-LOOP-184: every execution of a task, or those of a loop, of an iteration, or one."""
    assert is_named(name, "loop:refine#2/write#0") is is_meant
