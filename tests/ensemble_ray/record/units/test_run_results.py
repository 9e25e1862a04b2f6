"""What the caller of a run with units gets, and what its record gives: the same."""

from dataclasses import replace

import pytest

from ensemble_ray import (
    EnsembleOutput,
    ExitReason,
    MaxGraphStepsExceededError,
    MaxLoopIterationsExceededError,
    Plan,
    RunState,
    TaskExecutionError,
)
from ensemble_ray.plan.plan import EdgeEntry
from ensemble_ray.record.history import RunHistory
from ensemble_ray.record.resume.reading import recorded_output
from ensemble_ray.record.trace import fold_output, fold_trace
from ensemble_ray.record.units import PredicateAnswer, verdicts_of
from ensemble_ray.schedule.instructions import CountTokens, EdgeMatches, UntilHolds
from ensemble_ray.schedule.stimuli import Evaluated
from tests.ensemble_ray.record.units.plans import (
    DRAFT,
    POLISH,
    PRINT,
    REFINE,
    TRIAGE,
    graph_plan,
    loop_plan,
    phase_plan,
)
from tests.ensemble_ray.record.units.walked import Does, Walked, raws, walked

CAPPED = replace(REFINE, max_iterations=3, on_max_iterations="return_with_flag")
ENDLESS = replace(TRIAGE, edges=(EdgeEntry(from_state="write", to_state="write"),), states=TRIAGE.states[:1])
LINE = replace(
    TRIAGE,
    edges=(EdgeEntry(from_state="write", to_state="critique"), EdgeEntry(from_state="critique", to_state="__END__")),
)
TWO_PHASES = phase_plan(replace(DRAFT, review=None), PRINT)
PHASED_LOOP = phase_plan(replace(DRAFT, members=("plan", "loop:refine"), review=None), PRINT, loops=[REFINE])
LOOP_STATE = graph_plan(replace(LINE, states=(replace(LINE.states[0], member="loop:polish"), LINE.states[1])), POLISH)
PLANS = {
    "loop": loop_plan(CAPPED, POLISH),
    "parallel": loop_plan(CAPPED, POLISH, workflow="parallel"),
    "joined": loop_plan(replace(CAPPED, output_mode="all_iterations")),
    "phases": TWO_PHASES,
    "loop in a phase": PHASED_LOOP,
    "graph": graph_plan(LINE),
    "endless graph": graph_plan(ENDLESS),
    "loop in a graph": LOOP_STATE,
    "nothing": loop_plan(),
}


def _recorded(run: Walked) -> EnsembleOutput:
    ids = {node.key: node.object_id for node in run.plan.nodes}
    return fold_output(run.facts, object_ids=ids)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_record_gives_the_output_that_the_caller_got(plan: Plan) -> None:
    """S-SET-39, S-LOOP-80, S-PHASE-40, S-GRAPH-72: outputs, histories, reasons, traces and metrics."""
    run = walked(plan)
    live, read = run.output(), _recorded(run)
    assert raws(read) == raws(live)
    assert read.raw == live.raw
    assert read.total_tool_calls == live.total_tool_calls
    assert (read.trace.loop_traces, read.trace.phases) == (live.trace.loop_traces, live.trace.phases)
    assert read.trace.graph_trace == live.trace.graph_trace
    assert read.trace.task_traces == live.trace.task_traces
    assert read.metrics == live.metrics
    for name in ("refine", "polish"):
        assert read.get_loop_history(name) == live.get_loop_history(name)
        assert read.get_loop_termination_reason(name) == live.get_loop_termination_reason(name)
    assert (read.phase_outputs, read.graph_history) == (live.phase_outputs, live.graph_history)
    for node in plan.nodes:
        task = _Task(node.object_id)
        assert read.get_output(task) == live.get_output(task)


class _Task:
    """A task, as its output is looked up."""

    output_type = None

    def __init__(self, object_id: str) -> None:
        self.object_id = object_id


