"""Items of `.jsonl` and `.csv` files. Package: items.

In: a path. Out: entries, read as they are asked for; a line that is no item is an entry too (S-MR-120, S-MR-125).
Never: a whole file in memory.
"""

from __future__ import annotations

import csv
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.pulling import Entries, RefusedItem

__all__ = ["count_csv_rows", "count_lines", "csv_rows", "json_lines", "loads_line"]

_BOM = b"\xef\xbb\xbf"
#: What Python's csv takes of one field by default is less than a document.
_FIELD_LIMIT = 2**31 - 1


def loads_line(line: bytes) -> object:
    """Return the JSON value of a line.

    Raises:
        ValueError: it is none, with the reason.
    """
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def json_lines(path: Path) -> Entries:
    """Yield the values of a `.jsonl` file; blank lines are none."""
    index = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            text = (line.removeprefix(_BOM) if number == 1 else line).strip()
            if not text:
                continue
            try:
                value = loads_line(text)
            except ValueError as error:
                refusal = ValidationError(f"items file '{path}', line {number}: not JSON: {error}")
                yield RefusedItem(index, text.decode("utf-8", "replace"), refusal)
            else:
                yield index, value
            index += 1


def count_lines(path: Path) -> int:
    """Return how many lines of a file are not blank."""
    with path.open("rb") as file:
        return sum(not line.isspace() for line in file)


def count_csv_rows(path: Path) -> int:
    """Return how many rows a `.csv` file has below its header, as far as it can be read."""
    with path.open("r", encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        try:
            return max(0, sum(bool(row) for row in csv.reader(file)) - 1)
        except csv.Error:
            return count_lines(path)


class _Rows:
    """Lines of a file on their way into Python's csv reader, those of the current row kept."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lines: list[str] = []

    def __iter__(self) -> Iterator[str]:
        for line in self._file:
            self._lines.append(line)
            yield line

    def text_of_row(self) -> str:
        """Return the row that was read last, as it stands in the file."""
        text = "".join(self._lines).strip("\r\n")
        self._lines.clear()
        return text


def csv_rows(path: Path) -> Entries:
    """Yield the rows of a `.csv` file as dicts by the header's names; refuse one with more or fewer fields (S-MR-125).

    Raises:
        ValidationError: the header has a name twice.
    """
    if csv.field_size_limit() < _FIELD_LIMIT:
        csv.field_size_limit(min(_FIELD_LIMIT, sys.maxsize))
    # What is not UTF-8 must cost its own row alone: it comes as halves of surrogate pairs, which no UTF-8 has.
    with path.open("r", encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        rows = _Rows(file)
        reader = csv.reader(rows)
        header: list[str] | None = None
        index = 0
        while True:
            first = reader.line_num + 1
            try:
                row = next(reader)
                problem = ""
            except StopIteration:
                return
            except csv.Error as error:
                row, problem = [], str(error)
            text = rows.text_of_row()
            if not text.strip():
                continue
            if header is None:
                header = _header(row, problem, path)
                continue
            problem = problem or _problem(row, text, header)
            if problem:
                refusal = ValidationError(f"items file '{path}', line {first}: {problem}")
                yield RefusedItem(index, text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"), refusal)
            else:
                yield index, _name_columns(header, row)
            index += 1


def _header(row: list[str], problem: str, path: Path) -> list[str]:
    twice = next((name for name, count in Counter(row).items() if count > 1), None)
    if twice is not None:
        problem = f"it has the name '{twice}' twice"
    if problem:
        raise ValidationError(f"items file '{path}': the header cannot be read: {problem}")
    return row


def _problem(row: list[str], text: str, header: list[str]) -> str:
    """Return why a row is no item; "" where it is one."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        return "not UTF-8"
    if len(row) != len(header):
        return f"{len(row)} {'field' if len(row) == 1 else 'fields'}, the header has {len(header)}"
    return ""


def _name_columns(header: list[str], row: list[str]) -> dict[str, str]:
    return dict(zip(header, row, strict=True))
