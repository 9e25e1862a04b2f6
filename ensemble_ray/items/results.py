"""Outputs of items in a file, as they come. Package: items.

In: what came of items. Out: one row per output, in a `.jsonl` or a `.parquet` file (S-MR-130). A parquet file cannot be
appended to: until the run ends its rows stand in `{path}.rows.jsonl`, which a resumed run goes on with.
Never: an item with two rows, a row in part, the event loop blocked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.line_file import LineFile, index_of_line, json_line
from ensemble_ray.items.parquet import pack_lines, parquet_row_count, require_arrow, unpack_lines
from ensemble_ray.items.text_files import count_lines
from ensemble_ray.process.threads import threads
from ensemble_ray.values.outputs import ItemResult
from ensemble_ray.values.task_output import TaskOutput
from ensemble_ray.values.trace import jsonable

__all__ = ["ResultsFile", "refuse_old_rows"]

_WHAT = "results file"


class ResultsFile:
    """Takes results and writes their rows. Made by `open`."""

    def __init__(self, path: Path, lines: LineFile) -> None:
        """Write into that file, by way of lines where it is a parquet file."""
        self._path = path
        self._lines = lines

    @classmethod
    async def open(cls, path: str | Path, *, is_resumed: bool) -> ResultsFile:
        """Begin with a new file, or go on with the one of the run that is resumed.

        Raises:
            ValidationError: a new run, and the file has rows; or a line of a resumed one is no row.
            RecordError: it cannot be written.
        """
        return await threads.run(cls._open, path, is_resumed)

    @classmethod
    def _open(cls, file: str | Path, is_resumed: bool) -> ResultsFile:  # noqa: FBT001  the thread's call is by position
        path = Path(file).absolute()
        if path.suffix.lower() == ".parquet":
            require_arrow(path)
        if not is_resumed:
            refuse_old_rows(path)
        lines = _lines_of(path)
        if is_resumed and lines != path and path.exists() and not lines.exists():
            unpack_lines(path, lines)  # the run had ended, and is tried again
        return cls(path, LineFile(lines, _WHAT, partial(_index_of, lines)))

    def __contains__(self, index: int) -> bool:
        """Whether that item has its row."""
        return index in self._lines

    async def write(self, results: Sequence[ItemResult]) -> None:
        """Write the rows of those that have an output; an item that has its row gets no second one.

        Raises:
            RecordError: they cannot be written.
        """
        await threads.run(self._write, tuple(results))

    def _write(self, results: Sequence[ItemResult]) -> None:
        self._lines.append(
            (each.index, partial(_line_of, each, each.output)) for each in results if each.output is not None
        )

    async def close(self, *, is_complete: bool = True) -> None:
        """Complete the file; that of an interrupted run stays as it is for its resumption.

        Raises:
            RecordError: the rows cannot be written.
        """
        await threads.run(self._close, is_complete)

    def _close(self, is_complete: bool) -> None:  # noqa: FBT001  the thread's call is by position
        self._lines.close()
        lines = _lines_of(self._path)
        if is_complete and lines != self._path and lines.exists():
            pack_lines(lines, self._path)


def _line_of(result: ItemResult, output: TaskOutput) -> bytes:
    return json_line(
        {
            "index": result.index,
            "item": result.item,
            "raw": output.raw,
            "parsed": jsonable(output.parsed_output),
            "agent_role": output.agent_role,
            "input_tokens": output.metrics.input_tokens,
            "output_tokens": output.metrics.output_tokens,
            "incomplete_answers": output.metrics.incomplete_answers,
            "duration": output.duration.total_seconds(),
        }
    )


def _lines_of(path: Path) -> Path:
    """Return where the rows stand until the file is complete."""
    return path.with_name(f"{path.name}.rows.jsonl") if path.suffix.lower() == ".parquet" else path


def refuse_old_rows(path: Path) -> None:
    """Refuse a file with rows of another run: a new run must not lose, or mix with, what an earlier one wrote.

    Raises:
        ValidationError: the file has rows.
    """
    lines = _lines_of(path)
    if lines != path and lines.exists() and (count := count_lines(lines)):
        msg = f"{_WHAT} '{path}' has {count} rows of a run that has not ended, in '{lines}': resume that run, choose another path, or remove it"
        raise ValidationError(msg)
    if not path.exists() or not path.stat().st_size:
        return
    count = count_lines(path) if lines == path else parquet_row_count(path, _WHAT)
    if count:
        raise ValidationError(f"{_WHAT} '{path}' exists and has {count} rows: choose another path, or remove it")


def _index_of(path: Path, line: bytes) -> int | None:
    """Return the index of a row of a file that is continued; None: a blank line."""
    index = index_of_line(line)
    if index is None and line.strip():
        msg = f"{_WHAT} '{path}' has a line that is no row: '{line[:80].decode('utf-8', 'replace')}'; remove the line, or move the file away"
        raise ValidationError(msg)
    return index
