"""Map-reduce while it is fed: places, failures, ends and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ensemble_ray import ExitReason, RunState
from ensemble_ray.schedule.instructions import End, WarnLeftOut
from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.schedule.map_reduce_groups import Grouping, MapReduceRules
from ensemble_ray.schedule.stimuli import CancelRequested, Stimulus
from tests.ensemble_ray.schedule.feeding import (
    BEGUN,
    CANCELLED,
    COMPLETED,
    Feed,
    broken,
    by_budget,
    by_chunk,
    completed,
    exited,
    failed,
    left_out,
    maps_only,
    name_of,
    pull,
    pulled,
    raised,
    start_map,
    start_reduce,
    stop,
    stopped,
    weighing,
)

# Places.


def test_items_are_pulled_for_free_places_when_works_end() -> None:
    """S-MR-121, S-MR-140, S-SET-21: one question at a time, for as many as may start."""
    run = Feed(rules=maps_only(window=3), items=9)
    assert run.handle(BEGUN) == [pull(3)]
    assert run.give(most=2) == [start_map(0), start_map(1), pull(1)]
    assert run.complete((0, 0)) == []  # the question is open
    assert run.give() == [start_map(2), pull(1)]


def test_reduces_go_first_when_items_wait_too() -> None:
    """S-MR-140: what is already pulled waits, and nothing more is pulled."""
    run = Feed(rules=by_chunk(2, is_pipelined=True, window=2), items=9)
    run.handle(BEGUN)
    run.give()
    run.complete((0, 0))  # the question for its place is open
    run.complete((0, 1))
    run.give(most=1)
    assert run.running == [(0, 2)]
    assert run.asked == 1

    done = run.complete((0, 2))
    assert done == [start_reduce(1, 0, (0, 0), (0, 1))]
    assert run.give() == [start_map(3)]


def test_reduces_wait_for_places_when_a_level_is_wide() -> None:
    """S-MR-140, S-SET-21: they start in the order of their numbers."""
    run = Feed(rules=by_chunk(2, window=2), items=9).play()

    assert run.most_at_once == 2
    assert [each.number for each in run.reduces if each.level == 1] == [0, 1, 2, 3, 4]


def test_more_items_are_refused_when_fewer_were_asked_for() -> None:
    """S-MR-121."""
    machine = MapReduceMachine(maps_only(window=3), name_of)
    machine.handle(BEGUN)

    with pytest.raises(ValueError, match="4 items arrived, 3 were requested"):
        machine.handle(pulled(4, is_exhausted=False))


# Failures.


@pytest.mark.parametrize("rules", [by_chunk(2), by_chunk(2, is_pipelined=True), maps_only()])
def test_run_has_failed_when_the_source_is_empty(rules: MapReduceRules) -> None:
    """S-MR-122."""
    assert Feed(rules=rules, items=0).play().ends == [failed("empty")]


@pytest.mark.parametrize("order", [{}, {"is_pipelined": True}, {"is_pipelined": True, "is_ordered": True}])
def test_others_go_on_when_a_map_is_left_out(order: dict[str, bool]) -> None:
    """S-MR-101, S-MR-114, S-MR-150."""
    run = Feed(rules=by_chunk(2, **order), items=5).play(failing={(0, 1)})

    assert run.all(WarnLeftOut) == [left_out(0, 1)]
    assert run.tree == ((0, 2), (3, 4))
    assert run.ends == [COMPLETED]


@pytest.mark.parametrize("rules", [by_chunk(2), by_chunk(2, is_pipelined=True), maps_only(), by_budget(9)])
def test_run_has_failed_when_all_maps_failed(rules: MapReduceRules) -> None:
    """S-MR-102."""
    run = Feed(rules=rules, items=5).play(failing={(0, number) for number in range(5)})

    assert run.ends == [failed("all_maps")]
    assert run.reduces == []


def test_what_runs_is_stopped_when_the_first_map_fails() -> None:
    """S-MR-100, S-MR-150: the run ends when all have ended; what completes meanwhile starts nothing."""
    run = Feed(rules=by_chunk(2, fails=True, is_pipelined=True), items=9).begin()
    run.complete((0, 3))

    assert run.fail((0, 1)) == [stop(0, 0), stop(0, 2)]

    assert run.give() == []
    assert run.complete((0, 0)) == []
    assert run.handle(CancelRequested(at=4.0)) == []  # none is stopped twice
    run.running.remove((0, 2))
    assert run.handle(stopped((0, 2))) == [CANCELLED]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("rules", [by_chunk, by_budget])
def test_final_failure_ends_the_run_when_anything_else_would_go_on(
    rules: Callable[..., MapReduceRules],
    fails: bool,  # noqa: FBT001  a parameter
) -> None:
    """S-MR-104."""
    run = Feed(rules=rules(3, fails=fails), items=3).play(failing={(1, 0)})

    assert run.ends == [failed("first" if fails else "level")]


@pytest.mark.parametrize("order", [{}, {"is_pipelined": True, "is_ordered": True}])
def test_level_ends_the_run_when_none_of_its_reduces_is_left(order: dict[str, bool]) -> None:
    """S-MR-104: with some left, they go on."""
    rules = by_chunk(2, **order)
    none_left = Feed(rules=rules, items=6).play(failing={(1, 0), (1, 1), (1, 2)})
    one_left = Feed(rules=rules, items=6).play(failing={(1, 0), (1, 1)})

    assert none_left.ends == [failed("level")]
    assert one_left.ends == [COMPLETED]
    assert one_left.tree == ((4, 5),)
    assert one_left.all(WarnLeftOut) == [left_out(1, 0), left_out(1, 1)]


def test_pool_ends_the_run_when_nothing_is_left_in_it() -> None:
    """S-MR-104: pipelined, outputs of any level are enough to go on with."""
    rules = by_budget(3, is_pipelined=True)

    assert Feed(rules=rules, items=2).play(weighing(9, 9), failing={(1, 0), (1, 1)}).ends == [failed("level")]
    assert Feed(rules=rules, items=4).play(weighing(1, 1, 1, 9), failing={(1, 0)}).tree == (0, 1, 2)


def test_reduce_failure_stops_the_run_when_reduces_must_not_fail() -> None:
    """S-MR-104 under fail_fast."""
    run = Feed(rules=by_chunk(2, fails=True), items=6).begin()
    while not run.reduces:
        run.complete(run.running[0])
        if run.asked:
            run.give()

    assert run.fail((1, 1)) == [stop(1, 0), stop(1, 2)]


def test_refused_items_count_as_failed_when_they_come() -> None:
    """S-MR-125: no map starts for them, in whatever place they are."""
    run = Feed(rules=by_chunk(2), items=4)
    run.handle(BEGUN)
    run.pulled_count = 4
    run.asked = 0

    done = run.handle(pulled(4, 1, 3, 3, is_exhausted=True))

    assert done == [*(left_out(0, n) for n in (1, 3)), start_map(0), start_map(2)]
    assert run.play().tree == (0, 2)


def test_refused_item_ends_the_run_when_items_must_not_fail() -> None:
    """S-MR-125, S-MR-150; one that is not there cannot be refused."""
    run = Feed(rules=by_chunk(2, fails=True, window=6), items=9).begin()
    run.complete((0, 0))
    run.complete((0, 1))
    with pytest.raises(ValueError, match="item 8 is refused, 6 to 6 arrived"):
        run.machine.handle(pulled(1, 8, is_exhausted=False))

    again = Feed(rules=by_chunk(2, fails=True, window=6), items=9).begin()
    again.complete((0, 0))
    again.pulled_count += 1
    assert again.handle(pulled(1, 6, is_exhausted=False)) == [stop(0, n) for n in range(1, 6)]


# Ends from outside.


@pytest.mark.parametrize(
    ("reason", "state"),
    [
        (ExitReason.USER_EXIT_EARLY, RunState.COMPLETED),
        (ExitReason.TIMEOUT, RunState.COMPLETED),
        (ExitReason.BUDGET_EXHAUSTED, RunState.BUDGET_EXHAUSTED),
    ],
)
def test_what_runs_finishes_when_one_exits_early(reason: ExitReason, state: RunState) -> None:
    """S-PAR-30, S-BUD-4: nothing starts, the first reason wins and outranks a failure."""
    run = Feed(rules=by_chunk(2, fails=True, is_pipelined=True), items=9).begin()
    run.complete((0, 0))
    run.running.remove((0, 1))
    assert run.handle(exited((0, 1), reason)) == []
    assert run.fail((0, 2)) == []

    run.running.remove((0, 3))
    done = run.handle(exited((0, 3), ExitReason.ERROR))

    assert done == [End(state=state, exit_reason=reason)]


def test_early_exit_counts_when_a_failure_came_before() -> None:
    """S-PAR-30: early exit outranks a recorded failure."""
    run = Feed(rules=maps_only(window=2, fails=True), items=2).begin()
    run.fail((0, 0))
    run.running.remove((0, 1))

    done = run.handle(exited((0, 1), ExitReason.USER_EXIT_EARLY))

    assert done == [End(state=RunState.COMPLETED, exit_reason=ExitReason.USER_EXIT_EARLY)]


def test_run_ends_when_it_is_cancelled_before_it_began() -> None:
    """S-SET-27."""
    assert Feed(rules=maps_only(), items=3).handle(CancelRequested(at=0.0)) == [CANCELLED]


def test_what_runs_is_stopped_when_cancelled() -> None:
    """S-SET-27: and the end comes when it has stopped."""
    run = Feed(rules=by_chunk(2), items=9).begin()
    assert run.handle(CancelRequested(at=2.0)) == [stop(0, n) for n in range(4)]

    run.play()

    assert run.ends == [CANCELLED]


def test_items_come_too_late_when_the_run_is_ending() -> None:
    """S-MR-123: a factory that raised, too, ends the run while a question for items is open."""
    run = Feed(rules=by_chunk(2, window=2), items=9).begin()
    run.complete((0, 0))
    run.handle(raised())

    assert run.handle(pulled(1, 2, is_exhausted=False)) == []

    assert run.complete((0, 1)) == [failed("source")]


def test_what_runs_is_stopped_when_the_source_raises() -> None:
    """S-MR-123: an exit that comes later does not hide it."""
    run = Feed(rules=by_chunk(2, window=2), items=9).begin()
    run.complete((0, 0))
    run.asked = 0
    assert run.handle(raised()) == [stop(0, 1)]

    run.running.remove((0, 1))
    done = run.handle(exited((0, 1), ExitReason.USER_EXIT_EARLY))

    assert done == [failed("source")]


def test_nothing_is_wanted_when_the_run_has_ended() -> None:
    """Rule 7 of the machine: late messages change nothing."""
    run = Feed(rules=maps_only(), items=2).play()

    assert run.ends == [COMPLETED]
    assert run.handle(broken((0, 1)), CancelRequested(at=9.0), raised()) == []


def test_late_messages_are_ignored_when_a_work_is_not_in_flight() -> None:
    """Rule 6 of the machine: an output of a process that was replaced is counted once."""
    run = Feed(rules=by_chunk(2, is_pipelined=True), items=4).begin()
    run.complete((0, 0))
    late: list[Stimulus] = [completed((0, 0)), broken((0, 0))]
    assert run.handle(*late, completed((7, 0))) == []

    assert run.play().ends == [COMPLETED]


# Rules.


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"grouping": Grouping.NONE, "window": 0}, "window must be >= 1, got: 0"),
        ({"grouping": Grouping.NONE, "is_ordered": True}, "is_ordered needs is_pipelined"),
        ({"grouping": Grouping.CHUNK, "capacity": 1}, "capacity of a chunk must be >= 2, got: 1"),
        ({"grouping": Grouping.BUDGET, "capacity": 5}, "a budget needs capacity >= 1 and max_levels >= 1"),
    ],
)
def test_rules_are_refused_when_a_run_could_not_end(rules: dict[str, object], text: str) -> None:
    """S-MR-112: no rules let a run go on for ever."""
    with pytest.raises(ValueError, match=text):
        MapReduceRules(**{"window": 1, "fails_on_item": False, "fails_on_reduce": False, **rules})  # type: ignore[arg-type]  # parametrised


def test_weight_is_refused_when_it_is_negative() -> None:
    """S-MR-60: an estimate is none."""
    run = Feed(rules=maps_only(), items=2).begin()

    with pytest.raises(ValueError, match="output_tokens must be >= 0, got: -1"):
        run.complete((0, 0), -1)


def test_weights_are_compared_when_they_are_beyond_any_text() -> None:
    """S-MR-60: an estimator may say what it likes."""
    run = Feed(rules=by_budget(100, max_levels=1), items=2).play(weighing(10**30, 10**30))

    assert run.ends == [COMPLETED]
