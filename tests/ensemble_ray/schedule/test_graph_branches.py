"""Graphs with forks and joins: what runs side by side, who waits for whom, what is cancelled, and the history."""

from __future__ import annotations

from itertools import permutations

import pytest

from ensemble_ray import ExitReason, RunState
from ensemble_ray.plan.plan import GraphUnit
from ensemble_ray.schedule.graph import BRANCH_TRANSITIONS, BranchEvent, BranchState
from ensemble_ray.schedule.instructions import Start, StepResult, TaskChanges, UnitFailure
from ensemble_ray.schedule.stimuli import CancelRequested
from ensemble_ray.schedule.unit import HistoryEntry
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
    stopped,
)

#: One fork, one join.
DIAMOND = graph_of(fork("a", "b", "c"), join("bc", "d"), edge("d"))
#: A fork inside of a branch, with a join of its own.
NESTED = graph_of(
    fork("a", "b", "c"),
    fork("b", "x", "y"),
    join("xy", "z"),
    join("zc", "d"),
    edge("d"),
    inject_feedback_on_revisit=False,
)


def forked(unit: GraphUnit) -> CheckedGraph:
    """A graph whose first step led to a fork."""
    graph = CheckedGraph(unit)
    graph(BEGUN, done(1, "a"))
    return graph


def test_fork_starts_all_its_states_and_join_waits_for_all() -> None:
    """S-GRAPH-91, S-GRAPH-95, S-GRAPH-103: announced after routing and before what follows."""
    graph = CheckedGraph(DIAMOND)
    graph(BEGUN)
    assert graph(done(1, "a")) == [ended(1, "a", "b, c"), start(2, "b"), start(3, "c")]
    assert graph(done(3, "c")) == [ended(3, "c", "d", duration_s=0.0)]
    assert graph(done(2, "b")) == [ended(2, "b", "d", duration_s=0.0), start(4, "d")]
    graph(done(4, "d"))
    assert graph.reason == "terminal"


def test_what_leaves_a_state_is_tried_in_declared_order() -> None:
    """S-GRAPH-90: a fork or a join behind an edge with a condition is taken when that does not match."""
    graph = CheckedGraph(
        graph_of(edge("a", "a", asked=True), fork("a", "b", "c"), edge("b", asked=True), join("bc"), edge("c"))
    )
    graph(BEGUN)
    assert graph(done(1, "a")) == [ask(1, 0)]
    assert graph(answer(1, 0, verdict=False))[1:] == [start(2, "b"), start(3, "c")]
    assert graph(done(2, "b", at=1.5)) == [ask(2, 2)]
    assert graph(answer(2, 2, verdict=False)) == [ended(2, "b", "__END__", duration_s=0.0)]
    graph(done(3, "c"))
    assert graph.end is not None


@pytest.mark.parametrize("order", list(permutations(["b", "c", "e"])))
def test_history_is_in_declared_order_whatever_order_branches_end_in(order: tuple[str, ...]) -> None:
    """S-GRAPH-99, S-GRAPH-93: numbers are those of the starts."""
    graph = forked(graph_of(fork("a", "b", "c", "e"), edge("c", "f"), join("bfe", "d"), edge("d")))
    numbers = {"b": 2, "c": 3, "e": 4}
    for state in order:
        graph(done(numbers[state], state))
    graph(done(5, "f"), done(6, "d"))
    assert graph.steps == ["a", "b", "c", "f", "e", "d"]
    assert [step.number for step in graph.result.steps] == [1, 2, 3, 5, 4, 6]


def test_joins_of_one_fork_are_in_declared_order_of_the_joins() -> None:
    """S-GRAPH-99: whichever goes on first, and whether the other still runs then."""
    unit = graph_of(
        fork("a", "b", "c", "e", "f"), join("bc", "g"), join("ef", "h"), join("gh", "i"), edge("i"), max_steps=20
    )
    first = forked(unit)
    first(done(4, "e"), done(5, "f"), done(6, "h"), done(2, "b"), done(3, "c"), done(7, "g"), done(8, "i"))
    assert first.steps == ["a", "b", "c", "e", "f", "g", "h", "i"]
    last = forked(unit)
    last(done(2, "b"), done(3, "c"), done(6, "g"), done(4, "e"), done(5, "f"), done(7, "h"), done(8, "i"))
    assert last.steps == first.steps


