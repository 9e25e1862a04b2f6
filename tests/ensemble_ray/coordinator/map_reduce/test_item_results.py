"""What hears of a map-reduce's items: files that cannot be written, readers that are slow, the short-circuit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ensemble_ray import IllegalStateError, RecordError, TaskOutput
from ensemble_ray.items.results import ResultsFile
from ensemble_ray.runs.map_reduce.items import ItemLog, ItemResultWriter
from ensemble_ray.runs.map_reduce.outputs import MapReduceOutputs
from tests.ensemble_ray.coordinator.map_reduce.outputs import output


def log_of(*outputs: TaskOutput) -> ItemLog:
    """A log of maps that are done."""
    store = MapReduceOutputs(keeps_items=True)
    log = ItemLog(store)
    log.window = 2
    for number, each in enumerate(outputs):
        store.keep(0, number, each, "map", item=number)
    return log


async def test_rows_that_cannot_be_written_are_told_of_at_the_end(tmp_path: Path) -> None:
    """S-MR-130: also where the run has nothing more to do, so that nobody else would tell."""
    done = output("a")
    results = await ResultsFile.open(tmp_path / "results.jsonl", is_resumed=False)
    errors: list[BaseException] = []
    watch = ItemResultWriter(log_of(done), results=results)
    watch.on_error = errors.append
    await results.close()  # as a disk that is gone
    watch.write_output(0, 0, 0, done)
    with pytest.raises(IllegalStateError, match="is closed") as caught:
        await watch.close()
    assert errors == [caught.value]


async def test_short_circuit_is_no_items_result(tmp_path: Path) -> None:
    """S-MR-82."""
    log = log_of(output("a"))
    watch = ItemResultWriter(log, is_direct=True)
    watch.write_output(0, 0, ["all"], output("a"))
    watch.write_failure(0, ["all"], RecordError("no"), 1)
    await watch.close()
    assert list(log.failed_items) == []
    assert await log.come(1, 0) == 0


async def test_room_is_what_the_slowest_reader_leaves() -> None:
    """S-MR-131: results that wait and items that are in flight together are never more than the window."""
    log = log_of(output("a"), output("b"))
    watch = ItemResultWriter(log)
    assert await watch.free_slots(lambda: 0) == 2
    watch.write_output(0, 0, 0, output("a"))
    assert await log.come(1, 0) == 1  # it is at work on the first one
    assert await watch.free_slots(lambda: 0) == 1
    watch.write_output(1, 1, 1, output("b"))
    waiting = asyncio.create_task(watch.free_slots(lambda: 0))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert await log.come(1, 1) == 2
    assert await waiting == 1
    await log.detach(1)
    assert await watch.free_slots(lambda: 0) == 2


async def test_reader_is_told_of_a_part_of_the_window_at_a_time() -> None:
    """S-MR-131: what it has not asked beyond waits for it, and counts."""
    outputs = [output(str(number)) for number in range(40)]
    log = log_of(*outputs)
    log.window = 80
    for number in range(40):
        log.add_output(number, number)
    assert await log.come(1, 0) == 10
    assert log.result(9).index == 9
    assert await log.free_slots(lambda: 0) == 40
    assert await log.come(1, 10) == 20
    assert await log.free_slots(lambda: 0) == 50
    log.window = 1000
    assert await log.come(1, 0) == 32


def test_all_results_are_read_in_their_order_when_they_come_in_parts() -> None:
    """S-MR-131: from a thread and from another loop."""
    outputs = [output(str(number)) for number in range(40)]
    log = log_of(*outputs)
    log.window = 80
    for number in reversed(range(40)):
        log.add_output(number, number)
    log.close()

    async def read() -> list[int]:
        return [result.index async for result in log.stream()]

    assert [result.index for result in log.stream()] == list(reversed(range(40)))
    assert asyncio.run(read()) == list(reversed(range(40)))


def test_only_failures_are_kept_where_nobody_reads() -> None:
    """S-MR-132, S-MR-150: `run` gives the output alone; each number that is kept counts, with a hundred thousand items."""
    log = ItemLog(MapReduceOutputs(), is_read=False)
    log.add_output(0, 0)
    log.add_failure(1, "item", ValueError("no"), 1)
    log.close()
    assert [failed.index for failed in log.failed_items] == [1]
    assert list(log.stream()) == []


async def test_rows_of_a_run_that_is_broken_off_stay_lines(tmp_path: Path) -> None:
    """S-MR-130: another process may have the run by then, and write to them."""
    path = tmp_path / "results.parquet"
    done = output("a")
    for error in (RecordError("no"), None):
        results = await ResultsFile.open(path, is_resumed=error is None)
        watch = ItemResultWriter(log_of(done), results=results)
        watch.write_output(0, 0, 0, done)
        await watch.detach(type(error), error, None)
        assert path.exists() is (error is None)
        assert (tmp_path / "results.parquet.rows.jsonl").exists() is (error is not None)
