"""Map-reduce while it is fed: shapes, levels, pools, and the size of the machine."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest

from ensemble_ray.schedule.instructions import Evaluate, MapItem, PullItems, ReduceGroup, Start, Warn, WarnOversized
from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.schedule.map_reduce_groups import MapReduceRules
from tests.ensemble_ray.schedule.feeding import (
    BEGUN,
    COMPLETED,
    Feed,
    Work,
    by_budget,
    by_chunk,
    completed,
    final,
    name_of,
    pulled,
    weighing,
)

# Shapes.

SHAPES = [
    (1, 5, [], 1),
    (2, 2, [], 2),
    (3, 2, [2], 2),
    (4, 2, [2], 2),
    (5, 2, [3, 2], 2),
    (5, 5, [], 5),
    (6, 3, [2], 2),
    (6, 5, [2], 2),
    (7, 3, [3], 3),
    (8, 2, [4, 2], 2),
    (9, 3, [3], 3),
    (10, 3, [4, 2], 2),
    (16, 4, [4], 4),
    (17, 4, [5, 2], 2),
    (25, 5, [5], 5),
    (26, 5, [6, 2], 2),
    (27, 3, [9, 3], 3),
    (28, 3, [10, 4, 2], 2),
    (100, 5, [20, 4], 4),
    (100, 10, [10], 10),
    (126, 5, [26, 6, 2], 2),
]


@pytest.mark.parametrize("order", [{}, {"is_pipelined": True, "is_ordered": True}], ids=["levels", "ordered"])
@pytest.mark.parametrize(("items", "size", "levels", "last"), SHAPES)
def test_shape_is_that_of_the_table_when_chunks_are_made(
    items: int, size: int, levels: list[int], last: int, order: dict[str, bool]
) -> None:
    """S-MR-30, S-MR-31, S-MR-32, S-MR-33, S-MR-113, S-MR-114: and each group is consecutive."""
    run = Feed(rules=by_chunk(size, **order), items=items).play(choose=lambda running: len(running) // 2)

    assert run.ends == [COMPLETED]
    assert [len(run.numbers(level=level)) for level in range(1, len(levels) + 1)] == levels
    (end,) = (each for each in run.reduces if each.is_final)
    assert (end.level, len(end.inputs)) == (len(levels) + 1, last)
    for level, count in enumerate([items, *levels], start=1):
        assert [each for group in run.numbers(level=level) for each in group] == list(range(count))


# Level by level with a budget.


@pytest.mark.parametrize(("tokens", "is_one_level"), [((50, 50), True), ((50, 51), False)])
def test_final_reduce_follows_the_maps_when_their_sum_fits(tokens: tuple[int, ...], is_one_level: bool) -> None:  # noqa: FBT001  a parameter
    """S-MR-41, S-MR-42, S-MR-50: a sum equal to the budget fits."""
    run = Feed(rules=by_budget(100), items=2).play(weighing(*tokens))

    assert (run.reduces == [final(1, (0, 0), (0, 1))]) is is_one_level
    assert run.ends == [COMPLETED]


def test_bins_are_reduced_until_the_sum_fits_when_it_does_not() -> None:
    """S-MR-43, S-MR-49: bins in packing order, outputs in bin order whichever ended first."""
    run = Feed(rules=by_budget(100), items=5).play(
        weighing(40, 30, 30, 50, 20, reduced=50), choose=lambda r: len(r) - 1
    )

    assert run.reduces == [
        ReduceGroup(level=1, number=0, inputs=((0, 3), (0, 0))),
        ReduceGroup(level=1, number=1, inputs=((0, 1), (0, 2), (0, 4))),
        final(2, (1, 0), (1, 1)),
    ]
    assert run.all(Warn) == []


def test_no_reduce_starts_when_a_map_of_its_level_runs() -> None:
    """S-MR-41: in the mode "levels" a level begins when the one before has ended."""
    run = Feed(rules=by_chunk(2), items=5).begin()
    run.give()
    for number in (3, 0, 1, 2):
        run.complete((0, number))
        run.give()
    assert run.reduces == []

    run.complete((0, 4))

    assert [each.inputs for each in run.reduces] == [((0, 0), (0, 1)), ((0, 2), (0, 3)), ((0, 4),)]


def test_final_reduce_runs_with_a_warning_when_levels_are_at_the_cap() -> None:
    """S-MR-44, S-MR-45: the warning has cap, sum and budget."""
    run = Feed(rules=by_budget(100, max_levels=1), items=3).play(weighing(60, 60, 60, reduced=77))

    assert [(each.level, each.is_final) for each in run.reduces] == [(1, False)] * 3 + [(2, True)]
    (warning,) = run.all(Warn)
    assert all(number in warning.text for number in (" 1 ", " 231 ", " 100;"))
    assert run.ends == [COMPLETED]


def test_oversized_output_is_reduced_up_to_the_cap_when_it_stays_so() -> None:
    """S-MR-46, S-MR-71: each time with the warning; at the cap the one of S-MR-44."""
    run = Feed(rules=by_budget(100, max_levels=3), items=1).play(lambda work: 101 + work[0])

    assert [each.level for each in run.reduces] == [1, 2, 3, 4]
    assert run.all(WarnOversized) == [WarnOversized(output=(n, 0), tokens=101 + n, budget_tokens=100) for n in range(3)]
    assert len(run.all(Warn)) == 1


def test_oversized_output_goes_on_like_others_when_its_reduce_is_small() -> None:
    """S-MR-46, S-MR-71: nothing is dropped."""
    run = Feed(rules=by_budget(100), items=3).play(weighing(150, 50, 50, reduced=10))

    assert run.reduces[0].inputs == ((0, 0),)
    assert run.tree == ((0,), (1, 2))
    assert run.all(WarnOversized) == [WarnOversized(output=(0, 0), tokens=150, budget_tokens=100)]


# Pipelined.


def test_reduce_starts_while_maps_run_when_the_pool_is_full() -> None:
    """S-MR-111: the oldest outputs, in order of arrival."""
    run = Feed(rules=by_chunk(2, is_pipelined=True), items=9).begin()
    run.complete((0, 3))
    run.complete((0, 1))
    assert run.reduces == []  # the pool does not weigh more than the capacity

    run.complete((0, 2))

    assert run.reduces == [ReduceGroup(level=1, number=0, inputs=((0, 3), (0, 1)))]
    assert (0, 0) in run.running


def test_reduce_is_one_level_above_its_highest_input_when_levels_mix() -> None:
    """S-MR-111, S-MR-112: what is left of the maps goes up to the reduces when the last map is there."""
    run = Feed(rules=by_chunk(2, is_pipelined=True, window=3), items=4).begin()
    run.complete((0, 0))
    run.give()
    run.complete((0, 1))
    run.complete((0, 2))
    assert run.reduces == [ReduceGroup(level=1, number=0, inputs=((0, 0), (0, 1)))]
    run.complete((1, 0))

    run.complete((0, 3))

    assert run.reduces[1:] == [ReduceGroup(level=2, number=0, inputs=((1, 0), (0, 2)))]
    run.complete((2, 0))
    assert run.reduces[2:] == [final(3, (0, 3), (2, 0))]
    run.complete((3, 0))
    assert run.ends == [COMPLETED]


def test_pool_is_final_when_all_of_it_fits() -> None:
    """S-MR-111: no level between."""
    run = Feed(rules=by_budget(100, is_pipelined=True), items=3).play(weighing(50, 20, 30))

    assert run.reduces == [final(1, (0, 0), (0, 1), (0, 2))]


@pytest.mark.parametrize("is_ordered", [False, True])
def test_growing_outputs_end_at_the_cap_when_pipelined(is_ordered: bool) -> None:  # noqa: FBT001  a parameter
    """S-MR-112: with the warning of S-MR-44, whatever the final reduce weighs."""
    rules = by_budget(10, max_levels=3, is_pipelined=True, is_ordered=is_ordered)
    run = Feed(rules=rules, items=8).play(lambda work: 6 + 2 * work[0])

    assert run.ends == [COMPLETED]
    assert max(each.level for each in run.reduces) == 4
    assert {3} <= {level for level, _ in run.reduces[-1].inputs} <= ({3} if is_ordered else {0, 1, 2, 3})
    assert len(run.all(Warn)) == 1


def test_oversized_output_has_its_own_group_when_pipelined() -> None:
    """S-MR-71, S-MR-111: it starts at once, and what was before it waits for more."""
    run = Feed(rules=by_budget(100, is_pipelined=True), items=4).begin()
    run.complete((0, 0), 10)

    run.complete((0, 1), 101)

    assert [each.inputs for each in run.reduces] == [((0, 1),)]
    assert run.all(WarnOversized) == [WarnOversized(output=(0, 1), tokens=101, budget_tokens=100)]


def test_groups_follow_the_items_when_ordered() -> None:
    """S-MR-113: a group is closed when the next output would be too much, however early others came."""
    run = Feed(rules=by_budget(100, is_pipelined=True, is_ordered=True), items=5).begin()
    run.complete((0, 3), 70)
    run.complete((0, 1), 50)
    run.complete((0, 2), 60)
    assert run.reduces == []

    run.complete((0, 0), 40)

    assert [each.inputs for each in run.reduces] == [((0, 0), (0, 1)), ((0, 2),)]
    run.give()
    run.complete((0, 4), 30)
    assert [each.inputs for each in run.reduces[2:]] == [((0, 3), (0, 4))]  # the level's last is closed as it ends


def test_one_group_is_final_when_an_ordered_level_is_complete() -> None:
    """S-MR-113: and one output that is too heavy alone is told so."""
    run = Feed(rules=by_budget(100, is_pipelined=True, is_ordered=True), items=1).play(weighing(150))

    assert run.reduces == [final(1, (0, 0))]
    assert run.all(WarnOversized) == [WarnOversized(output=(0, 0), tokens=150, budget_tokens=100)]


# Size.


@pytest.mark.parametrize(
    "order",
    [
        {},
        pytest.param({"is_pipelined": True}, marks=pytest.mark.heavy),
        pytest.param({"is_pipelined": True, "is_ordered": True}, marks=pytest.mark.heavy),
    ],
)
@pytest.mark.parametrize("rules", [by_chunk, by_budget])
def test_machine_is_small_when_items_are_many(rules: Callable[..., MapReduceRules], order: dict[str, bool]) -> None:
    """S-MR-132: between any two calls it keeps at most 40 bytes for an item."""
    items = 800
    chance = random.Random(7)  # noqa: S311  a seeded order
    machine = MapReduceMachine(rules(20, window=4, **order), name_of)
    running: list[Work] = []
    given = steps = most = 0
    tracemalloc.start()
    try:
        wanted = machine.handle(BEGUN)
        while not machine.is_ended:
            for each in wanted:
                if isinstance(each, Start) and isinstance(each.changes, MapItem):
                    running.append((0, each.changes.number))
                elif isinstance(each, Start) and isinstance(each.changes, ReduceGroup):
                    running.append((each.changes.level, each.changes.number))
            questions = [each.question for each in wanted if isinstance(each, Evaluate)]
            pulls = [each.count for each in questions if isinstance(each, PullItems)]
            if pulls:
                count = min(pulls[0], items - given)
                given += count
                wanted = machine.handle(pulled(count, is_exhausted=given == items))
            else:
                level, number = running.pop(chance.randrange(len(running)) if running[0] != (0, 0) else -1)
                wanted = machine.handle(completed((level, number), 4))
            steps += 1
            if steps % 20 == 0 or len(wanted) > 1:
                most = max(most, tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert most <= 40 * items, most / items