def test_joined_branch_that_ended_before_another_join_is_in_declared_order() -> None:
    """S-GRAPH-99: the later join is declared first."""
    unit = graph_of(fork("a", "b", "c"), join("c", "h"), join("b", "g"), edge("g"), edge("h"))
    graph = forked(unit)
    graph(done(2, "b"), done(4, "g"), done(3, "c"), done(5, "h"))
    assert graph.steps == ["a", "b", "c", "h", "g"]


def test_joins_pair_the_branches_of_their_own_fork() -> None:
    """S-GRAPH-95: two forks side by side that use the same states do not mix."""
    unit = graph_of(
        fork("a", "p", "q"),
        edge("p", "m"),
        edge("q", "m"),
        fork("m", "x", "y"),
        join("xy", "z"),
        edge("z"),
        inject_feedback_on_revisit=False,
    )
    graph = forked(unit)
    graph(done(2, "p"), done(3, "q"))
    graph(done(4, "m"), done(5, "m"))  # steps 6, 7 and 8, 9
    graph(done(6, "x"))
    assert len(graph(done(9, "y"))) == 1, "x of the one and y of the other wait"
    assert graph(done(7, "y"))[-1] == start(10, "z")
    assert graph(done(8, "x"))[-1] == start(11, "z")
    graph(done(11, "z"), done(10, "z"))
    assert [step.number for step in graph.result.steps] == [1, 2, 4, 6, 7, 10, 3, 5, 8, 9, 11]


def test_forks_nest() -> None:
    """S-GRAPH-91, S-GRAPH-95: the inner join goes on as a branch of the outer fork."""
    graph = forked(NESTED)
    assert graph(done(2, "b"))[1:] == [start(4, "x"), start(5, "y")]
    graph(done(3, "c"), done(5, "y"))
    assert graph(done(4, "x"))[-1] == start(6, "z")
    assert graph(done(6, "z"))[-1] == start(7, "d")
    graph(done(7, "d"))
    assert graph.steps == ["a", "b", "x", "y", "z", "c", "d"]


def test_join_takes_branches_of_an_inner_and_an_outer_fork() -> None:
    """S-GRAPH-96: those of the inner fork count outside when no more of them can come."""
    graph = forked(graph_of(fork("a", "b", "c"), fork("b", "x", "y"), join("xyc", "d"), edge("d")))
    graph(done(2, "b"), done(4, "x"), done(3, "c"))
    assert graph(done(5, "y"))[-1] == start(6, "d")
    graph(done(6, "d"))
    assert graph.steps == ["a", "b", "x", "y", "c", "d"]


def test_two_arrivals_from_one_state_count_once() -> None:
    """S-GRAPH-95: and both go on."""
    unit = graph_of(fork("a", "b", "c", "e"), edge("b", "s"), edge("c", "s"), join("se", "d"), edge("d"))
    graph = forked(unit)
    graph(done(2, "b"), done(3, "c"), done(5, "s"))
    assert len(graph(done(6, "s"))) == 1
    assert graph(done(4, "e"))[-1] == start(7, "d")
    graph(done(7, "d"))
    assert graph.steps == ["a", "b", "s", "c", "s", "e", "d"]


def test_end_ends_its_branch_alone() -> None:
    """S-GRAPH-94: the graph ends with the last."""
    graph = forked(graph_of(fork("a", "b", "c"), edge("b"), edge("c")))
    assert graph(done(2, "b")) == [ended(2, "b", "__END__", duration_s=0.0)]
    graph(done(3, "c"))
    assert (graph.reason, graph.steps) == ("terminal", ["a", "b", "c"])


def test_join_does_not_wait_for_a_branch_that_ended() -> None:
    """S-GRAPH-96."""
    graph = forked(graph_of(fork("a", "b", "c"), edge("b", asked=True), join("bc", "d"), edge("d")))
    graph(done(3, "c"), done(2, "b"))
    assert graph(answer(2, 1, verdict=True))[-1] == start(4, "d")


