"""A graph of one branch: steps, edges, the cap, revisits, failures and ends."""

from __future__ import annotations

import pytest

from ensemble_ray import ExitReason, RunState
from ensemble_ray.plan.plan import GraphUnit
from ensemble_ray.schedule.graph import GraphMachine
from ensemble_ray.schedule.instructions import (
    Announce,
    ContextPart,
    EdgeMatches,
    FollowUpQuestions,
    GraphResult,
    Start,
    StepEnded,
    StepResult,
    TaskChanges,
    UnitFailure,
)
from ensemble_ray.schedule.stimuli import Begun, CancelRequested
from ensemble_ray.schedule.unit import HistoryEntry, StopRequested
from tests.ensemble_ray.schedule.executions import execution_of
from tests.ensemble_ray.schedule.graphs import (
    BEGUN,
    PATH,
    CheckedGraph,
    answer,
    ask,
    done,
    edge,
    ended,
    exited,
    failed,
    fork,
    graph_of,
    join,
    place,
    start,
    stop,
)
from tests.ensemble_ray.schedule.nesting import Nest, loop, nested

CHAIN = graph_of(edge("a", "b"), edge("b", "c"), edge("c"))
CHOICE = graph_of(edge("a", "b", asked=True), edge("a", "c", asked=True), edge("a"), edge("b"), edge("c"))
REVIEWED = graph_of(
    edge("research", "write"),
    edge("write", "critique"),
    edge("critique", "write", asked=True),
    edge("critique", "publish"),
    edge("publish"),
    start="research",
)


def feedback(state: str, visit: int) -> str:
    """The text of a revisit, as specified."""
    return (
        f"Graph state '{state}' visit #{visit}. "
        "Prior visit's output is provided above; refine your response based on it."
    )


def asked_after(graph: GraphUnit) -> FollowUpQuestions | None:
    """What the first step of a graph says will be asked."""
    (first,) = CheckedGraph(graph).machine.handle(BEGUN)
    assert isinstance(first, Start)
    return first.asks_after


def test_step_says_which_conditions_will_be_asked() -> None:
    """S-LOOP-189, S-GRAPH-42: in declared order, up to the first edge without one."""
    questions = (EdgeMatches(unit=PATH, step=1, edge=0), EdgeMatches(unit=PATH, step=1, edge=1))
    assert asked_after(CHOICE) == FollowUpQuestions(questions=questions, names=("a",), instances=(place(1, "a"),))


def test_step_says_that_nothing_will_be_asked_when_its_first_edge_has_no_condition() -> None:
    """S-LOOP-189, S-GRAPH-42: the edge behind it is never tried."""
    assert asked_after(graph_of(edge("a"), edge("a", "a", asked=True))) is None


def test_step_of_a_graph_with_forks_says_nothing() -> None:
    """S-LOOP-189, S-GRAPH-92: what its conditions are shown depends on what completes before."""
    forked = graph_of(edge("a", "a", asked=True), fork("a", "b", "c"), edge("b", asked=True), edge("b", "b"), edge("c"))
    assert asked_after(forked) is None


def test_states_run_one_after_the_other_when_edges_have_no_conditions() -> None:
    """S-GRAPH-40, S-GRAPH-41, S-GRAPH-75, S-GRAPH-80: three steps, each announced after routing and before the next."""
    graph = CheckedGraph(CHAIN)
    assert graph(BEGUN) == [start(1, "a")]
    assert graph(done(1, "a")) == [ended(1, "a", "b"), start(2, "b")]
    assert graph(done(2, "b", at=3.0)) == [ended(2, "b", "c", duration_s=2.0), start(3, "c")]
    assert graph(done(3, "c", at=3.5))[:-1] == [ended(3, "c", "__END__", duration_s=0.5)]
    assert graph.end is not None
    assert (graph.end.state, graph.end.exit_reason) == (RunState.COMPLETED, ExitReason.COMPLETED)
    assert graph.result == GraphResult(
        unit=PATH,
        steps=(
            StepResult(state="a", instance=place(1, "a"), next_state="b"),
            StepResult(state="b", instance=place(2, "b"), next_state="c"),
            StepResult(state="c", instance=place(3, "c"), next_state="__END__"),
        ),
        termination_reason="terminal",
    )
    assert [step.number for step in graph.result.steps] == [1, 2, 3]


def test_edges_are_asked_in_order_until_one_matches() -> None:
    """S-GRAPH-42: one question at a time; a later edge is not asked, an unconditional one needs no question."""
    graph = CheckedGraph(CHOICE)
    graph(BEGUN)
    assert graph(done(1, "a")) == [ask(1, 0)]
    assert graph(answer(1, 0, verdict=False)) == [ask(1, 1)]
    assert graph(answer(1, 1, verdict=True)) == [ended(1, "a", "c"), start(2, "c")]


