"""Read items of `.jsonl` and `.csv` files on demand.

A line that is not an item, or that could be read in two ways, becomes a refused entry (S-MR-120, S-MR-125, S-MR-196 to S-MR-199).
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import json
import re
import sys
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TextIO

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.pulling import Entries, RefusedItem

CSV_ENCODING = "utf-8"
#: UTF-32 comes first: its mark begins with the mark of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_FIELD_LIMIT = 2**31 - 1  # Python's default is smaller than a document
_ROW_LIMIT = 64 * 1024 * 1024  # a longer row, in characters, is the rest of a file after a quote that is never closed
_DELIMITERS, _SAMPLE = ",;\t|", 20  # possible delimiters, and the rows to read if the header contains several
_MARKING = "ensemble_ray.mark_undecoded"  # decodes each invalid byte to a lone surrogate, which no encoding produces
_QUOTED_FIELD = re.compile(r'"(?:[^"]++|"")*+"')  # a quote inside is doubled
_UNDECODED = re.compile("[\udc00-\udcff]")
_QUOTED = re.compile('"[^"]*"?')


@dataclass(frozen=True, slots=True)
class CsvFile:
    """A `.csv` file as a source, with its delimiter or encoding: `MapEnsemble(items=CsvFile("a.txt", ";"), ...)`.

    Attributes:
        path: The file, with any extension.
        delimiter: The character between fields; None: the comma, semicolon, tab or bar that the header contains.
        encoding: A codec name of Python. A byte order mark of the file overrides the default.
    """

    path: str | Path
    delimiter: str | None = None
    encoding: str = CSV_ENCODING

    def check(self) -> None:
        """Raise a ValidationError if the delimiter or the encoding is invalid."""
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            raise ValidationError(f"items file '{self.path}': delimiter must be one character, got: {self.delimiter!r}")
        try:
            "".encode(self.encoding)
        except (LookupError, ValueError) as error:  # ValueError: a null character in the name
            raise ValidationError(
                f"items file '{self.path}': there is no encoding '{self.encoding}'. "
                "Use a name that Python knows, such as 'utf-8', 'utf-16', 'latin-1' or 'cp1252'"
            ) from error


def json_lines(path: Path) -> Entries:
    for index, (number, text) in enumerate(_filled_lines(path)):
        try:
            value = loads_line(text)
        except ValueError as error:
            refusal = ValidationError(f"items file '{path}', line {number}: not JSON: {error}")
            yield RefusedItem(index, text.decode("utf-8", "replace"), refusal)
        else:
            yield index, value


def count_lines(path: Path) -> int:
    """Return the number of lines that are not blank."""
    return sum(1 for _ in _filled_lines(path))


def loads_line(line: bytes) -> object:
    """Return the JSON value of a line. A ValueError has the reason as text."""
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def csv_rows(source: CsvFile) -> Entries:
    """Yield the rows as dictionaries. A ValidationError: the header is invalid, or its delimiter is ambiguous."""
    if csv.field_size_limit() < _FIELD_LIMIT:
        csv.field_size_limit(min(_FIELD_LIMIT, sys.maxsize))
    encoding = _encoding_of(source)
    with Path(source.path).open("r", encoding=encoding, errors=_MARKING, newline="") as file:
        rows = _Rows(file)
        delimiter = source.delimiter or _find_delimiter(rows, source)
        reader = csv.reader(rows, delimiter=delimiter, strict=True)
        header: list[str] | None = None
        index = 0
        while True:
            problem, line = "", rows.passed + 1
            try:
                row = next(reader)
                text = rows.take()
            except StopIteration:
                return
            except csv.Error:
                row, text = [], rows.take_broken()
                problem = _quote_problem(text, delimiter, header)
            if not text.strip() and delimiter not in text:
                continue
            if header is None:
                header = _header(row, text, problem, source.path, encoding)
                continue
            problem = problem or _problem(row, header, encoding)
            if problem:
                refusal = ValidationError(f"items file '{source.path}', line {line}{problem}")
                yield RefusedItem(index, _UNDECODED.sub("\ufffd", text), refusal)
            else:
                yield index, dict(zip(header, row, strict=True))
            index += 1


def count_csv_rows(source: CsvFile) -> int:
    count = 0
    try:
        for _ in csv_rows(source):
            count += 1
    except ValidationError:
        pass
    return count


class _Rows:
    """Feeds lines to Python's csv reader, and can feed the lines of the current row again."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._again: deque[str] = deque()
        self._size = 0
        self.lines: list[str] = []  # of the current row
        self.passed = 0  # before the current row

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if self._size > _ROW_LIMIT:
            raise csv.Error(f"the row has more than {_ROW_LIMIT // 1024**2} Mi characters")
        line = self._again.popleft() if self._again else next(self._file)
        self._size += len(line)
        self.lines.append(line)
        return line

    def take(self, count: int | None = None) -> str:
        """Finish the row, with `count` after so many lines, and return its text."""
        lines, again = (self.lines, []) if count is None else (self.lines[:count], self.lines[count:])
        self._again.extendleft(reversed(again))
        self.lines, self._size = [], 0
        self.passed += len(lines)
        return "".join(lines).strip("\r\n")

    def take_broken(self) -> str:
        """Finish a row with wrong quotes and return its text.

        The row ends at the next line that closes a quote; without one it is one line, so that no other is lost (S-MR-197).
        """
        if self.lines[0].count('"') % 2 == 0:
            return self.take(1)
        checked = 1
        while True:
            if checked == len(self.lines):
                try:
                    next(self)
                except (StopIteration, csv.Error):
                    return self.take(1)
            checked += 1
            if self.lines[checked - 1].count('"') % 2:
                return self.take(checked)


