"""Real Ray Datasets as items: of a map-reduce in Python, and of a served one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import MapEnsemble, Task, ValidationError, resume
from ensemble_ray.serve.catalog import DatasetCatalog
from ensemble_ray.serve.schemas import NewRun
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.scenarios.mapping import Held, answer, mapping, raws
from tests.serve.driving import driven

#: Rows of a Dataset.
_ROWS = 100


def map_row(row: dict[str, int]) -> Task:
    """The task of a row."""
    return Task.of(f"map {row['n']}")


def rows_of(numbers: Iterable[int]) -> Any:  # Ray's classes have no types
    """Return a Dataset of two blocks that are in the cluster, so that no process reads them from files."""
    import ray.data

    found: Any = ray.data.from_items([{"n": number} for number in numbers], override_num_blocks=2)
    found.context.enable_progress_bars = False
    found.context.execution_options.preserve_order = True
    return found


@pytest.fixture
def dataset(ray_cluster: str) -> Any:
    """A Dataset whose rows come in their order."""
    del ray_cluster
    return rows_of(range(_ROWS))


def over(items: object, **fields: Any) -> MapEnsemble:
    """A map over rows."""
    return mapping(items, map_task=map_row, **fields)


def test_rows_of_files_are_items_in_their_order(ray_cluster: str, tmp_path: Path) -> None:
    """S-MR-120, S-MR-127: every row once, in each run of the same ensemble, on the cluster that the Dataset lives in."""
    del ray_cluster
    import pyarrow as pa
    import ray.data
    from pyarrow import parquet

    for file, numbers in enumerate((range(_ROWS // 2), range(_ROWS // 2, _ROWS))):
        parquet.write_table(pa.table({"n": list(numbers)}), tmp_path / f"{file}.parquet")
    found: Any = ray.data.read_parquet(str(tmp_path))  # type: ignore[no-untyped-call, unused-ignore]
    found.context.enable_progress_bars = False
    found.context.execution_options.preserve_order = True
    ensemble = over(found)
    assert raws(ensemble.run(runtime="inline")) == [str(n) for n in range(_ROWS)]
    assert len(ensemble.run(runtime="inline").task_outputs) == _ROWS


def test_rows_are_read_as_they_are_mapped(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """S-MR-127, S-MR-121: never more than the window ahead, so the Dataset is not held."""
    read: list[int] = []
    ahead: list[int] = []
    rows = dataset.iter_rows

    def counted() -> Any:
        for row in rows():
            read.append(row["n"])
            yield row

    async def entry(asked: ScriptedCall) -> object:
        ahead.append(len(read) - len(ahead))
        await asyncio.sleep(0)
        return answer(asked)

    monkeypatch.setattr(dataset, "iter_rows", counted)
    over(dataset, llm=ScriptedModel(otherwise=entry), max_parallel_tasks=4).run(runtime="inline")
    assert len(read) == _ROWS
    assert max(ahead) <= 4


def test_run_over_a_dataset_goes_on_where_it_was_cut(dataset: Any) -> None:
    """S-MR-127, S-MR-161: its rows are read again from the first, and no recorded one is asked again."""
    cut = Held("map 30 ")
    ensemble = over(dataset, llm=cut.llm, max_parallel_tasks=1)
    cut.cut(ensemble, "cut", 30)
    assert raws(resume("cut", ensemble, runtime="inline")) == [str(n) for n in range(_ROWS)]
    assert len(cut.asked_since) == _ROWS - 30


def test_resume_says_what_keeps_the_order_when_rows_come_in_another(dataset: Any) -> None:
    """S-MR-128, S-MR-162: before any model call for it."""
    cut = Held("map 30 ")
    cut.cut(over(dataset, llm=cut.llm, max_parallel_tasks=1), "cut", 30)
    turned = rows_of(reversed(range(_ROWS)))
    with pytest.raises(ValidationError, match=r"items changed: item 0 .*execution_options.preserve_order is True"):
        resume("cut", over(turned, llm=cut.llm), runtime="inline")
    assert cut.asked_since == []
    with pytest.raises(ValidationError, match=r"the source has 3\. .*preserve_order"):
        resume("cut", over(rows_of(range(3)), llm=cut.llm), runtime="inline")


@pytest.mark.parametrize("made", [lambda dataset: dataset, lambda dataset: lambda: dataset])
async def test_a_served_map_reduce_maps_a_dataset(dataset: Any, made: Callable[[Any], object]) -> None:
    """S-SRV-54: of the operator's, by its name; its order is kept without being asked for."""
    dataset.context.execution_options.preserve_order = False
    catalog = DatasetCatalog({"numbers": made(dataset)})
    async with driven(over([0]), datasets=catalog) as runs:
        taken = await runs.start(NewRun.model_validate({"items": {"dataset": "numbers"}}))
        found = await runs.wait(taken.run_id, 120)
    assert found.result is not None
    assert [each.text for each in found.result.tasks] == [str(n) for n in range(_ROWS)]
    assert dataset.context.execution_options.preserve_order