def test_unconditional_edge_is_taken_when_none_before_it_matched() -> None:
    """S-GRAPH-42."""
    graph = CheckedGraph(CHOICE)
    graph(BEGUN, done(1, "a"), answer(1, 0, verdict=False))
    assert graph(answer(1, 1, verdict=False))[0] == ended(1, "a", "__END__")
    assert graph.reason == "terminal"


def test_unconditional_edge_shadows_those_after_it() -> None:
    """S-GRAPH-43: they are never asked."""
    graph = CheckedGraph(graph_of(edge("a", "b"), edge("a", "c", asked=True), edge("b"), edge("c")))
    graph(BEGUN)
    assert graph(done(1, "a")) == [ended(1, "a", "b"), start(2, "b")]


def test_history_of_a_condition_ends_with_the_step_that_it_is_asked_about() -> None:
    """S-GRAPH-44: all steps so far, this visit included."""
    graph = CheckedGraph(REVIEWED)
    graph(BEGUN)
    graph.walk("research", "write", "critique")
    assert graph.machine.history == [
        HistoryEntry(("research",), (place(1, "research"),)),
        HistoryEntry(("write",), (place(2, "write"),)),
        HistoryEntry(("critique",), (place(3, "critique"),)),
    ]


def test_graph_fails_when_no_edge_matches() -> None:
    """S-GRAPH-45: with the step, which is in the history and is not announced."""
    graph = CheckedGraph(graph_of(edge("a", "b", asked=True), edge("b")))
    graph(BEGUN, done(1, "a"))
    assert graph(answer(1, 0, verdict=False)) == [graph.end]
    assert graph.end is not None
    assert graph.end.state is RunState.FAILED
    assert graph.end.unit_failures == (UnitFailure(unit=PATH, at=1.5, reason="no_edge", completed_before=0, step=1),)
    assert graph.result.steps == (StepResult(state="a", instance=place(1, "a"), next_state=None),)
    assert graph.reason is None


def test_graph_fails_when_a_condition_raises() -> None:
    """S-GRAPH-46: with the class and the text of the error."""
    graph = CheckedGraph(CHOICE)
    graph(BEGUN, done(1, "a"))
    assert graph(answer(1, 0, verdict=None)) == [graph.end]
    assert graph.end is not None
    failure = UnitFailure(
        unit=PATH, at=1.5, reason="evaluation", completed_before=0, step=1, error_type="KeyError", message="boom"
    )
    assert graph.end.unit_failures == (failure,)


def test_last_allowed_step_is_routed() -> None:
    """S-GRAPH-47: a no-match there is a failure and no cap."""
    graph = CheckedGraph(graph_of(edge("a", "b", asked=True), edge("b"), max_steps=1))
    graph(BEGUN, done(1, "a"), answer(1, 0, verdict=False))
    assert graph.end is not None
    assert [failure.reason for failure in graph.end.unit_failures] == ["no_edge"]


def test_end_on_the_last_allowed_step_is_terminal() -> None:
    """S-GRAPH-48, S-GRAPH-49."""
    graph = CheckedGraph(graph_of(edge("a"), max_steps=1))
    graph(BEGUN, done(1, "a"))
    assert graph.reason == "terminal"


@pytest.mark.parametrize("action", ["return_last", "return_with_flag"])
def test_cap_ends_the_graph(action: str) -> None:
    """S-GRAPH-49, S-GRAPH-51, S-GRAPH-72, S-GRAPH-81: four steps; the last one says which state was not run any more."""
    graph = CheckedGraph(graph_of(edge("a", "a"), max_steps=4, on_max_steps=action, inject_feedback_on_revisit=False))
    graph(BEGUN)
    assert graph.walk("a", "a", "a", "a")[-2] == ended(4, "a", "a", duration_s=0.0)
    assert graph.end is not None
    assert (graph.end.state, graph.end.unit_failures) == (RunState.COMPLETED, ())
    assert [step.next_state for step in graph.result.steps] == ["a"] * 4
    assert graph.reason == "max_steps"


def test_cap_fails_the_graph_when_it_raises() -> None:
    """S-GRAPH-50."""
    graph = CheckedGraph(graph_of(edge("a", "a"), max_steps=2, on_max_steps="throw"))
    graph(BEGUN)
    graph.walk("a", "a")
    assert graph.end is not None
    assert graph.end.state is RunState.FAILED
    assert graph.end.unit_failures == (UnitFailure(unit=PATH, at=1.0, reason="cap", completed_before=0),)
    assert graph.steps == ["a", "a"]