def _filled_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, as UTF-8, with their numbers."""
    marked = _encoding_by_mark(path)
    if marked is not None and marked != "utf-8-sig":
        with path.open("r", encoding=marked, errors=_MARKING, newline="\n") as texts:
            for number, text in enumerate(texts, start=1):
                if text := text.strip():
                    yield number, text.encode("utf-8", "surrogatepass")
        return
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            line = (raw.removeprefix(codecs.BOM_UTF8) if number == 1 else raw).strip()
            if number == 1 and b"\0" in line[:4]:
                raise ValidationError(
                    f"items file '{path}', line 1: not UTF-8: it has null characters, as UTF-16 has. Save the file as UTF-8"
                )
            if line:
                yield number, line


def _encoding_by_mark(path: Path) -> str | None:
    with path.open("rb") as file:
        begin = file.read(4)
    return next((encoding for mark, encoding in _MARKS if begin.startswith(mark)), None)


def _mark_undecoded(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return "".join(chr(0xDC00 + byte) for byte in error.object[error.start : error.end]), error.end


codecs.register_error(_MARKING, _mark_undecoded)


def _encoding_of(source: CsvFile) -> str:
    source.check()
    marked, named = _encoding_by_mark(Path(source.path)), codecs.lookup(source.encoding).name
    if marked is None or source.encoding == CSV_ENCODING:
        return marked or named
    if not named.startswith(marked.removesuffix("-sig")):
        raise ValidationError(
            f"items file '{source.path}': its byte order mark says {marked.removesuffix('-sig').upper()}, and the encoding is "
            f"'{source.encoding}'. Leave the encoding out"
        )
    return marked


def _find_delimiter(rows: _Rows, source: CsvFile) -> str:
    """Return the delimiter of the header. If it contains several, the rows below decide."""
    lines = list(islice(rows, 1))
    while lines and lines[-1].isspace():
        lines = list(islice(rows, 1))
    outside = _QUOTED.sub("", lines[0]) if lines else ""
    fitting = [each for each in _DELIMITERS if each in outside] or [","]
    if len(fitting) > 1:
        with contextlib.suppress(csv.Error):  # lines of many megabytes
            lines.extend(islice(rows, _SAMPLE))
    rows.take(0)
    found = fitting
    if len(fitting) > 1 and len(lines) > 1:
        last = -1 if len(lines) > _SAMPLE else None  # the last row may be incomplete
        samples = {each: [row for row in csv.reader(lines, delimiter=each) if row][:last] for each in found}
        fitting = [each for each in found if len({len(row) for row in samples[each]}) == 1]
    if len(fitting) == 1 or len(lines) == 1:
        return fitting[0]
    shown = " and ".join(repr(each) for each in fitting or found)
    raise ValidationError(
        f"items file '{source.path}', line {rows.passed + 1}: the header has {shown}, and either may separate its fields. "
        "Say which: CsvFile(path, delimiter=...), or --delimiter"
    )


def _header(row: list[str], text: str, problem: str, path: str | Path, encoding: str) -> list[str]:
    twice = next((name for name, count in Counter(row).items() if count > 1), None)
    if undecoded := _undecoded_problem(row, row, encoding):
        problem = undecoded
    elif "\0" in text:
        problem = ": it has null characters, as UTF-16 has. Save the file as UTF-8, or pass CsvFile(path, encoding='utf-16-le')"
    elif twice is not None:
        problem = f": it has the name '{twice}' twice"
    if problem:
        raise ValidationError(f"items file '{path}': the header cannot be read{problem}")
    return row


def _problem(row: list[str], header: list[str], encoding: str) -> str:
    if undecoded := _undecoded_problem(row, header, encoding):
        return undecoded
    counts = f": {len(row)} {'field' if len(row) == 1 else 'fields'}, the header has {len(header)}"
    if len(row) < len(header):
        return f", column '{header[len(row)]}'{counts}"
    if len(row) > len(header):
        return f", behind column '{header[-1]}'{counts}. A field with the delimiter in it stands in quotes"
    return ""


def _undecoded_problem(row: list[str], header: list[str], encoding: str) -> str:
    for number, value in enumerate(row):
        if found := _UNDECODED.search(value):
            name = _column_name(number, None if row is header else header)
            return (
                f", column {name}: not {encoding.removesuffix('-sig').upper()}: byte 0x{ord(found[0]) - 0xDC00:02x}. Save the file as UTF-8, "
                "or name its encoding: CsvFile(path, encoding='cp1252'), or --encoding"
            )
    return ""


def _quote_problem(text: str, delimiter: str, header: list[str] | None) -> str:
    column = position = 0
    is_open = False
    while position < len(text):
        if text[position] == '"':
            quoted = _QUOTED_FIELD.match(text, position)
            is_open = quoted is None
            end = len(text) if quoted is None else quoted.end()
        else:
            end = text.find(delimiter, position)
        if not text.startswith(delimiter, end):
            break
        position, column = end + 1, column + 1
    name = _column_name(column, header)
    if is_open:
        return f", column {name}: the quote at its beginning is never closed. Close it, or write it twice inside quotes"
    return f", column {name}: text behind its closing quote. A quote inside quotes is written twice"


def _column_name(number: int, header: list[str] | None) -> str:
    return f"'{header[number]}'" if header is not None and number < len(header) else str(number + 1)
