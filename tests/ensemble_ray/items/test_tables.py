"""Tables of other libraries as items: rows, and never the names of their columns."""

import datetime as dt
import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from ensemble_ray import ValidationError
from ensemble_ray.items.sources import NO_ITEMS, source_of
from tests.ensemble_ray.items.reading import entries_of

ROWS = [{"name": "Ada", "age": 36, "pay": 1.5}, {"name": None, "age": 41, "pay": None}]


def _of_library(module: str, name: str, **members: Any) -> Any:
    """Make an object of a class that looks like one of a library that is not installed here."""
    return type(name, (), {"__module__": module, **members})()


def _frame() -> pd.DataFrame:
    return pd.DataFrame({"name": ["Ada", None], "age": [36, 41], "pay": [1.5, float("nan")]}, index=[7, 8])


def _polars() -> Any:
    def iter_rows(_: object, *, named: bool = False) -> Iterator[object]:
        rows = [{**row, "pay": row["pay"] or float("nan")} for row in ROWS]
        return iter(rows if named else [tuple(row.values()) for row in rows])

    return _of_library("polars.dataframe.frame", "DataFrame", __len__=lambda _: 2, iter_rows=iter_rows)


def _hugging_face() -> Any:
    rows = [{**row, "age": np.int64(cast("int", row["age"]))} for row in ROWS]
    return _of_library("datasets.arrow_dataset", "Dataset", __len__=lambda _: 2, __iter__=lambda _: iter(rows))


@pytest.mark.parametrize(
    "items",
    [
        _frame(),
        _polars(),
        _hugging_face(),
        pa.Table.from_pandas(_frame(), preserve_index=False),
        pa.RecordBatch.from_pandas(_frame(), preserve_index=False),
    ],
    ids=lambda items: f"{type(items).__module__}.{type(items).__name__}",
)
async def test_rows_are_items_when_a_table_is_given(items: object) -> None:
    """S-MR-200, S-MR-201: dicts of Python's values, which JSON can carry, in every run; how many is known."""
    source = source_of(items)
    assert (source.count, source.is_list, source.is_one_shot) == (2, False, False)
    found = await entries_of(items)
    assert found == list(enumerate(ROWS))
    assert found == await entries_of(items)
    assert json.loads(json.dumps(found, allow_nan=False)) == [[0, ROWS[0]], [1, ROWS[1]]]


class _Geometries(pd.DataFrame):
    """A table of a library above pandas."""


async def test_rows_are_items_when_a_class_is_derived_from_a_table() -> None:
    """S-MR-200."""
    assert await entries_of(_Geometries({"a": [1]})) == [(0, {"a": 1})]


@pytest.mark.parametrize(
    ("items", "values"),
    [
        (pd.Series([1.5, float("nan")], name="pay"), [1.5, None]),
        (pd.Series(["a", None], dtype="string"), ["a", None]),
        (pd.Series([1, None], dtype="Int64"), [1, None]),
        (pd.Index(["a", "b"]), ["a", "b"]),
        (pa.array([1, None]), [1, None]),
        (pa.chunked_array([["a"], ["b"]]), ["a", "b"]),
        (np.array([1, 2]), [1, 2]),
        (np.array([1.5, np.nan]), [1.5, None]),
        (np.array(["a", "b"]), ["a", "b"]),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.array([(1, "x")], dtype=[("a", int), ("b", "U3")]), [{"a": 1, "b": "x"}]),
        (np.array(["2026-01-02", "NaT"], dtype="datetime64[ns]"), [dt.datetime(2026, 1, 2), None]),  # noqa: DTZ001
        (_of_library("polars.series.series", "Series", __iter__=lambda _: iter([1, None])), [1, None]),
    ],
)
async def test_values_are_items_when_a_column_is_given(items: object, values: list[object]) -> None:
    """S-MR-200, S-MR-201: of the types that Python has."""
    found = await entries_of(items)
    assert found == list(enumerate(values))
    assert [type(item) for _, item in cast("list[tuple[int, object]]", found)] == [type(value) for value in values]


async def test_values_are_pythons_when_cells_hold_what_libraries_have() -> None:
    """S-MR-201: what says that there is no value is None, inside lists and dicts too."""
    frame = pd.DataFrame(
        {
            "when": [pd.Timestamp("2026-01-02"), pd.NaT],
            "is_new": pd.array([True, None], dtype="boolean"),
            "list": [np.array([1.5, np.nan]), [np.float32(2)]],
            "dict": [{"a": np.int8(1)}, {"a": float("nan")}],
            "sum": [Decimal("1.10"), Decimal("NaN")],
            3: [np.str_("x"), (np.bool_(1),)],
        }
    )
    (_, first), (_, second) = cast("list[tuple[int, dict[object, Any]]]", await entries_of(frame))
    when = dt.datetime(2026, 1, 2)  # noqa: DTZ001
    assert first == {
        "when": when,
        "is_new": True,
        "list": [1.5, None],
        "dict": {"a": 1},
        "sum": Decimal("1.10"),
        3: "x",
    }
    assert second == {"when": None, "is_new": None, "list": [2.0], "dict": {"a": None}, "sum": None, 3: (True,)}
    assert [type(value) for value in (first["is_new"], first["dict"]["a"], first[3], second[3][0])] == [
        bool,
        int,
        str,
        bool,
    ]


async def test_rows_are_read_batch_by_batch_when_a_table_is_large() -> None:
    """S-MR-200: in order, and all of them."""
    values = list(range(1000))
    assert await entries_of(pa.table({"a": values}), 300) == [(each, {"a": each}) for each in values]
    assert await entries_of(np.array(values), 300) == [(each, each) for each in values]


def test_reader_is_refused_when_an_earlier_run_consumed_it() -> None:
    """S-MR-124: batches that come once are an iterator."""
    source = source_of(pa.table({"a": [1]}).to_reader())
    source.open()
    with pytest.raises(ValidationError, match="items is an iterator that an earlier run has consumed"):
        source.open()


class _Splits(dict[str, object]):
    """As `datasets` has it."""


_Splits.__module__, _Splits.__qualname__ = "datasets.dataset_dict", "DatasetDict"


@pytest.mark.parametrize(
    ("items", "told"),
    [
        (pd.DataFrame({"a": []}), NO_ITEMS),
        (np.array([]), NO_ITEMS),
        (
            pd.DataFrame([[1, 2]], columns=["a", "a"]),
            "items is a pandas.DataFrame that has the column 'a' twice: rename",
        ),
        (pa.table([[1], [2]], names=["a", "a"]), "items is a pyarrow.Table that has the column 'a' twice: rename"),
        (np.array(5), "items is a numpy.ndarray without dimensions: pass a list"),
        (_of_library("polars.lazyframe.frame", "LazyFrame"), r"items is a polars.LazyFrame: .* Pass frame.collect\(\)"),
        (_Splits(train=[1]), "items is a datasets.DatasetDict: it has several splits. Pass one of them"),
    ],
)
def test_table_is_refused_when_it_has_no_rows_that_can_be_told(items: object, told: str) -> None:
    """S-MR-10, S-MR-202: at construction."""
    with pytest.raises(ValidationError, match=told):
        source_of(items)