def test_failed_step_ends_the_graph() -> None:
    """S-GRAPH-52: nothing follows; the failure is the task's own."""
    graph = CheckedGraph(CHAIN)
    graph(BEGUN, done(1, "a"))
    assert graph(failed(2, "b")) == [graph.end]
    assert graph.end is not None
    assert (graph.end.state, graph.end.unit_failures) == (RunState.FAILED, ())
    assert (graph.steps, graph.reason) == (["a"], None)


@pytest.mark.parametrize("reason", [ExitReason.USER_EXIT_EARLY, ExitReason.TIMEOUT, ExitReason.BUDGET_EXHAUSTED])
def test_exit_in_a_step_ends_the_graph(reason: ExitReason) -> None:
    """S-GRAPH-53: without a termination reason."""
    graph = CheckedGraph(CHAIN)
    graph(BEGUN, done(1, "a"))
    assert graph(exited(2, "b", reason)) == [graph.end]
    assert graph.end is not None
    assert (graph.end.exit_reason, graph.reason) == (reason, None)
    assert graph.result.steps == (StepResult(state="a", instance=place(1, "a"), next_state="b"),)


def test_step_whose_gate_ends_the_run_is_in_the_history() -> None:
    """S-REV-32, S-REV-110, S-GRAPH-53: its output is there; it is not routed, and nothing is announced."""
    graph = CheckedGraph(CHAIN)
    graph(BEGUN, done(1, "a"))
    assert graph(exited(2, "b", has_output=True)) == [graph.end]
    assert (graph.steps, graph.result.steps[-1].next_state, graph.reason) == (["a", "b"], None, None)


def test_output_of_a_state_is_the_one_of_its_latest_visit() -> None:
    """S-GRAPH-55: so that a context entry finds it; what was not visited gives nothing."""
    execution = execution_of(graph_of(edge("a", "a")), instance=f"{PATH}#0")
    graph = GraphMachine(graph_of(edge("a", "a")), execution)
    graph.handle(BEGUN, done(1, "a"), done(2, "a"))
    inside = f"{PATH}#2"
    assert execution.scopes.find(inside, "a") == (ContextPart((place(2, "a"),)),)
    assert execution.scopes.find(inside, "b") is None


def test_revisited_state_is_shown_its_own_last_output() -> None:
    """S-GRAPH-60, S-GRAPH-61, S-GRAPH-62, S-GRAPH-82: not the output of the step before; six steps."""
    graph = CheckedGraph(REVIEWED)
    graph(BEGUN)
    graph.walk("research", "write", "critique")
    again = TaskChanges(attempt=1, feedback=feedback("write", 2), prior=place(2, "write"))
    assert graph(answer(3, 2, verdict=True))[-1] == start(4, "write", again)
    again = TaskChanges(attempt=1, feedback=feedback("critique", 2), prior=place(3, "critique"))
    assert graph(done(4, "write"))[-1] == start(5, "critique", again)
    graph(done(5, "critique"), answer(5, 2, verdict=False), done(6, "publish"))
    assert graph.steps == ["research", "write", "critique", "write", "critique", "publish"]


def test_third_visit_is_shown_the_second() -> None:
    """S-GRAPH-60, S-GRAPH-62."""
    graph = CheckedGraph(graph_of(edge("a", "a")))
    graph(BEGUN)
    again = TaskChanges(attempt=2, feedback=feedback("a", 3), prior=place(2, "a"))
    assert graph.walk("a", "a")[-1] == start(3, "a", again)


@pytest.mark.parametrize("rule", [{"no_feedback_states": ("a",)}, {"inject_feedback_on_revisit": False}])
def test_revisit_without_feedback_is_the_task_as_it_is(rule: dict[str, object]) -> None:
    """S-GRAPH-60."""
    graph = CheckedGraph(graph_of(edge("a", "a"), **rule))
    graph(BEGUN)
    assert graph(done(1, "a"))[-1] == start(2, "a")


