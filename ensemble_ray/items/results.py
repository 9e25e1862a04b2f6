"""The results file of a map-reduce and its dead letters, written during the run (S-MR-130).

Rows of a parquet file are in `{path}.rows.jsonl` until the run ends, and a resumed run continues that file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Struct

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.folders import read_item
from ensemble_ray.items.line_file import LineFile, index_of_line, is_carried, json_line
from ensemble_ray.items.pulling import Entries, IndexSet, ItemEntry
from ensemble_ray.items.tables import pack_lines, parquet_row_count, require_arrow, unpack_lines
from ensemble_ray.items.text_files import count_lines, loads_line
from ensemble_ray.process.concurrency import threads
from ensemble_ray.process.context import bounded_logger
from ensemble_ray.values.attachments import Attachment
from ensemble_ray.values.outputs import FailedItem, ItemResult
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import jsonable

_log = bounded_logger(__name__)
_WHAT = "results file"
_ABSENT = object()
#: By default, after `index`.
_COLUMNS = ("item", "raw", "parsed", "agent_role", "input_tokens", "output_tokens", "incomplete_answers", "duration")


class RowColumns(Struct, frozen=True, kw_only=True):
    """The columns of a row after `index` (S-MR-216)."""

    chosen: Sequence[str] | None = None  # None: all
    key: str | None = None  # the first column, in place of the item
    _missed: set[str] = msgspec.field(default_factory=set[str])

    @property
    def names(self) -> tuple[str, ...]:
        rest = _COLUMNS if self.chosen is None else self.chosen
        if self.key is None:
            return tuple(dict.fromkeys(each for each in rest if each != "index"))
        kept = rest if self.chosen is not None else rest[1:]
        return tuple(dict.fromkeys((self.key, *(each for each in kept if each != "index"))))

    def select(self, row: Mapping[str, object]) -> dict[str, object]:
        """Select the columns from a complete row. Missing values are None; the first of a column is logged."""
        if self.chosen is None and self.key is None:
            return dict(row)
        item, answer = row["item"], row["parsed"]
        columns = {"index": row["index"]}
        for name in self.names:
            sources = (item,) if name == self.key else (row, answer, item)
            values = (_value_at(source, name) for source in sources)
            columns[name] = next((value for value in values if value is not _ABSENT), None)
            if columns[name] is None and name not in self._missed:
                self._note_missing(name, sources, row)
        return columns

    def _note_missing(self, name: str, sources: Sequence[object], row: Mapping[str, object]) -> None:
        if any(_value_at(source, name) is not _ABSENT for source in sources):
            return
        self._missed.add(name)
        known = dict.fromkeys(str(each) for source in sources if isinstance(source, Mapping) for each in source)
        _log.warning(
            "%s: item %s has no column '%s', so its row has null there. Known: [%s]",
            _WHAT, row["index"], name, ", ".join(known),
        )  # fmt: skip


def _value_at(source: object, name: str) -> object:
    """Return the field of that name, or the value at a dotted path."""
    found = source
    for part in (name,) if isinstance(source, Mapping) and name in source else name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return _ABSENT
        found = cast("Mapping[str, object]", found)[part]
    return found


class ResultsFile:
    """Writes rows of results. Create it with `open`."""

    def __init__(self, path: Path, lines: LineFile, columns: RowColumns) -> None:
        self._path = path
        self._lines = lines
        self._columns = columns

    @classmethod
    async def open(cls, path: str | Path, *, is_resumed: bool, columns: RowColumns | None = None) -> ResultsFile:
        """Create the file, or continue the file of the resumed run.

        Raises:
            ValidationError: A new run's file has rows, or a line of a resumed file is invalid.
            RecordError: The file cannot be written.
        """
        return await threads.run(cls._open, path, is_resumed, columns or RowColumns())

    @classmethod
    def _open(cls, file: str | Path, is_resumed: bool, columns: RowColumns) -> ResultsFile:  # noqa: FBT001  `run` passes positions
        path = Path(file).absolute()
        if path.suffix.lower() == ".parquet":
            require_arrow(path)
        if not is_resumed:
            refuse_old_rows(path)
        lines = _lines_of(path)
        if is_resumed and lines != path and path.exists() and not lines.exists():
            unpack_lines(path, lines)  # the run had ended and is retried

        def index_of(line: bytes) -> int | None:
            index = index_of_line(line)
            if index is None and line.strip():
                msg = f"{_WHAT} '{lines}' has a line that is no row: '{line[:80].decode('utf-8', 'replace')}'; remove the line, or move the file away"
                raise ValidationError(msg)
            return index

        return cls(path, LineFile(lines, _WHAT, index_of), columns)

    def __contains__(self, index: int) -> bool:
        return index in self._lines

    async def write(self, results: Sequence[ItemResult]) -> None:
        """Write the rows of results with an output, except for items that have a row."""
        lines = [
            (each.index, partial(_line_of, each, each.output, self._columns))
            for each in results
            if each.output is not None
        ]
        await threads.run(self._lines.append, lines)

    async def close(self, *, is_complete: bool = True) -> None:
        """Close the file. Unless the run is complete, a parquet file keeps its lines for the resume."""

        def close() -> None:
            self._lines.close()
            lines = _lines_of(self._path)
            if is_complete and lines != self._path and lines.exists():
                pack_lines(lines, self._path, self._columns.names, self._columns.key)

        await threads.run(close)


def _line_of(result: ItemResult, output: TaskOutput, columns: RowColumns) -> bytes:
    item = _file_data(result.item) if isinstance(result.item, Attachment) else result.item
    row = {
        "index": result.index,
        "item": item if columns.chosen is None and columns.key is None else jsonable(item),
        "raw": output.raw,
        "parsed": jsonable(output.parsed_output),
        "agent_role": output.agent_role,
        "input_tokens": output.metrics.input_tokens,
        "output_tokens": output.metrics.output_tokens,
        "incomplete_answers": output.metrics.incomplete_answers,
        "duration": output.duration.total_seconds(),
    }
    return json_line(columns.select(row))


def _lines_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.rows.jsonl") if path.suffix.lower() == ".parquet" else path


def refuse_old_rows(path: Path) -> None:
    """Raise a ValidationError for a file with rows of another run."""
    lines = _lines_of(path)
    if lines != path and lines.exists() and (count := count_lines(lines)):
        msg = f"{_WHAT} '{path}' has {count} rows of a run that has not ended, in '{lines}': resume that run, choose another path, or remove it"
        raise ValidationError(msg)
    if not path.exists() or not path.stat().st_size:
        return
    count = count_lines(path) if lines == path else parquet_row_count(path, _WHAT)
    if count:
        raise ValidationError(f"{_WHAT} '{path}' exists and has {count} rows: choose another path, or remove it")


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The failed items of earlier runs as a source: `MapEnsemble(items=DeadLetters("failed.jsonl"), ...)`.

    Each item is yielded once, with its original index.

    Attributes:
        path: The file that those runs used as `dead_letters`.
    """

    path: str | Path


