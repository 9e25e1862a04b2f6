"""How far loops, phases and a graph are, as a run shows it while it goes on."""

from datetime import timedelta

from ensemble_ray import (
    EnsembleStartedEvent,
    Graph,
    GraphEdge,
    GraphStateCompletedEvent,
    Loop,
    LoopIterationCompletedEvent,
    Task,
    TaskCompleteEvent,
    TaskStartEvent,
)
from ensemble_ray.cli.view.progress import TaskProgress, UnitProgress
from ensemble_ray.definition import EnsembleDefinition
from tests.ensemble_ray.record.units.plans import output

TASK = {"task_description": "Write", "agent_role": "Writer", "task_index": 1, "total_tasks": 1}


def _started(instance: str) -> TaskStartEvent:
    return TaskStartEvent(instance=instance, **TASK)  # type: ignore[arg-type]  # fields of a task


def _completed(instance: str) -> TaskCompleteEvent:
    return TaskCompleteEvent(instance=instance, task_output=output("x"), duration=timedelta(seconds=1), **TASK)  # type: ignore[arg-type]  # fields of a task


def _iteration(number: int) -> LoopIterationCompletedEvent:
    return LoopIterationCompletedEvent(
        loop_name="refine",
        iteration_number=number,
        max_iterations=5,
        iteration_outputs={},
        iteration_duration=timedelta(seconds=2),
    )


def _step(number: int, state: str, following: str) -> GraphStateCompletedEvent:
    return GraphStateCompletedEvent(
        graph_name="triage",
        state_name=state,
        step_number=number,
        max_steps=50,
        output=output("x"),
        next_state=following,
        step_duration=timedelta(seconds=3),
    )


def test_block_says_which_iteration_runs() -> None:
    """S-LOOP-185: and of how many at most, as soon as that is known."""
    progress = TaskProgress("team")
    progress.receive(_started("loop:refine#0/write#0"), 1.0)
    assert "  loop refine: iteration 1" in progress.block(1.0).lines
    progress.receive(_completed("loop:refine#0/write#0"), 2.0)
    progress.receive(_iteration(1), 2.0)
    progress.receive(_started("loop:refine#1/write#0"), 2.0)
    block = progress.block(2.0)
    assert "  loop refine: iteration 2 of at most 5" in block.lines
    assert block.bar is None
    assert block.counts == "1 tasks, 1 running"


def test_caps_are_known_from_the_start_when_the_team_is() -> None:
    """S-LOOP-185, S-GRAPH-122: of a loop, and of a graph with its first state."""
    write = Task.of("Write")
    looped = EnsembleDefinition(loops=[Loop(name="refine", body=[write], max_iterations=5)])
    assert UnitProgress.of(looped).lines(["loop:refine#2/write#0"]) == ["  loop refine: iteration 3 of at most 5"]
    edges = [GraphEdge(from_state="write", to_state=Graph.END)]
    walked = EnsembleDefinition(
        graph=Graph(name="triage", states={"write": write}, edges=edges, start="write", max_steps=9)
    )
    lines = UnitProgress.of(walked).lines(["graph:triage#0/write#0"])
    assert lines == ["  graph triage: state write, step 1 of at most 9"]


def test_block_says_which_state_and_which_attempt_run() -> None:
    """S-GRAPH-122, S-PHASE-122: also a loop inside of them; a phase that is repeated is another attempt."""
    progress = TaskProgress("team")
    progress.receive(_step(3, "write", "critique"), 1.0)
    progress.receive(_started("graph:triage#3/critique#0"), 1.0)
    assert "  graph triage: state critique, step 4 of at most 50" in progress.block(1.0).lines
    progress.receive(_started("phase:draft#1/loop:refine#2/write#0"), 1.0)
    lines = progress.block(1.0).lines
    assert "  phase draft: attempt 2" in lines
    assert "  loop refine: iteration 3" in lines


def test_ends_of_iterations_and_steps_get_lines() -> None:
    """S-LOOP-185, S-GRAPH-122: where no block is redrawn; tasks are told by the path of their execution."""
    progress = TaskProgress("team")
    progress.receive(EnsembleStartedEvent(ensemble_id="r", workflow="sequential", total_tasks=2), 0.0)
    assert progress.receive(_iteration(3), 1.0) == "loop     refine: iteration 3 of at most 5 in 2.0 s"
    shown = progress.receive(_step(4, "critique", "write"), 1.0)
    assert shown == "graph    triage: critique -> write, step 4 of at most 50 in 3.0 s"
    assert progress.receive(_iteration(3), 1.0, is_live=True) is None
    assert progress.receive(_started("loop:refine#0/write#0"), 1.0) == "started  loop:refine#0/write (Writer)"