def test_state_may_be_a_loop() -> None:
    """S-GRAPH-105: a visit is a whole loop, which is shown its own last visit; a step has its last output."""
    unit = graph_of(edge("a", "a"), members={"a": "loop:refine"}, max_steps=2)
    nest = Nest(plan=nested({}, unit, loop("refine", "w", "c", max_iterations=1, has_until=False))).play()
    assert nest.started == [f"{PATH}#{step}/loop:refine#0/{key}#0" for step in (0, 1) for key in ("w", "c")]
    again = TaskChanges(attempt=1, feedback=feedback("a", 2), prior=f"{PATH}#0/loop:refine#0/c#0")
    assert [each.changes for each in nest.all(Start)] == [None, None, again, None]
    steps = [each.what for each in nest.all(Announce) if isinstance(each.what, StepEnded)]
    assert [each.instance for each in steps] == [f"{PATH}#{step}/loop:refine" for step in (0, 1)]
    assert [each.output for each in steps] == [ContextPart((f"{PATH}#{step}/loop:refine#0/c#0",)) for step in (0, 1)]
    result = nest.end.units[-1]
    assert isinstance(result, GraphResult)
    assert [(each.instance, each.number) for each in result.steps] == [
        (f"{PATH}#0/loop:refine", 1),
        (f"{PATH}#1/loop:refine", 2),
    ]


def test_cancelled_graph_ends_when_its_step_has() -> None:
    """S-SET-27: what completed all the same is in the history."""
    graph = CheckedGraph(CHAIN)
    graph(BEGUN, done(1, "a"))
    assert graph(CancelRequested(at=2.0)) == [stop(2, "b")]
    assert graph(CancelRequested(at=2.0)) == []
    assert graph(done(2, "b")) == [graph.end]
    assert graph.end is not None
    assert graph.end.state is RunState.CANCELLED
    assert [(step.state, step.next_state) for step in graph.result.steps] == [("a", "b"), ("b", None)]


def test_graph_ends_at_once_when_it_is_cancelled_while_it_asks() -> None:
    """S-SET-27: the answer that comes later is ignored."""
    graph = CheckedGraph(CHOICE)
    graph(BEGUN, done(1, "a"))
    assert graph(CancelRequested(at=2.0)) == [graph.end]
    assert graph(answer(1, 0, verdict=True)) == []


def test_graph_starts_nothing_more_when_the_run_ends_around_it() -> None:
    """S-PAR-30: its step ends."""
    graph = CheckedGraph(CHAIN)
    graph(BEGUN)
    assert graph(StopRequested(at=1.0, exit_reason=ExitReason.TIMEOUT)) == []
    assert graph.machine.is_stopping
    assert graph(done(1, "a")) == [graph.end]
    assert graph.end is not None
    assert graph.end.exit_reason is ExitReason.TIMEOUT


def test_late_and_foreign_facts_change_nothing() -> None:
    """S-PAR-12: ends of steps that are over, and answers to other questions."""
    graph = CheckedGraph(CHOICE)
    graph(BEGUN, done(1, "a"))
    for late in (done(1, "a"), failed(1, "a"), done(7, "b"), answer(1, 1, verdict=True), answer(2, 0, verdict=True)):
        assert graph(late) == []
    assert graph(answer(1, 0, verdict=True))[-1] == start(2, "b")


def test_a_step_costs_the_same_however_many_there_were() -> None:
    """S-GRAPH-104: nothing that grows with the history is copied or looked through at a step."""
    graph = CheckedGraph(graph_of(edge("a", "a"), max_steps=1000))
    graph(BEGUN)
    history, number = graph.machine.history, 0
    while graph.end is None:
        number += 1
        graph(done(number, "a"))
        assert graph.machine.history is history, "it grows and is not replaced"
        assert len(graph.machine._running) <= 1
        assert len(graph.machine._to_route) == 0
        assert len(graph.machine._execution.scopes) <= 2  # no scope of a visit before the last
        assert len(graph.machine._tree.leaves()) <= 1
    assert len(graph.steps) == len(history) == 1000


def test_graph_begins_once() -> None:
    """S-GRAPH-40: at its start, whatever the order of its states."""
    graph = CheckedGraph(graph_of(edge("a"), edge("b", "a"), start="b"))
    assert graph(Begun(at=0.0)) == [start(1, "b")]


def test_steps_that_a_join_cancelled_keep_nothing_when_they_complete_all_the_same() -> None:
    """S-GRAPH-97, S-GRAPH-104: a graph that forks again and again keeps as many scopes as it has states."""
    unit = graph_of(fork("a", "b", "c"), join("bc", "d", 1), edge("d", "a"), max_steps=400)
    nest = Nest(plan=nested({}, unit, inside=dict.fromkeys("abcd", ())))
    nest.begin()
    for first in range(1, 400, 4):
        for number, state in enumerate("abcd", first):  # the join cancels c, which completes
            nest.complete(place(number, state))
        assert nest.source.scope_count <= 5
    assert nest.end.state is RunState.COMPLETED