class DeadLetterFile:
    """Writes the failed items of one run. Create it with `open`."""

    def __init__(self, lines: LineFile, run_id: str) -> None:
        self._lines = lines
        self._run_id = run_id

    @classmethod
    async def open(cls, path: str | Path, *, run_id: str, is_resumed: bool) -> DeadLetterFile:
        """Open or create the file. An item with a line of this run gets no second one."""

        def index_of(line: bytes) -> int | None:
            with suppress(ValidationError):
                index, row = _parse_row(line, "")
                return index if row.get("run_id") == run_id else None
            return None

        return cls(await threads.run(LineFile, Path(path), "dead letters", index_of, is_resumed=is_resumed), run_id)

    async def write(self, failed: Sequence[FailedItem]) -> None:
        lines = [(each.index, partial(_dead_letter_line, each, self._run_id)) for each in failed]
        await threads.run(self._lines.append, lines)

    async def close(self) -> None:
        await threads.run(self._lines.close)


def _dead_letter_line(failed: FailedItem, run_id: str) -> bytes:
    if is_file := isinstance(item := failed.item, Attachment):
        item = {**_file_data(item), "source": item.source}
    if is_text := not is_carried(item):
        try:
            item = str(item)
        except Exception:  # noqa: BLE001  `__str__` of the user's class may raise anything
            item = f"<{type(item).__name__}>"
    row = {
        "index": failed.index,
        "item": item,
        "error_type": failed.error_type,
        "message": failed.message,
        "attempts": failed.attempts,
        "run_id": run_id,
        **({} if failed.raw is None else {"raw": failed.raw}),
    }
    return json_line({**row, **({"is_text": True} if is_text else {}), **({"is_file": True} if is_file else {})})


def dead_items(path: Path) -> Entries:
    """Yield the items of a dead-letter file with their original indices, each once."""
    seen = IndexSet()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            index, row = _parse_row(line, f"dead letters '{path}', line {number}")
            if seen.add(index):
                yield _item_of(index, row)


def _file_data(item: Attachment) -> dict[str, object]:
    return {name: value for name, value in item.to_json().items() if name != "origin"}


def _item_of(index: int, row: Mapping[str, object]) -> ItemEntry:
    """Return the item of a dead letter. A file is read again."""
    match row:
        case {"is_file": True, "item": {"source": str(source), "name": str(name)}} if source:
            return read_item(index, Path(source), name)
        case _:
            return index, row["item"]


def _parse_row(line: bytes, where: str) -> tuple[int, Mapping[str, object]]:
    try:
        found = loads_line(line)
    except ValueError as error:
        msg = f"{where}: not JSON: {error}; resume the run that wrote it, or remove the line"
        raise ValidationError(msg) from error
    row = cast("Mapping[str, object]", found) if isinstance(found, dict) else {}
    index = row.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0 or "item" not in row:
        raise ValidationError(f"{where}: no dead letter: it needs 'index' and 'item'")
    return index, row
