"""Rows of tables of pandas, polars, Arrow, numpy and Hugging Face, and the parquet files of results (S-MR-200, S-MR-201).

The name of its class identifies a table, so that the library need not be imported.
"""

from __future__ import annotations

import glob
import importlib
import json
import math
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

from msgspec import Struct

from ensemble_ray.errors import RecordError, ValidationError, message_of
from ensemble_ray.items.line_file import json_line, json_text
from ensemble_ray.items.pulling import Entries
from ensemble_ray.text.foreign_text import whole_text

_BATCH_ROWS = 256


class Table(Struct, frozen=True, kw_only=True):
    place: str  # for messages
    read: Callable[[], Iterable[object]]  # rows from the beginning, as values of the library
    count: int | None  # if known
    is_one_shot: bool = False

    def rows(self) -> Iterator[object]:
        return map(_plain, self.read())


def rows_of_table(items: object) -> Table | None:
    """Return the table in an object. A ValidationError: it has no rows yet, or its form is unsuitable."""
    for base in type(items).__mro__:
        name = f"{base.__module__.partition('.')[0]}.{base.__qualname__}"
        if name in _REFUSED:
            raise ValidationError(f"items is a {name}: {_REFUSED[name]}")
        if (read := _READERS.get(name)) is not None:
            rows = read(items, name)
            count = len(cast("Sized", items)) if hasattr(base, "__len__") else None
            return Table(place=f"a {name}", read=rows, count=count, is_one_shot=name in _ONE_SHOT)
    return None


_Rows = Callable[[], Iterable[object]]