def test_join_does_not_wait_for_a_branch_that_went_elsewhere() -> None:
    """S-GRAPH-96, S-GRAPH-97: a branch that cannot arrive any more runs on beside what the join made."""
    graph = forked(graph_of(fork("a", "b", "c"), edge("b", "e"), edge("e"), join("bc", "d"), edge("d")))
    graph(done(3, "c"))
    assert graph(done(2, "b"))[-2:] == [start(4, "e"), start(5, "d")]
    graph(done(5, "d"), done(4, "e"))
    assert graph.steps == ["a", "b", "e", "c", "d"]


def test_join_without_a_fork_is_an_edge() -> None:
    """S-GRAPH-96."""
    graph = CheckedGraph(graph_of(join("ab", "c"), join("c", "b"), edge("b"), start="a", max_steps=3))
    graph(BEGUN)
    assert graph(done(1, "a"))[-1] == start(2, "c")
    assert graph(done(2, "c"))[-1] == start(3, "b")


def test_joins_that_wait_for_each_other_go_on_in_declared_order() -> None:
    """S-GRAPH-98: each waits for what the other would make."""
    graph = forked(graph_of(fork("a", "b", "c"), join("be", "f"), join("cf", "e"), max_steps=4))
    assert graph(done(3, "c")) == [ended(3, "c", "e", duration_s=0.0)]
    assert graph(done(2, "b")) == [ended(2, "b", "f", duration_s=0.0), start(4, "f")]


def test_join_with_a_count_cancels_those_that_could_still_come() -> None:
    """S-GRAPH-97: and goes on at once; a branch that leads elsewhere is left alone."""
    unit = graph_of(fork("a", "b", "c", "e", "l"), edge("e", "f"), join("bcf", "d", 1), edge("d"), edge("l"))
    graph = forked(unit)
    assert graph(done(3, "c")) == [ended(3, "c", "d", duration_s=0.0), stop(2, "b"), stop(4, "e"), start(6, "d")]
    graph(stopped(2, "b"), done(4, "e"), done(6, "d"))
    assert graph.end is None
    graph(done(5, "l"))
    assert graph.steps == ["a", "c", "l", "d"]
    assert graph.reason == "terminal"


def test_first_two_of_three_go_on() -> None:
    """S-GRAPH-95, S-GRAPH-97: those that had arrived at other joins are among the cancelled."""
    unit = graph_of(fork("a", "b", "c", "e"), join("bce", "d", 2), edge("d"))
    graph = forked(unit)
    graph(done(4, "e"))
    assert graph(done(2, "b"))[1:] == [stop(3, "c"), start(5, "d")]
    graph(stopped(3, "c"), done(5, "d"))
    assert graph.steps == ["a", "b", "e", "d"]


def test_step_that_waits_for_its_routing_is_in_the_history_when_its_branch_is_cancelled() -> None:
    """S-GRAPH-97: it had completed; conditions asked later are shown it."""
    unit = graph_of(
        fork("a", "b", "c"),
        edge("b", "b", asked=True),
        join("bc", "d", 1),
        edge("d", asked=True),
        edge("d"),
        max_steps=9,
    )
    graph = forked(unit)
    graph(done(2, "b"), done(3, "c"))
    graph(answer(2, 1, verdict=False))
    graph(done(4, "d"))
    assert [entry.names[0] for entry in graph.machine.history] == ["a", "b", "c", "d"]
    graph(answer(4, 3, verdict=True))
    assert graph.result.steps[2] == StepResult(state="c", instance=place(3, "c"), next_state=None)


def test_steps_are_routed_one_after_the_other() -> None:
    """S-GRAPH-92: in the order of their completion; the newest of the history is the one that is asked about."""
    unit = graph_of(fork("a", "b", "c"), edge("b", asked=True), edge("b"), edge("c", asked=True), edge("c"))
    graph = forked(unit)
    assert graph(done(3, "c")) == [ask(3, 3)]
    assert graph(done(2, "b")) == []
    assert graph.machine.history[-1] == HistoryEntry(("c",), (place(3, "c"),))
    assert graph(answer(3, 3, verdict=True)) == [ended(3, "c", "__END__", duration_s=0.0), ask(2, 1)]
    assert graph.machine.history[-1] == HistoryEntry(("b",), (place(2, "b"),))


