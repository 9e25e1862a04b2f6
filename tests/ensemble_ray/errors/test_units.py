"""Errors of loops, graphs and phases."""

import pickle

import pytest

from ensemble_ray import (
    EnsembleError,
    GraphNoEdgeMatchedError,
    MaxGraphStepsExceededError,
    MaxIterationsExceededError,
    MaxLoopIterationsExceededError,
    PhaseStatus,
    TaskExecutionError,
)
from ensemble_ray.values.error_data import error_data, error_from
from tests.ensemble_ray.errors.every_error import DONE


def test_loop_that_does_not_converge_says_after_how_many_iterations() -> None:
    """S-LOOP-61, S-LOOP-64: and is no error of an agent's tool loop."""
    error = MaxLoopIterationsExceededError("refine", 3, [DONE])
    assert str(error) == "Loop 'refine' did not converge after 3 iterations"
    assert (error.loop_name, error.max_iterations, error.completed_task_outputs) == ("refine", 3, (DONE,))
    assert not isinstance(error, MaxIterationsExceededError)
    assert not issubclass(MaxIterationsExceededError, MaxLoopIterationsExceededError)
    assert isinstance(error, EnsembleError)


@pytest.mark.parametrize(("raw", "shown"), [("no", "no"), ("x" * 200, "x" * 200), ("x" * 201, "x" * 200 + "…")])
def test_graph_without_a_matching_edge_lists_the_edges_and_cuts_the_output(raw: str, shown: str) -> None:
    """S-GRAPH-45: the attribute is whole."""
    edges = ["→ write (again)", "→ __END__ (predicate)"]
    error = GraphNoEdgeMatchedError("triage", "critique", raw, edges)
    assert str(error) == (
        "Graph 'triage' state 'critique' has no matching outgoing edge for the produced output. "
        f"Candidate edges: → write (again); → __END__ (predicate) Output preview: {shown}"
    )
    assert (error.graph_name, error.current_state, error.output_preview) == ("triage", "critique", raw)


def test_graph_that_does_not_end_says_where_it_stood() -> None:
    """S-GRAPH-50."""
    error = MaxGraphStepsExceededError("triage", 4, "write")
    assert str(error) == "Graph 'triage' did not reach a terminal state after 4 step(s). Last state: 'write'."
    assert (error.graph_name, error.max_steps, error.last_state) == ("triage", 4, "write")


def test_statuses_of_phases_arrive_when_the_error_travels_and_when_it_is_recorded() -> None:
    """S-PHASE-54: on the error of a run with phases; empty on every other."""
    error = TaskExecutionError("Task 'a' failed: no")
    assert dict(error.phase_statuses) == {}
    assert "phase_statuses" not in vars(error)
    error.phase_statuses = {"draft": PhaseStatus.FAILED, "print": PhaseStatus.SKIPPED}
    for back in (pickle.loads(pickle.dumps(error)), error_from(error_data(error))):  # noqa: S301  our own bytes
        assert isinstance(back, TaskExecutionError)
        assert back.phase_statuses == {"draft": PhaseStatus.FAILED, "print": PhaseStatus.SKIPPED}
        assert isinstance(back.phase_statuses["draft"], PhaseStatus)
