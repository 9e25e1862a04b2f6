"""Map-reduce that goes on from a record: recorded groups are made again, whatever else would have been made."""

from __future__ import annotations

import pytest

from ensemble_ray.schedule.instructions import End, ReduceGroup, WarnLeftOut
from ensemble_ray.schedule.map_reduce import MapReduceMachine
from ensemble_ray.schedule.map_reduce_groups import MapReduceRules
from tests.ensemble_ray.schedule.feeding import Feed, Work, by_budget, by_chunk, left_out, name_of

LEVELS: dict[str, bool] = {}
POOL = {"is_pipelined": True}
ORDERED = {"is_pipelined": True, "is_ordered": True}


def group(level: int, number: int, *inputs: Work, is_final: bool = False) -> ReduceGroup:
    """A group as the record has it."""
    return ReduceGroup(level=level, number=number, inputs=inputs, is_final=is_final)


def test_groups_are_those_of_the_record_when_outputs_come_in_another_order() -> None:
    """S-MR-161: pipelined, the first run had 0, 3 and 1, 2 together."""
    recorded = [group(1, 0, (0, 3), (0, 0)), group(1, 1, (0, 1), (0, 2))]
    run = Feed(rules=by_chunk(2, **POOL), items=8, recorded=recorded).begin()
    run.complete((0, 0))
    run.give()
    run.complete((0, 1))
    run.give()
    run.complete((0, 2))
    assert run.reduces == recorded[1:]  # it has all that it needs

    run.complete((0, 3))

    assert run.reduces == [*reversed(recorded)]
    for number in (4, 5, 6):
        run.give()
        run.complete((0, number))
    assert run.reduces[2:] == [group(1, 2, (0, 4), (0, 5))]  # others follow in number


@pytest.mark.parametrize("order", [LEVELS, POOL, ORDERED])
def test_recorded_groups_are_kept_when_outputs_weigh_other_than_they_did(order: dict[str, bool]) -> None:
    """S-MR-161: with an estimator that was changed, all would fit the final reduce now."""
    recorded = [group(1, 0, (0, 0), (0, 1))]
    run = Feed(rules=by_budget(100, **order), items=4, recorded=recorded).play()

    assert recorded[0] in run.reduces
    levels = {level for each in run.reduces if each.is_final for level, _ in each.inputs}
    assert levels == ({0, 1} if order == POOL else {1})
    assert sorted(each for reduce in run.reduces for each in reduce.inputs if not each[0]) == [(0, n) for n in range(4)]


@pytest.mark.parametrize("order", [LEVELS, POOL, ORDERED])
def test_final_reduce_is_that_of_the_record_when_it_had_begun(order: dict[str, bool]) -> None:
    """S-MR-161: with its inputs in their order, though now they weigh more than the budget."""
    recorded = [group(1, 0, (0, 2), (0, 0), (0, 1), is_final=True)]
    run = Feed(rules=by_budget(2, **order), items=3, recorded=recorded).play()

    assert run.reduces == recorded


@pytest.mark.parametrize("order", [LEVELS, POOL, ORDERED])
def test_others_make_the_recorded_group_when_one_of_its_inputs_fails_now(order: dict[str, bool]) -> None:
    """S-MR-161: nothing waits for ever for an output that was lost with its file."""
    recorded = [group(1, 0, (0, 0), (0, 1)), group(1, 1, (0, 2), (0, 3))]
    run = Feed(rules=by_chunk(2, **order), items=4, recorded=recorded).play(failing={(0, 1)})

    assert sorted(each.inputs for each in run.reduces[:2]) == [((0, 0),), ((0, 2), (0, 3))]
    assert run.all(WarnLeftOut) == [left_out(0, 1)]
    assert run.tree in {((0,), (2, 3)), ((2, 3), (0,))}


@pytest.mark.parametrize("order", [LEVELS, POOL, ORDERED])
def test_recorded_group_is_not_made_when_all_of_its_inputs_fail_now(order: dict[str, bool]) -> None:
    """S-MR-161: nor is one above it that has no other input."""
    recorded = [group(1, 0, (0, 0), (0, 1)), group(1, 1, (0, 2), (0, 3)), group(1, 2, (0, 4))]
    recorded += [group(2, 0, (1, 0)), group(2, 1, (1, 1), (1, 2))]
    run = Feed(rules=by_chunk(2, **order), items=5, recorded=recorded).play(failing={(0, 0), (0, 1)})

    assert [each.number for each in run.reduces] in ([1, 2, 1, 0], [2, 1, 1, 0])
    assert run.tree == (((2, 3), (4,)),)
    assert [end.failure for end in run.ends] == [""]


@pytest.mark.parametrize("order", [LEVELS, POOL, ORDERED])
def test_run_ends_when_the_source_has_fewer_items_than_the_record(order: dict[str, bool]) -> None:
    """S-MR-162: who feeds the machine refuses that; the machine does not hang by it."""
    recorded = [group(1, 0, (0, 0), (0, 5)), group(1, 1, (0, 6), (0, 7))]
    run = Feed(rules=by_chunk(2, **order), items=3, recorded=recorded).play()

    assert len(run.ends) == 1
    assert run.reduces[0] == group(1, 0, (0, 0))


def test_new_outputs_follow_the_recorded_ones_when_a_failed_map_is_tried_again() -> None:
    """S-MR-163: the map that ended the run completes now."""
    recorded = [group(1, 0, (0, 0), (0, 2))]
    run = Feed(rules=by_chunk(2, fails=True, **POOL), items=4, recorded=recorded).play()

    assert run.tree == ((0, 2), (1, 3))
    assert [end.failure for end in run.ends] == [""]


@pytest.mark.parametrize(
    ("recorded", "rules", "text"),
    [
        ([group(1, 1, (0, 0))], by_chunk(2), "group 1-1: the next number on that level is 0"),
        ([group(2, 0, (0, 0))], by_chunk(2), "group 2-0 is not one level above its inputs"),
        ([group(1, 0)], by_chunk(2), "group 1-0 is not one level above its inputs"),
        ([group(2, 0, (1, 0))], by_chunk(2), "group 2-0 has the input 1-0, which no group before it is"),
        ([group(1, 0, (0, 1)), group(1, 1, (0, 1))], by_chunk(2), "1-1 has the input 0-1, which an earlier one has"),
        ([group(1, 0, (0, 0), is_final=True), group(1, 0, (0, 1))], by_chunk(2), "group 1-0 follows the final one"),
        ([group(1, 0, (0, 0)), group(2, 0, (1, 0), (0, 1))], by_chunk(2), "are of a pipelined run"),
    ],
)
def test_record_is_refused_when_its_groups_contradict_each_other(
    recorded: list[ReduceGroup], rules: MapReduceRules, text: str
) -> None:
    """S-MR-161: a group has what the machine would have made, no output is in two."""
    with pytest.raises(ValueError, match=text):
        MapReduceMachine(rules, name_of, recorded)


def test_end_is_the_same_when_everything_is_in_the_record() -> None:
    """S-MR-161: nothing is made but what was."""
    first = Feed(rules=by_chunk(2, **POOL), items=9).play(choose=lambda running: len(running) - 1)
    again = Feed(rules=by_chunk(2, **POOL), items=9, recorded=first.reduces).play()

    def by_name(each: ReduceGroup) -> tuple[int, int]:
        return each.level, each.number

    assert sorted(again.reduces, key=by_name) == sorted(first.reduces, key=by_name)
    assert again.all(End) == first.all(End)