def test_loop_counts_every_execution_and_shows_the_last() -> None:
    """S-LOOP-77, S-LOOP-84, S-MET-28, S-LOOP-130: two tasks in three iterations are six traces."""
    found = walked(loop_plan(CAPPED, plain=())).output()
    assert raws(found) == ["loop:refine#2/write#0", "loop:refine#2/critic#0"]
    assert len(found.trace.task_traces) == 6
    assert (found.metrics.total_tokens, found.total_tool_calls) == (60, 2)
    assert found.metrics.metrics_by_task["write"].total_tokens == 30
    assert found.get_output(_Task("id-write")) == found.task_outputs[0]
    assert (found.raw, len(found.get_loop_history("refine"))) == ("loop:refine#2/critic#0", 3)
    assert found.was_loop_terminated_by_max_iterations("refine") is True
    assert found.trace.loop_traces[0].iterations == (("write", "Do critic"),) * 3


def test_body_task_that_is_not_shown_has_no_output() -> None:
    """S-LOOP-71."""
    found = walked(loop_plan(replace(CAPPED, output_mode="final_task_only"))).output()
    assert found.get_output(_Task("id-write")) is None
    assert found.get_output(_Task("id-critic")) == found.task_outputs[-1]


def test_graph_counts_every_step_and_gives_the_last_visit() -> None:
    """S-GRAPH-70, S-GRAPH-71, S-GRAPH-76, S-GRAPH-81."""
    found = walked(graph_plan(ENDLESS)).output()
    assert raws(found) == [f"graph:triage#{number}/write#0" for number in range(4)]
    assert found.get_output(_Task("id-write")) == found.task_outputs[3]
    assert (found.graph_termination_reason, found.metrics.total_tokens) == ("max_steps", 40)
    assert found.was_graph_terminated_by_max_steps is False


def test_phases_group_their_outputs() -> None:
    """S-PHASE-40, S-PHASE-41, S-PHASE-42, S-PHASE-43."""
    found = walked(TWO_PHASES).output()
    assert {name: [each.raw for each in of_phase] for name, of_phase in found.phase_outputs.items()} == {
        "draft": ["phase:draft#0/plan#0", "phase:draft#0/write#0"],
        "print": ["phase:print#0/layout#0"],
    }
    assert found.raw == "phase:print#0/layout#0"
    assert found.get_output(_Task("id-plan")) == found.task_outputs[0]
    assert [each.name for each in found.trace.phases] == ["draft", "print"]


def _does(what: str, *instances: str) -> Does:
    return lambda instance: what if instance in instances else ""


def test_review_that_ends_the_run_leaves_what_there_is() -> None:
    """S-LOOP-112, S-PHASE-56, S-GRAPH-53: with the reason; read from the record too."""
    run = walked(loop_plan(CAPPED, POLISH), _does("exit", "loop:refine#1/critic#0"))
    found = run.output()
    assert (found.exit_reason, found.get_loop_termination_reason("refine")) == (
        *(ExitReason.USER_EXIT_EARLY, "exit_early"),
    )
    assert [list(each) for each in found.get_loop_history("refine")] == [["write", "Do critic"], ["write"]]
    assert raws(found) == ["facts#0", "loop:refine#1/write#0"]
    assert (found.get_loop_history("polish"), _recorded(run).task_outputs) == ([], found.task_outputs)

    found = walked(TWO_PHASES, _does("exit", "phase:draft#0/write#0")).output()
    assert (found.exit_reason, raws(found)) == (ExitReason.USER_EXIT_EARLY, ["phase:draft#0/plan#0"])
    assert "print" not in found.phase_outputs

    found = walked(graph_plan(LINE), _does("exit", "graph:triage#1/critic#0")).output()
    assert (found.exit_reason, found.graph_termination_reason) == (ExitReason.USER_EXIT_EARLY, None)
    assert raws(found) == ["graph:triage#0/write#0"]