def test_visits_are_counted_over_all_branches() -> None:
    """S-GRAPH-93: a visit beside the first is none to a state that has an output."""
    unit = graph_of(fork("a", "b", "c"), edge("b", "s"), edge("c", "s"), edge("s", "s", asked=True), edge("s"))
    graph = forked(unit)
    assert graph(done(2, "b"), done(3, "c"))[1::2] == [start(4, "s"), start(5, "s")]
    graph(done(5, "s"))
    text = "Graph state 's' visit #3. Prior visit's output is provided above; refine your response based on it."
    again = TaskChanges(attempt=2, feedback=text, prior=place(5, "s"))
    assert graph(answer(5, 3, verdict=True))[-1] == start(6, "s", again)


def test_failure_in_one_branch_cancels_the_others() -> None:
    """S-GRAPH-100: the graph ends when they have; what they still give is not in the history."""
    graph = forked(graph_of(fork("a", "b", "c", "e"), join("bce", "d"), edge("d")))
    graph(done(4, "e"))
    assert graph(failed(2, "b")) == [stop(3, "c")]
    assert graph.machine.is_stopping
    assert graph(done(3, "c")) == [graph.end]
    assert graph.end is not None
    assert (graph.end.state, graph.end.unit_failures, graph.reason) == (RunState.FAILED, (), None)
    assert graph.steps == ["a", "e"]


@pytest.mark.parametrize("verdict", [None, False])
def test_failed_routing_in_one_branch_cancels_the_others(verdict: bool | None) -> None:  # noqa: FBT001  as it is answered
    """S-GRAPH-100: a later failure does not count."""
    graph = forked(graph_of(fork("a", "b", "c"), edge("b", asked=True), edge("c")))
    graph(done(2, "b"))
    assert graph(answer(2, 1, verdict=verdict)) == [stop(3, "c")]
    graph(failed(3, "c"))
    assert graph.end is not None
    (failure,) = graph.end.unit_failures
    assert isinstance(failure, UnitFailure)
    assert (failure.reason, failure.step) == ("no_edge" if verdict is False else "evaluation", 2)


def test_exit_in_one_branch_lets_the_others_finish_their_steps() -> None:
    """S-GRAPH-101: nothing is routed; the answer to an open question is ignored."""
    graph = forked(graph_of(fork("a", "b", "c", "e"), edge("b", asked=True), edge("c", "d"), edge("d"), edge("e")))
    graph(done(2, "b"))
    assert graph(exited(4, "e", ExitReason.TIMEOUT)) == []
    assert graph(answer(2, 1, verdict=True)) == []
    assert graph(done(3, "c")) == [graph.end]
    assert graph.end is not None
    assert (graph.end.state, graph.end.exit_reason) == (RunState.COMPLETED, ExitReason.TIMEOUT)
    assert [(step.state, step.next_state) for step in graph.result.steps] == [
        ("a", "b, c, e"),
        ("b", None),
        ("c", None),
    ]


def test_failure_after_an_exit_or_a_cancellation_cancels_nothing_more() -> None:
    """S-GRAPH-101, S-SET-27: what runs ends, and each step is cancelled once."""
    unit = graph_of(fork("a", "b", "c", "e"), edge("b"), edge("c"), edge("e"))
    left = forked(unit)
    left(exited(2, "b"))
    assert left(failed(3, "c")) == []
    left(done(4, "e"))
    assert left.steps == ["a", "e"]
    stopping = forked(unit)
    stopping(CancelRequested(at=2.0))
    assert stopping(failed(3, "c")) == []


