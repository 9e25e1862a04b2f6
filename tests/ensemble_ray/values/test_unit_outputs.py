"""What a run's output says of loops, phases and a graph."""

import pickle
from datetime import timedelta

from ensemble_ray import (
    EnsembleOutput,
    ExecutionTrace,
    GraphStep,
    GraphTrace,
    GraphTraceStep,
    LoopTrace,
    PhaseStatus,
    PhaseTrace,
    TaskOutput,
)
from ensemble_ray.values.task_output import GraphHistory, LoopHistory, UnitOutputs
from ensemble_ray.values.value import utc_of


def _output(raw: str) -> TaskOutput:
    return TaskOutput(raw=raw, task_description="Write", agent_role="Writer", completed_at=utc_of(1), duration=1)


FIRST, SECOND = _output("draft 1"), _output("draft 2")
LOOP = LoopHistory(
    iterations=({"write": FIRST}, {"write": SECOND}), termination_reason="max_iterations", is_flagged=True
)
STEP = GraphStep(state_name="write", step_number=1, output=FIRST, next_state="__END__")
UNITS = UnitOutputs(
    loops={"refine": LOOP},
    phases={"draft": (FIRST,), "print": (SECOND,)},
    graph=GraphHistory(steps=(STEP,), termination_reason="terminal"),
)
WITH = EnsembleOutput(raw="draft 2", task_outputs=(SECOND,)).with_positions({"1": 0}, UNITS)
WITHOUT = EnsembleOutput(raw="draft 2", task_outputs=(SECOND,))


def test_history_of_a_loop_has_a_dict_per_iteration() -> None:
    """S-LOOP-80, S-LOOP-81, S-LOOP-82: nothing for a loop that is unknown or None."""
    assert WITH.get_loop_history("refine") == [{"write": FIRST}, {"write": SECOND}]
    assert WITH.get_loop_termination_reason("refine") == "max_iterations"
    assert WITH.was_loop_terminated_by_max_iterations("refine") is True
    for name in ("other", None):
        assert WITH.get_loop_history(name) == []
        assert WITH.get_loop_termination_reason(name) is None
        assert WITH.was_loop_terminated_by_max_iterations(name) is False


def test_output_stays_when_a_history_is_changed() -> None:
    """S-LOOP-80, S-PHASE-40, S-GRAPH-72: each call gives a list of its own."""
    WITH.get_loop_history("refine")[0].clear()
    WITH.phase_outputs["draft"].clear()
    WITH.graph_history.clear()
    assert WITH.get_loop_history("refine")[0] == {"write": FIRST}
    assert WITH.phase_outputs["draft"] == [FIRST]
    assert WITH.graph_history == [STEP]


def test_histories_take_no_part_when_outputs_are_compared() -> None:
    """S-LOOP-83: and they go along when an output is copied or pickled."""
    assert WITH == WITHOUT
    assert EnsembleOutput(raw="draft 1", task_outputs=(SECOND,)) != WITHOUT
    assert WITHOUT != "draft 2"
    changed = WITH.replace(run_id="run-1")
    arrived = pickle.loads(pickle.dumps(WITH))  # noqa: S301  our own bytes
    for copy in (changed, arrived):
        assert copy.get_loop_history("refine") == [{"write": FIRST}, {"write": SECOND}]
        assert copy.graph_history == [STEP]


def test_outputs_of_phases_are_in_the_order_in_which_they_completed() -> None:
    """S-PHASE-40: empty without phases."""
    assert WITH.phase_outputs == {"draft": [FIRST], "print": [SECOND]}
    assert list(WITH.phase_outputs) == ["draft", "print"]
    assert WITHOUT.phase_outputs == {}


def test_graph_says_its_steps_and_why_it_ended() -> None:
    """S-GRAPH-51, S-GRAPH-72, S-GRAPH-73: nothing where no graph ran."""
    assert WITH.graph_history == [STEP]
    assert (WITH.graph_termination_reason, WITH.was_graph_terminated_by_max_steps) == ("terminal", False)
    assert WITHOUT.graph_history == []
    assert (WITHOUT.graph_termination_reason, WITHOUT.was_graph_terminated_by_max_steps) == (None, False)
    capped = UnitOutputs(graph=GraphHistory(steps=(STEP,), termination_reason="max_steps", is_flagged=True))
    assert WITHOUT.replace().with_positions({}, capped).was_graph_terminated_by_max_steps is True


def test_trace_of_units_survives_json() -> None:
    """S-LOOP-130, S-LOOP-131, S-PHASE-44, S-GRAPH-74, S-TRC-52: and a trace without units says nothing of them."""
    plain = ExecutionTrace.EMPTY
    assert not {"loop_traces", "phases", "graph_trace"} & plain.model_dump().keys()
    assert (plain.loop_traces, plain.phases, plain.graph_trace) == ((), (), None)
    loop = LoopTrace(
        loop_name="refine",
        path="loop:refine",
        iterations_run=2,
        max_iterations=2,
        termination_reason="max_iterations",
        on_max_iterations="return_last",
        output_mode="last_iteration",
        memory_mode="accumulate",
        iterations=[["a"], ["a"]],
    )
    phase = PhaseTrace(
        name="draft",
        path="phase:draft",
        status=PhaseStatus.COMPLETED,
        started_at=utc_of(1),
        completed_at=utc_of(3),
        duration=timedelta(seconds=2),
        attempts=2,
    )
    graph = GraphTrace(
        graph_name="triage",
        path="graph:triage",
        start_state="write",
        termination_reason="terminal",
        steps_run=1,
        max_steps=50,
        steps=[GraphTraceStep(path="graph:triage#0", state_name="write", step_number=1, next_state="__END__")],
    )
    trace = plain.replace(loop_traces=[loop], phases=[phase], graph_trace=graph)
    data = trace.model_dump(mode="json")
    assert data["loop_traces"][0]["iterations"] == [["a"], ["a"]]
    assert (data["phases"][0]["status"], data["graph_trace"]["steps"][0]["next_state"]) == ("completed", "__END__")
    assert ExecutionTrace.model_validate_json(trace.to_json()) == trace
