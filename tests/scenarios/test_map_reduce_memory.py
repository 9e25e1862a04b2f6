"""What a map-reduce keeps in memory of the items that are done."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from ensemble_ray import Task, TaskOutput, TaskTrace
from tests.scenarios.mapping import mapping


@pytest.fixture
def fresh() -> Iterator[None]:
    """Only what is made from now on is collected and counted: a process of many tests holds millions of values."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("fresh")
def test_memory_does_not_grow_with_items() -> None:
    """S-MR-132: bodies and items are not kept; at most 200 bytes stay for each."""

    async def say(_context: object) -> str:
        return "x" * 100_000

    def making(item: object) -> Task:
        return Task(description=f"map {item}", expected_output="e", handler=say)

    def values() -> int:
        """Values of runs; nothing is asked what it is, since some objects answer by loading more."""
        gc.collect()
        return sum(type(each) in {Task, TaskOutput, TaskTrace} for each in gc.get_objects())

    def held(count: int) -> tuple[int, int]:
        """Bytes and values that a run leaves, as long as its output is held."""
        before = values()
        tracemalloc.start()
        output = mapping(iter(range(count)), map_task=making, durability="off").run(runtime="inline")
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert len(output.task_outputs) == count
        return left, values() - before

    held(10)  # what is made once
    few, many = held(50), held(350)  # both have more than the 8 MiB that a spool keeps in memory
    assert (many[0] - few[0]) / 300 < 200
    assert many[1] < 10  # others of this process may have gone meanwhile, none of its 1,050 stayed