def test_exit_of_a_step_that_a_join_cancelled_ends_the_graph() -> None:
    """S-GRAPH-101, S-BUD-4: somebody wants the end of the run, or the budget is spent."""
    graph = forked(graph_of(fork("a", "b", "c"), join("bc", "d", 1), edge("d")))
    graph(done(2, "b"))
    assert graph(exited(3, "c", ExitReason.BUDGET_EXHAUSTED)) == []
    graph(done(4, "d"))
    assert graph.end is not None
    assert graph.end.exit_reason is ExitReason.BUDGET_EXHAUSTED


def test_failure_of_a_step_that_a_join_cancelled_is_ignored() -> None:
    """S-GRAPH-97."""
    graph = forked(graph_of(fork("a", "b", "c"), join("bc", "d", 1), edge("d")))
    graph(done(2, "b"), failed(3, "c"), done(4, "d"))
    assert graph.end is not None
    assert graph.end.state is RunState.COMPLETED


def test_cap_ends_branches_one_by_one() -> None:
    """S-GRAPH-102: running steps are finished and routed; those who wait go on and are stopped by the cap, too."""
    graph = forked(graph_of(fork("a", "b", "c"), edge("b", "e"), edge("e"), join("c", "f"), edge("f"), max_steps=3))
    assert graph(done(2, "b")) == [ended(2, "b", "e", duration_s=0.0)]
    assert graph.end is None
    assert graph(done(3, "c"))[0] == ended(3, "c", "f", duration_s=0.0)
    assert (graph.reason, graph.steps) == ("max_steps", ["a", "b", "c"])


def test_fork_near_the_cap_starts_its_first_states() -> None:
    """S-GRAPH-102: `on_max_steps` is applied when they have ended."""
    graph = CheckedGraph(graph_of(fork("a", "b", "c"), edge("b"), edge("c"), max_steps=2, on_max_steps="throw"))
    graph(BEGUN)
    assert graph(done(1, "a"))[1:] == [start(2, "b")]
    graph(done(2, "b"))
    assert graph.end is not None
    assert [failure.reason for failure in graph.end.unit_failures] == ["cap"]


def test_cancelled_graph_stops_every_branch() -> None:
    """S-SET-27: each step once, also where a join had cancelled one."""
    graph = forked(graph_of(fork("a", "b", "c", "e"), edge("b"), edge("e", "d"), join("ec", "d", 1), edge("d")))
    assert stop(3, "c") not in graph(done(2, "b"))
    graph(done(4, "e"))
    assert graph(CancelRequested(at=3.0)) == [stop(3, "c"), stop(5, "d")]
    graph(stopped(3, "c"), stopped(5, "d"))
    assert graph.end is not None
    assert graph.end.state is RunState.CANCELLED


def test_graph_that_forks_and_joins_again_and_again_grows_no_deeper() -> None:
    """S-GRAPH-104: what a join made of a whole fork is the branch that was divided."""
    graph = CheckedGraph(
        graph_of(fork("a", "b", "c"), join("bc", "d"), edge("d", "a"), max_steps=1000, inject_feedback_on_revisit=False)
    )
    running = [each.instance for each in graph(BEGUN) if isinstance(each, Start)]
    while graph.end is None:
        instance = running.pop(0)
        _, step, key = instance.replace("/", "#").split("#")[:3]
        wanted = graph(done(int(step) + 1, key))
        running += [each.instance for each in wanted if isinstance(each, Start)]
        tree = graph.machine._tree
        assert all(branch.fork in (tree.first.fork, tree.first.trail[-1]) for branch in tree.leaves())
    assert graph.steps == ["a", "b", "c", "d"] * 250
    assert graph.result.steps[0].instance == f"{PATH}#0/a#0"


def test_table_of_branches_is_complete() -> None:
    """S-GRAPH-91: every event is used; every state is reached, and left or an end."""
    assert {event for _, event in BRANCH_TRANSITIONS} == set(BranchEvent)
    assert {BranchState.BEGUN, *BRANCH_TRANSITIONS.values()} == set(BranchState)
    ends = {BranchState.ENDED, BranchState.CAPPED, BranchState.FAILED, BranchState.CUT_SHORT}
    assert {state for state, _ in BRANCH_TRANSITIONS} == set(BranchState) - ends