@pytest.mark.parametrize(
    ("plan", "kind", "text"),
    [
        (
            loop_plan(replace(REFINE, on_max_iterations="throw")),
            MaxLoopIterationsExceededError,
            "Loop 'refine' did not converge after 3 iterations",
        ),
        (
            graph_plan(replace(ENDLESS, on_max_steps="throw")),
            MaxGraphStepsExceededError,
            "Graph 'triage' did not reach a terminal state after 4 step(s). Last state: 'write'.",
        ),
    ],
    ids=["loop", "graph"],
)
def test_cap_that_raises_stands_in_the_trace(plan: Plan, kind: type[Exception], text: str) -> None:
    """S-LOOP-43, S-LOOP-61, S-GRAPH-50, S-SET-26: on the error, and in the record."""
    run = walked(plan)
    with pytest.raises(kind) as caught:
        run.output()
    assert str(caught.value) == text
    trace = caught.value.trace  # type: ignore[attr-defined]  # an error of ours
    (told,) = trace.errors
    assert (told.error_type, told.message) == (kind.__name__, text)
    (read,) = fold_trace(run.facts).errors
    assert (read.error_type, read.message, read.task_description) == (kind.__name__, text, told.task_description)


def test_failed_phase_says_where_each_stands() -> None:
    """S-PHASE-53, S-PHASE-54, S-PHASE-57."""
    run = walked(TWO_PHASES, _does("fail", "phase:draft#0/write#0"))
    with pytest.raises(TaskExecutionError) as caught:
        run.output()
    assert caught.value.phase_statuses == {"draft": "failed", "print": "skipped"}
    assert [each.raw for each in caught.value.completed_task_outputs] == ["phase:draft#0/plan#0"]
    trace = fold_trace(run.facts)
    assert [(each.name, each.status) for each in trace.phases] == [("draft", "failed"), ("print", "skipped")]


def test_torn_run_tells_what_had_begun() -> None:
    """S-DUR-30, S-LOOP-190, S-GRAPH-123, S-PHASE-124: iterations, the unfinished one too, and steps; without a reason."""
    trace = fold_trace(walked(loop_plan(CAPPED, plain=()), torn_after=5).facts)
    (loop,) = trace.loop_traces
    assert (loop.iterations_run, loop.termination_reason) == (3, None)
    assert [len(each) for each in loop.iterations] == [2, 2, 1]
    graph = fold_trace(walked(graph_plan(LINE), torn_after=1).facts).graph_trace
    assert graph is not None
    assert [(step.state_name, step.next_state) for step in graph.steps] == [("write", "critique")]
    (draft,) = fold_trace(walked(phase_plan(DRAFT, PRINT), torn_after=1).facts).phases
    assert (draft.name, draft.status, len(draft.task_traces)) == ("draft", "running", 1)


def test_step_of_a_torn_run_has_its_own_number_though_its_state_is_a_loop() -> None:
    """S-GRAPH-74, S-GRAPH-115: not that of an iteration."""
    graph = fold_trace(walked(LOOP_STATE, torn_after=2).facts).graph_trace
    assert graph is not None
    assert [(step.path, step.step_number, step.state_name) for step in graph.steps] == [("graph:triage#0", 1, "write")]


def test_finished_run_of_that_id_is_answered_from_its_record() -> None:
    """S-SET-39, S-LOOP-80: with its histories."""
    run = walked(loop_plan(CAPPED))
    found = recorded_output("run-1", RunState.COMPLETED, run.facts, None)
    assert found is not None
    assert len(found.get_loop_history("refine")) == 3


def test_verdicts_say_when_and_of_what() -> None:
    """S-LOOP-183: what a predicate or a condition answered, and what it raised."""
    groups = [
        [Evaluated(at=1.0, question=UntilHolds(unit="loop:refine", iteration=1), answer=False)],
        [Evaluated(at=2.0, question=EdgeMatches(unit="graph:triage", step=2, edge=1), answer=True)],
        [Evaluated(at=3.0, question=CountTokens(instance="a#0"), answer=7)],
        [
            Evaluated(
                at=4.0,
                question=UntilHolds(unit="loop:refine", iteration=2),
                answer=None,
                error_type="RuntimeError",
                message="boom",
            )
        ],
    ]
    assert list(verdicts_of(groups)) == [
        PredicateAnswer(path="loop:refine#0", edge=None, answer=False, at=1.0),
        PredicateAnswer(path="graph:triage#1", edge=1, answer=True, at=2.0),
        PredicateAnswer(path="loop:refine#1", edge=None, answer=None, at=4.0, error="RuntimeError: boom"),
    ]
    assert not [*verdicts_of(RunHistory(walked(loop_plan(CAPPED)).facts, has_details=True).stimuli.groups)]