def _check_columns(names: Iterable[object], name: str) -> None:
    twice = next((each for each, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        raise ValidationError(f"items is a {name} that has the column {twice!r} twice: rename one of them")


def _of_pandas(frame: Any, name: str) -> _Rows:
    columns: list[object] = [_plain(each) for each in frame.columns]
    _check_columns(columns, name)
    # Tuples keep the types; a Series has one type for all columns of a row.
    return lambda: (dict(zip(columns, row, strict=True)) for row in frame.itertuples(index=False, name=None))


def _of_arrow(table: Any, name: str) -> _Rows:
    _check_columns(table.schema.names, name)

    def rows() -> Iterator[object]:
        batches = table.to_batches(max_chunksize=_BATCH_ROWS) if hasattr(table, "to_batches") else (table,)
        for batch in table if name in _ONE_SHOT else batches:
            for first in range(0, batch.num_rows, _BATCH_ROWS):
                yield from batch.slice(first, _BATCH_ROWS).to_pylist()

    return rows


def _of_numpy(array: Any, name: str) -> _Rows:
    if not array.ndim:
        raise ValidationError(f"items is a {name} without dimensions: pass a list with the one item")

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
    "polars.DataFrame": lambda frame, _: lambda: frame.iter_rows(named=True),
    "polars.Series": _iterated,
    "pyarrow.Table": _of_arrow,
    "pyarrow.RecordBatch": _of_arrow,
    "pyarrow.RecordBatchReader": _of_arrow,
    "pyarrow.Array": _iterated,
    "pyarrow.ChunkedArray": _iterated,
    "numpy.ndarray": _of_numpy,
    "datasets.Dataset": _iterated,
    "datasets.IterableDataset": _iterated,
}
_ONE_SHOT = frozenset({"pyarrow.RecordBatchReader"})
_REFUSED: Mapping[str, str] = {
    "polars.LazyFrame": "it has no rows yet. Pass frame.collect()",
    "datasets.DatasetDict": "it has several splits. Pass one of them, such as datasets['train']",
    "datasets.IterableDatasetDict": "it has several splits. Pass one of them, such as datasets['train']",
}


def _plain(value: object) -> object:
    """Return a value of a table as a Python value; missing values are None (S-MR-201)."""
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
        if value.dtype.kind in "mM":  # numpy converts nanoseconds to integers
            value = value.astype(f"{value.dtype.kind}8[us]")
        return _plain(value.tolist())
    return value


# Parquet files of results.

_GROUP_ROWS = 10_000  # limits of a group of rows; bytes are those of the lines
_GROUP_BYTES = 16 * 1024 * 1024
#: Types of the default columns. `json` is any JSON as text, since a parquet column has one type.
_TYPES = {
    "index": "int64",
    "item": "json",
    "raw": "string",
    "parsed": "json",
    "agent_role": "string",
    "input_tokens": "int64",
    "output_tokens": "int64",
    "incomplete_answers": "int64",
    "duration": "float64",
}
#: Types of chosen columns by the types of their values. `long`: an int beyond float64. Others are JSON text (S-MR-219).
_KINDS = {
    frozenset({"str"}): "string",
    frozenset({"bool"}): "bool_",
    frozenset({"int"}): "int64",
    frozenset({"long"}): "int64",
    frozenset({"int", "long"}): "int64",
    frozenset({"float"}): "float64",
    frozenset({"int", "float"}): "float64",
}
_JSON = b"json"  # metadata of a column: whether it is JSON text


def _arrow(module: str, path: Path) -> Any:  # pyarrow is untyped
    try:
        return importlib.import_module(module)
    except ImportError as error:
        msg = f"'{path}' needs pyarrow, which is not installed: pip install 'ensemble-ray[parquet]'"
        raise ValidationError(msg) from error


def require_arrow(path: Path) -> None:
    """Raise a `ValidationError` with the install command if pyarrow is not installed."""
    _arrow("pyarrow.parquet", path)


def parquet_row_count(path: Path, what: str = "items file") -> int:
    """Return the number of rows in the footer of a file."""
    parquet = _arrow("pyarrow.parquet", path)
    try:
        return int(parquet.read_metadata(path).num_rows)
    except (_arrow("pyarrow", path).ArrowException, OSError) as error:
        raise ValidationError(f"{what} '{path}' is no parquet file: {message_of(error)}") from error


def parquet_rows(path: Path) -> Entries:
    index = 0
    with _arrow("pyarrow.parquet", path).ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for row in batch.to_pylist():
                yield index, row
                index += 1


def pack_lines(lines: Path, path: Path, names: Sequence[str], key: str | None) -> None:
    """Convert a file of lines to a parquet file, and delete it. `key` is a column with a field of the items."""
    arrow, parquet = _arrow("pyarrow", path), _arrow("pyarrow.parquet", path)
    types = _find_types(lines, ("index", *names), key)
    schema = arrow.schema(
        [
            arrow.field(
                name,
                arrow.string() if kind == "json" else getattr(arrow, kind)(),
                metadata={_JSON: b"1" if kind == "json" else b"0"},
            )
            for name, kind in types.items()
        ]
    )
    part = _part_of(path)
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            for rows in _groups(lines, types):
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
        part.replace(path)
        lines.unlink(missing_ok=True)
        for left in path.parent.glob(f"{glob.escape(path.name)}.*.part"):  # of processes that were killed
            left.unlink(missing_ok=True)
    except (arrow.ArrowException, OSError, OverflowError) as error:
        part.unlink(missing_ok=True)
        msg = f"results file '{path}' cannot be written: {message_of(error)}; its rows are in '{lines}'"
        raise RecordError(msg, str(path)) from error


def _part_of(path: Path) -> Path:
    """Return a new name: a process that was frozen while it wrote must not continue in the file of its successor."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")


def _find_types(lines: Path, names: Sequence[str], key: str | None) -> dict[str, str]:
    """Return the types of the columns. Types of chosen columns depend on the values of all rows."""
    chosen = {name: set[str]() for name in names if name == key or name not in _TYPES}
    if chosen:
        with lines.open("rb") as file:
            for row in map(json.loads, file):
                for name, found in chosen.items():
                    if (value := row.get(name)) is not None:
                        is_far = type(value) is int and abs(value) > 2**53
                        far = "long" if is_far and -(2**63) <= value < 2**63 else "huge"
                        found.add(far if is_far else type(value).__name__)
    found_kinds = {name: _KINDS.get(frozenset(found), "json") if found else "string" for name, found in chosen.items()}
    return {name: found_kinds.get(name) or _TYPES[name] for name in names}


def _groups(lines: Path, types: Mapping[str, str]) -> Iterator[list[dict[str, object]]]:
    rows: list[dict[str, object]] = []
    size = 0
    with lines.open("rb") as file:
        for line in file:
            rows.append(_columns(json.loads(line), types))
            size += len(line)
            if len(rows) >= _GROUP_ROWS or size >= _GROUP_BYTES:
                yield rows
                rows, size = [], 0
    yield rows


def _columns(row: Mapping[str, object], types: Mapping[str, str]) -> dict[str, object]:
    columns: dict[str, object] = {}
    for name, kind in types.items():
        value = row.get(name)
        if kind == "json" and (name == "item" or value is not None):
            value = json_text(value)
        elif isinstance(value, str):
            value = whole_text(value)
        columns[name] = value
    return columns


def unpack_lines(path: Path, lines: Path) -> None:
    """Convert a parquet file back to lines, to append to them."""
    count = parquet_row_count(path, "results file")
    part = _part_of(lines)
    try:
        schema = _arrow("pyarrow.parquet", path).read_schema(path)
        marks = {each.name: (each.metadata or {}).get(_JSON) for each in schema}
        # Older files lack the metadata.
        texts = [name for name, mark in marks.items() if mark == b"1" or (mark is None and _TYPES.get(name) == "json")]
        with part.open("wb") as file:
            for entry in parquet_rows(path) if count else ():
                _, row = cast("tuple[int, dict[str, Any]]", entry)
                try:
                    int(row["index"])
                    data = {name: None if row[name] is None else json.loads(row[name]) for name in texts}
                except (KeyError, TypeError, ValueError) as error:
                    msg = f"results file '{path}' has a row that is none of results; move it away"
                    raise ValidationError(msg) from error
                file.write(json_line({**row, **data}))
        part.replace(lines)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RecordError(f"results file '{lines}' cannot be written: {message_of(error)}", str(lines)) from error
