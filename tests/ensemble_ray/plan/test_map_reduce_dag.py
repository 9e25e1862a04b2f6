"""The tree of a static map-reduce: its shapes, its links, and what factories may give."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray import Agent, Task, ValidationError
from ensemble_ray.definition.map_reduce import MapReduceDefinition
from ensemble_ray.plan.map_reduce_factories import FINAL, MAP, REDUCE, StaticTree, static_tree
from ensemble_ray.testing import ScriptedModel

SPEC = Path(__file__).parents[3] / "docs/spec/23-map-reduce.md"
MODEL = ScriptedModel()


def map_task(item: object) -> Task:
    """The task of an item."""
    return Task.of(f"map {item}")


def reduce_task(chunk: list[Task]) -> Task:
    """The task over a group."""
    return Task(description="reduce", expected_output="e", context=chunk)


def tree_of(count: int, size: int) -> StaticTree:
    """The tree over so many items, in groups of that size."""
    return static_tree(
        MapReduceDefinition(items=range(count), map_task=map_task, reduce_task=reduce_task, chunk_size=size)
    )


def shapes() -> Iterator[tuple[int, int, list[int], int, int, int, int]]:
    """The rows of the specification's table."""
    table = SPEC.read_text(encoding="utf-8").partition("| N | K |")[2].partition("\n## ")[0]
    for line in table.splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 7:
            numbers = [[int(number) for number in re.findall(r"\d+", cell)] for cell in cells]
            n, k, levels, reduces, total, last = (numbers[place][0] for place in (0, 1, 3, 4, 5, 6))
            yield n, k, numbers[2], levels, reduces, total, last


ROWS = list(shapes())


@pytest.mark.parametrize("row", ROWS)
def test_tree_has_the_shape_of_the_table(row: tuple[int, int, list[int], int, int, int, int]) -> None:
    """S-MR-31, S-MR-32: every row of the table of shapes."""
    n, k, between, levels, reduces, total, last = row
    tree = tree_of(n, k)
    sizes = Counter(tree.levels.values())
    assert [sizes[level] for level in range(1, max(sizes))] == between
    assert (len(sizes), len(tree.tasks) - n, len(tree.tasks)) == (levels, reduces, total)
    assert len(tree.tasks[-1].context) == last


def test_table_was_read() -> None:
    """The rows above are those of the specification."""
    assert len(ROWS) == 21
    assert (126, 5, [26, 6, 2], 5, 35, 161, 2) in ROWS


@pytest.mark.heavy
@settings(max_examples=30)
@given(count=st.integers(1, 400), size=st.integers(2, 12))
def test_every_task_is_in_exactly_one_group_and_groups_are_in_order(count: int, size: int) -> None:
    """S-MR-30 to S-MR-33: no group is too large, nothing is lost or used twice, and the order of items is kept."""
    tree = tree_of(count, size)
    levels = [
        [task for task in tree.tasks if tree.levels[task] == level] for level in range(tree.levels[tree.tasks[-1]] + 1)
    ]
    assert [task for level in levels for task in level] == list(tree.tasks)
    assert [task.description for task in levels[0]] == [f"map {item}" for item in range(count)]
    assert not any(task.context for task in levels[0])
    for lower, upper in pairwise(levels):
        assert [entry for task in upper for entry in task.context] == lower
        assert all(len(task.context) == size for task in upper[:-1])
        assert 1 <= len(upper[-1].context) <= size
    types = [tree.node_types[task] for task in tree.tasks]
    assert types == [MAP] * count + [REDUCE] * (len(types) - count - 1) + [FINAL]


def test_group_of_one_gets_its_own_reduce_task() -> None:
    """S-MR-33: the last of three groups of 7 items."""
    tree = tree_of(7, 3)
    assert [len(task.context) for task in tree.tasks[7:]] == [3, 3, 1, 3]


def test_factories_are_called_once_per_task_with_what_their_side_wants() -> None:
    """S-MR-2, S-MR-34: `map_agent` per item, `reduce_agent` per reduce task, the final one included."""
    calls: list[str] = []

    def agent_of(item: object) -> Agent:
        calls.append(f"agent {item}")
        return Agent(role=f"Mapper {item}", goal="g", llm=MODEL)

    def task_of(item: object, agent: Agent) -> Task:
        calls.append(f"task {item} {agent.role}")
        return Task(description=f"map {item}", expected_output="e", agent=agent)

    def reducer() -> Agent:
        calls.append("reducer")
        return Agent(role="Reducer", goal="g", llm=MODEL)

    def reduced(chunk: list[Task], agent: Agent) -> Task:
        calls.append(f"{agent.role} {len(chunk)}")
        return reduce_task(chunk)

    tree = static_tree(
        MapReduceDefinition(
            items=["a", "b", "c"],
            map_agent=agent_of,
            map_task=task_of,
            reduce_agent=reducer,
            reduce_task=reduced,
            chunk_size=2,
        )
    )
    assert calls[:2] == ["agent a", "task a Mapper a"]
    assert calls.count("reducer") == len(tree.tasks) - 3
    assert tree.tasks[-1].agent is not None
    assert tree.tasks[-1].agent.role == "Reducer"


def test_tree_is_refused_when_a_reduce_task_lacks_a_part_of_its_group() -> None:
    """S-MR-24: by identity, naming the reduce task's description."""

    def forgets(chunk: list[Task]) -> Task:
        return Task(description="Join them", expected_output="e", context=[*chunk[:-1], Task.of("map 1")])

    with pytest.raises(ValidationError, match=r"^Reduce task 'Join them' lacks 1 of the 2 tasks .* 'map 1'"):
        static_tree(MapReduceDefinition(items=[0, 1], map_task=map_task, reduce_task=forgets))


def test_tree_is_refused_when_a_factory_gives_the_same_task_again() -> None:
    """S-MR-30: N items are N tasks."""
    same = Task.of("always")

    def always(_: object) -> Task:
        return same

    with pytest.raises(ValidationError, match=r"^map_task must make a new Task at each call.*'always'"):
        static_tree(MapReduceDefinition(items=[0, 1], map_task=always, reduce_task=reduce_task))
