"""The judge of map-reduces: each thing that may go wrong in a tree, or in the files beside it, is found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from tests.chaos.audit import answers_in
from tests.chaos.audit_map_reduce import judge_files, judge_map_reduce, judge_marks
from tests.chaos.world import key_of

RUN = "r"


def fact(kind: str, name: str, **data: object) -> Fact:
    """A fact without number and time."""
    return read_fact(run=RUN, kind=kind, name=name if kind == "items" else f"{name}#0", at=1.0, data=data)


def gave(key: str) -> Fact:
    """A task's output."""
    return fact("output", key, output={"raw": f"<<{key}>>"})


def group(key: str, *inputs: str) -> Fact:
    """What comes together."""
    return fact("group", key, inputs=list(inputs))


def row(index: int) -> Mapping[str, Any]:
    """An item's row."""
    return {"index": index, "raw": f"<<map-{index}>>"}


def letter(index: int, attempts: int = 1) -> Mapping[str, Any]:
    """A failed item."""
    return {"index": index, "attempts": attempts}


PULLED = fact("items", "run", first=0, digests=["", "", "", ""])
FAILED = fact("task_failed", "map-3")
MAPS = [PULLED, gave("map-0"), gave("map-1"), gave("map-2"), FAILED]
REDUCED = [group("reduce-1-0", "map-0", "map-1"), gave("reduce-1-0")]
FINAL = [group("final-reduce", "reduce-1-0", "map-2"), gave("final-reduce")]
WHOLE = [*MAPS, *REDUCED, *FINAL]
ROWS = [row(0), row(1), row(2)]
LETTERS = [letter(3)]


def test_nothing_is_found_when_a_tree_is_whole() -> None:
    """S-MR-161: a group that is recorded again as it was is no mistake; neither is a run without items."""
    again = [*MAPS, REDUCED[0], *REDUCED, *FINAL]
    assert judge_map_reduce(WHOLE, ROWS, LETTERS) == []
    assert judge_map_reduce(again, ROWS, LETTERS) == []
    assert judge_map_reduce([gave("s0")], [], []) == []


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        pytest.param([*MAPS, *REDUCED, group("final-reduce", "reduce-1-0"), FINAL[1]], "in 0 groups", id="left out"),
        pytest.param([*WHOLE, group("reduce-1-1", "map-2"), gave("reduce-1-1")], "in 2 groups", id="in two groups"),
        pytest.param([*WHOLE, group("reduce-1-0", "map-0", "map-2")], "recorded as another group", id="changed"),
        pytest.param([*MAPS[:2], REDUCED[0], *MAPS[2:], REDUCED[1], *FINAL], "was grouped before", id="early"),
        pytest.param([*MAPS, *reversed(REDUCED), *FINAL], "recorded before its group", id="group late"),
        pytest.param([*WHOLE, group("reduce-1-7", "map-3")], "has no output", id="a failed one"),
        pytest.param(WHOLE[:-1], "there is no last output", id="no end"),
        pytest.param([*WHOLE[:-1], WHOLE[-1], PULLED], "is recorded 2 times", id="an item twice"),
        pytest.param([*WHOLE, fact("task_failed", "map-2")], "has an output and failed", id="both"),
        pytest.param([*WHOLE, fact("task_failed", "map-9")], "and its item is not", id="no such item"),
    ],
)
def test_what_is_wrong_with_a_tree_is_found(facts: Sequence[Fact], expected: str) -> None:
    """S-MR-161: each output in one group, which is on record before its reduce and stays what it was."""
    assert any(expected in each for each in judge_map_reduce(facts, ROWS, LETTERS))


@pytest.mark.parametrize(
    ("rows", "letters", "expected"),
    [
        pytest.param([*ROWS, row(1)], LETTERS, "item 1 has 2 rows", id="two rows"),
        pytest.param(ROWS, LETTERS * 2, "item 3 has 2 dead letters", id="two letters"),
        pytest.param(ROWS[:2], LETTERS, "an output and no row", id="no row"),
        pytest.param(ROWS, [], "neither output nor dead letter", id="no letter"),
        pytest.param(ROWS, [*LETTERS, letter(2)], "an output and a dead letter", id="both"),
        pytest.param([*ROWS[:2], {**row(2), "raw": "x"}], LETTERS, "not the recorded output", id="another text"),
        pytest.param([*ROWS, row(3)], [], "its output is not recorded", id="a row too many"),
        pytest.param(ROWS, [*LETTERS, letter(8, 0)], "was never pulled", id="a letter too many"),
    ],
)
def test_what_is_wrong_with_files_is_found(
    rows: Sequence[Mapping[str, Any]], letters: Sequence[Mapping[str, Any]], expected: str
) -> None:
    """S-MR-130, S-MR-151: one row for each output, one line for each failed item."""
    assert any(expected in each for each in judge_map_reduce(WHOLE, rows, letters))


def test_what_stands_in_a_file_before_its_record_is_found() -> None:
    """S-MR-130, S-MR-151: a kill between the two would leave a row of something that is done again."""
    assert judge_files(MAPS, ROWS, LETTERS) == []
    assert judge_files(MAPS[:3], ROWS, LETTERS) == [
        "item 2 has a row, and its output is not recorded",
        "item 3 has a dead letter, and its failure is not recorded",
    ]


def test_marks_that_are_missing_or_there_twice_are_found() -> None:
    """S-MR-161: the last answer is made of every output of an item, once."""
    assert judge_marks("<<map-0>> <<map-1>> <<map-2>>", ROWS) == []
    assert len(judge_marks("<<map-0>> <<map-1>>", ROWS)) == 1
    assert len(judge_marks("<<map-0>> <<map-1>> <<map-2>> <<map-1>>", ROWS)) == 1


def test_a_call_that_was_refused_counts_as_answered_when_its_task_failed() -> None:
    """S-MR-163: a failed map is not tried again."""
    told = [fact("task_failed", "map-3"), read_fact(run=RUN, kind="model", name="map-3#0/0/model", at=1.0, data={})]
    assert key_of(RUN, "map-3#0/1/model") in answers_in(RUN, told)
