"""Items of `.parquet` files, and rows of results written into one. Package: items.

In: a path, and lines of rows. Out: entries, read batch by batch; a file, written batch by batch. pyarrow is loaded by the
first use (S-MR-120, S-MR-130). Never: a whole file in memory; a file in part under its name.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from ensemble_ray.errors import RecordError, ValidationError, message_of
from ensemble_ray.items.line_file import json_line, json_text
from ensemble_ray.items.pulling import Entries
from ensemble_ray.text.foreign_text import whole_text

__all__ = ["pack_lines", "parquet_row_count", "parquet_rows", "require_arrow", "unpack_lines"]

#: Rows of a file that are in memory as Python objects at the same time.
_BATCH_ROWS = 256
#: A group of rows is written when it has so many rows, or lines of so many bytes.
_GROUP_ROWS = 10_000
_GROUP_BYTES = 16 * 1024 * 1024
#: Types of the columns of results by name. Any JSON may stand in `item` and `parsed`; a parquet file has one type per column, so
#: they are JSON text.
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
#: Types of chosen columns by what their values are; others are JSON text (S-MR-219).
_KINDS = {
    frozenset({"str"}): "string",
    frozenset({"bool"}): "bool_",
    frozenset({"int"}): "int64",
    frozenset({"long"}): "int64",
    frozenset({"int", "long"}): "int64",
    frozenset({"float"}): "float64",
    frozenset({"int", "float"}): "float64",
}
#: Says of a column in the file whether it is JSON text.
_JSON = b"json"


def _arrow(module: str, path: Path) -> Any:  # pyarrow comes without types
    try:
        return importlib.import_module(module)
    except ImportError as error:
        msg = f"'{path}' needs pyarrow, which is not installed: pip install 'ensemble-ray[parquet]'"
        raise ValidationError(msg) from error


def require_arrow(path: Path) -> None:
    """Refuse a parquet file where nothing can read or write it.

    Raises:
        ValidationError: pyarrow is not installed; the text says what installs it.
    """
    _arrow("pyarrow.parquet", path)


def parquet_row_count(path: Path, what: str = "items file") -> int:
    """Return how many rows a file has, by its footer.

    Raises:
        ValidationError: it is no parquet file, or pyarrow is not installed.
    """
    parquet = _arrow("pyarrow.parquet", path)
    try:
        return int(parquet.read_metadata(path).num_rows)
    except (_arrow("pyarrow", path).ArrowException, OSError) as error:
        raise ValidationError(f"{what} '{path}' is no parquet file: {message_of(error)}") from error


def parquet_rows(path: Path) -> Entries:
    """Yield the rows of a file as dicts."""
    index = 0
    with _arrow("pyarrow.parquet", path).ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH_ROWS):
            for row in batch.to_pylist():
                yield index, row
                index += 1


def pack_lines(lines: Path, path: Path, names: Sequence[str], key: str | None) -> None:
    """Make the parquet file of rows that stand in lines, and remove the lines; `names` are its columns behind `index`.

    The values of the column `key` are those of a field of the items, whatever its name.

    Raises:
        RecordError: it cannot be written; the lines stay.
    """
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
    part = path.with_name(f"{path.name}.part")
    try:
        with parquet.ParquetWriter(part, schema) as writer:
            for rows in _groups(lines, types):
                writer.write_table(arrow.Table.from_pylist(rows, schema=schema))
        part.replace(path)
        lines.unlink()
    except (arrow.ArrowException, OSError, OverflowError) as error:
        part.unlink(missing_ok=True)
        msg = f"results file '{path}' cannot be written: {message_of(error)}; its rows are in '{lines}'"
        raise RecordError(msg, str(path)) from error


def _find_types(lines: Path, names: Sequence[str], key: str | None) -> dict[str, str]:
    """Return the types of columns; those of chosen ones follow from the values of all rows."""
    chosen = {name: set[str]() for name in names if name == key or name not in _TYPES}
    if chosen:
        with lines.open("rb") as file:
            for row in map(json.loads, file):
                for name, found in chosen.items():
                    if (value := row.get(name)) is not None:
                        found.add(_name_type(value))
    found_kinds = {name: _KINDS.get(frozenset(found), "json") if found else "string" for name, found in chosen.items()}
    return {name: found_kinds.get(name) or _TYPES[name] for name in names}


def _name_type(value: object) -> str:
    """Return the name of a value's type; `long`: an int that a float cannot hold, `huge`: one that int64 cannot, either."""
    if type(value) is not int or abs(value) <= 2**53:
        return type(value).__name__
    return "long" if -(2**63) <= value < 2**63 else "huge"


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
    """Make lines of the rows of a parquet file again, so that more can follow; the file stays.

    Raises:
        ValidationError: it is no file of results.
        RecordError: the lines cannot be written.
    """
    count = parquet_row_count(path, "results file")
    part = lines.with_name(f"{lines.name}.part")
    try:
        schema = _arrow("pyarrow.parquet", path).read_schema(path)
        texts = [each.name for each in schema if _is_json(each.metadata or {}, each.name)]
        with part.open("wb") as file:
            for entry in parquet_rows(path) if count else ():
                _, row = cast("tuple[int, dict[str, Any]]", entry)
                file.write(json_line({**row, **_values(row, texts, path)}))
        part.replace(lines)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise RecordError(f"results file '{lines}' cannot be written: {message_of(error)}", str(lines)) from error


def _is_json(metadata: Mapping[bytes, bytes], name: str) -> bool:
    return metadata[_JSON] == b"1" if _JSON in metadata else _TYPES.get(name) == "json"  # older files do not say


def _values(row: Mapping[str, Any], texts: Sequence[str], path: Path) -> dict[str, object]:
    try:
        int(row["index"])
        return {name: None if row[name] is None else json.loads(row[name]) for name in texts}
    except (KeyError, TypeError, ValueError) as error:
        raise ValidationError(f"results file '{path}' has a row that is none of results; move it away") from error
