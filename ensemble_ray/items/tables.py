"""Rows of tables of other libraries: pandas, polars, Arrow, numpy, Hugging Face. Package: items.

In: an object that a user has made with such a library. Out: its rows as Python values (S-MR-200, S-MR-201). A table is known
by the module and the name of its class. Never: an import of such a library; a whole table as Python objects.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

from ensemble_ray.errors import ValidationError

__all__ = ["Table", "rows_of_table"]

#: Rows that are Python objects at the same time.
_BATCH_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table as a source of items."""

    #: for people
    place: str
    #: begins at the first row at each call; its values are the library's
    read: Callable[[], Iterable[object]]
    #: how many rows it has, where it knows that
    count: int | None
    #: its rows can be read once
    is_one_shot: bool = False

    def rows(self) -> Iterator[object]:
        """Return its rows as Python values, from the first one on."""
        return map(_plain, self.read())


def rows_of_table(items: object) -> Table | None:
    """Return the rows of a table; None: it is none.

    Raises:
        ValidationError: it has no rows yet, a column name twice, or is no list of values.
    """
    for base in type(items).__mro__:
        name = f"{base.__module__.partition('.')[0]}.{base.__qualname__}"
        if name in _REFUSED:
            raise ValidationError(f"items is a {name}: {_REFUSED[name]}")
        if (read := _READERS.get(name)) is not None:
            rows = read(items, name)
            count = len(cast("Sized", items)) if hasattr(base, "__len__") else None
            return Table(place=f"a {name}", read=rows, count=count, is_one_shot=name in _ONE_SHOT)
    return None


# The libraries come without types, or not at all.
_Rows = Callable[[], Iterable[object]]


def _refuse_twice(names: Iterable[object], name: str) -> None:
    twice = next((each for each, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValidationError(f"items is a {name} that has the column {twice!r} twice: rename one of them")


def _of_pandas(frame: Any, name: str) -> _Rows:
    columns: list[object] = [_plain(each) for each in frame.columns]
    _refuse_twice(columns, name)
    # Without the index; a tuple for each row, since a Series of a row would have one type for all of its columns.
    return lambda: (dict(zip(columns, row, strict=True)) for row in frame.itertuples(index=False, name=None))


def _of_polars(frame: Any, _: str) -> _Rows:
    return lambda: frame.iter_rows(named=True)


def _of_arrow(table: Any, name: str) -> _Rows:
    _refuse_twice(table.schema.names, name)

    def rows() -> Iterator[object]:
        batches = table.to_batches(max_chunksize=_BATCH_ROWS) if hasattr(table, "to_batches") else (table,)
        for batch in batches:
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                yield from batch.slice(first, _BATCH_ROWS).to_pylist()

    return rows


def _of_arrow_reader(reader: Any, name: str) -> _Rows:
    _refuse_twice(reader.schema.names, name)
    return lambda: (row for batch in reader for row in batch.to_pylist())


def _of_numpy(array: Any, name: str) -> _Rows:
    if not array.ndim:
        raise ValidationError(f"items is a {name} without dimensions: give a list with the one item")

    def rows() -> Iterator[object]:
        for first in range(0, len(array), _BATCH_ROWS):
            part = array[first : first + _BATCH_ROWS]
            if names := array.dtype.names:
                columns = [_plain(part[each]) for each in names]
                yield from (dict(zip(names, row, strict=True)) for row in zip(*cast("list[Any]", columns), strict=True))
            else:
                yield from cast("list[object]", _plain(part))

    return rows


def _iterated(values: Any, _: str) -> _Rows:
    return lambda: iter(values)


_READERS: Mapping[str, Callable[[Any, str], _Rows]] = {
    "pandas.DataFrame": _of_pandas,
    "pandas.Series": _iterated,
    "pandas.Index": _iterated,
    "polars.DataFrame": _of_polars,
    "polars.Series": _iterated,
    "pyarrow.Table": _of_arrow,
    "pyarrow.RecordBatch": _of_arrow,
    "pyarrow.RecordBatchReader": _of_arrow_reader,
    "pyarrow.Array": _iterated,
    "pyarrow.ChunkedArray": _iterated,
    "numpy.ndarray": _of_numpy,
    "datasets.Dataset": _iterated,
    "datasets.IterableDataset": _iterated,
}
_ONE_SHOT = frozenset({"pyarrow.RecordBatchReader"})
_REFUSED: Mapping[str, str] = {
    "polars.LazyFrame": "it has no rows yet. Give frame.collect()",
    "datasets.DatasetDict": "it has several splits. Give one of them, such as datasets['train']",
    "datasets.IterableDatasetDict": "it has several splits. Give one of them, such as datasets['train']",
}


def _plain(value: object) -> object:
    """Return a value of a table as Python has it; what says that there is no value is None (S-MR-201)."""
    match value:
        case dict():
            return {_plain(key): _plain(each) for key, each in cast("dict[object, object]", value).items()}
        case list():
            return [_plain(each) for each in cast("list[object]", value)]
        case tuple():
            return tuple(_plain(each) for each in cast("tuple[object, ...]", value))
        case float():
            return None if math.isnan(value) else float(value)
        case Decimal():
            return None if value.is_nan() else value
        case _:
            return _plain_scalar(value)


def _plain_scalar(value: Any) -> object:
    kind, name = type(value).__module__.partition(".")[0], type(value).__name__
    if kind == "pandas" and name in {"NaTType", "NAType"}:
        return None
    if kind == "pyarrow" and hasattr(value, "as_py"):
        return _plain(value.as_py())
    if kind == "polars" and hasattr(value, "to_list"):
        return _plain(value.to_list())
    if kind == "numpy" and hasattr(value, "dtype"):
        if value.dtype.kind in "mM":  # of nanoseconds, numpy would make integers
            value = value.astype(f"{value.dtype.kind}8[us]")
        return _plain(value.tolist())
    return value
