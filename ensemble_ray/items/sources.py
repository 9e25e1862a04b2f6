"""Where the items of a map-reduce come from.

In: what the user gave as `items`. Out: a source that can be opened for each run (S-MR-120). Files are opened once to see
that they can be read; nothing is pulled before a run asks. Never: a plan, a runtime, an import of Ray.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from pydantic import BaseModel, JsonValue

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.pulling import (
    AsyncReader,
    Entries,
    ItemReader,
    ListReader,
    Pulled,
    RefusedItem,
    ThreadReader,
    number_items,
)
from ensemble_ray.items.results import DeadLetters, dead_items
from ensemble_ray.items.tables import Table, parquet_row_count, parquet_rows, rows_of_table
from ensemble_ray.items.text_files import CsvFile, count_csv_rows, count_lines, csv_rows, json_lines

if TYPE_CHECKING:
    from ensemble_ray.items.pulling import ItemEntry


#: What is said of a source without items (S-MR-10, S-MR-122).
NO_ITEMS = "items must not be None or empty"
_SUFFIXES = ".jsonl, .csv or .parquet"
_READERS: Mapping[str, Callable[[Path], Entries]] = {
    ".jsonl": json_lines,
    ".csv": lambda path: csv_rows(CsvFile(path)),
    ".parquet": parquet_rows,
}
_COUNTS: Mapping[str, Callable[[Path], int]] = {
    ".jsonl": count_lines,
    ".csv": lambda path: count_csv_rows(CsvFile(path)),
}
#: Longest part of a text that an error repeats.
_SHOWN = 80


@dataclass(slots=True, kw_only=True)
class ItemSource:
    """Items, and how to read them from the beginning."""

    #: for people: what the items are
    place: str
    #: for the record: kind, and path of a file
    identity: Mapping[str, JsonValue]
    #: makes a reader that begins at the first item
    reader: Callable[[], ItemReader]
    #: how many items there are, where that is known before they are read
    count: int | None = None
    #: tells how many there are by looking through a file, in this thread; None: only a run can tell
    look: Callable[[], int] | None = None
    #: a sequence in memory, which static mode maps at construction
    is_list: bool = False
    #: the items of a sequence; empty for other sources
    items: Sequence[object] = ()
    #: an iterator, which can be run over once
    is_one_shot: bool = False
    _is_open: bool = field(default=False, init=False)

    def open(self) -> ItemReader:
        """Return a reader from the first item on.

        Raises:
            ValidationError: it is an iterator, and was opened before (S-MR-124).
        """
        if self.is_one_shot and self._is_open:
            msg = (
                "items is an iterator that an earlier run has consumed: give a list, a file, or a new iterator per run"
            )
            raise ValidationError(msg)
        self._is_open = True
        return self.reader()


def source_of(items: object) -> ItemSource:
    """Return the source of what was given as `items` (S-MR-120).

    Raises:
        ValidationError: None, an empty sequence, a file that cannot be read, or nothing that has items.
    """
    match items:
        case None:
            raise ValidationError(NO_ITEMS)
        case ItemSource():
            return items
        case DeadLetters():
            return _dead_letters(items)
        case CsvFile():
            return _csv(items)
        case str() | os.PathLike():
            return _file(cast("str | os.PathLike[str]", items))
        case _ if (table := rows_of_table(items)) is not None:
            return _table(table)
        case bytes() | bytearray() | memoryview() | Mapping() | BaseModel():
            raise _refuse(items)
        case Sequence():
            return _sequence(cast("Sequence[object]", items))
        case _:
            return _iterable(items)


_ADVICE = f"give a list of items, an iterable, or a path that ends in {_SUFFIXES}"


def _refuse(items: object) -> ValidationError:
    """Return the error about what Python can iterate over, though its parts are no items."""
    advice = f"items is {type(items).__name__}: {_ADVICE}"
    match items:
        case Mapping():
            advice += ". For one item give [mapping], for its parts list(mapping.values()) or list(mapping.items())"
        case BaseModel():
            advice += ". For one item give a list with it"
        case _:
            pass
    return ValidationError(advice)


def _sequence(items: Sequence[object]) -> ItemSource:
    if not len(items):
        raise ValidationError(NO_ITEMS)
    # A list may change after it was given (S-CONV-5); a sequence of somebody's own may read each item from a disk.
    kept = tuple(items) if isinstance(items, list) else items
    is_plain = isinstance(kept, tuple | range)
    return ItemSource(
        place=f"{len(kept)} items",
        identity={"kind": "list", "count": len(kept)},
        reader=(lambda: ListReader(kept)) if is_plain else (lambda: ThreadReader(lambda: number_items(kept))),
        count=len(kept),
        is_list=True,
        items=kept,
    )


def _iterable(items: object) -> ItemSource:
    rows = getattr(items, "iter_rows", None)
    if callable(rows):
        make_rows = cast("Callable[[], Iterable[object]]", rows)
        return ItemSource(
            place="a Dataset",
            identity={"kind": "dataset"},
            reader=lambda: ThreadReader(lambda: number_items(make_rows())),
        )
    if isinstance(items, AsyncIterable):
        several = cast("AsyncIterable[object]", items)
        is_one_shot = isinstance(items, AsyncIterator)
        return ItemSource(
            place="an async iterator" if is_one_shot else "an async iterable",
            identity={"kind": "async"},
            reader=lambda: AsyncReader(several),
            is_one_shot=is_one_shot,
        )
    if isinstance(items, Iterable) or hasattr(type(items), "__getitem__"):
        each = cast("Iterable[object]", items)
        is_one_shot = isinstance(items, Iterator)
        return ItemSource(
            place="an iterator" if is_one_shot else f"a {type(items).__name__}",
            identity={"kind": "iterable"},
            reader=lambda: ThreadReader(lambda: number_items(each)),
            is_one_shot=is_one_shot,
        )
    raise ValidationError(f"items is of type {type(items).__name__}, which has no items: {_ADVICE}")


def _table(table: Table) -> ItemSource:
    if table.count == 0:
        raise ValidationError(NO_ITEMS)
    return ItemSource(
        place=table.place,
        identity={"kind": "table", "count": table.count},
        reader=lambda: ThreadReader(lambda: number_items(table.rows())),
        count=table.count,
        is_one_shot=table.is_one_shot,
    )


def _file(source: str | os.PathLike[str]) -> ItemSource:
    text = os.fsdecode(source)
    path = Path(text)
    suffix = path.suffix.lower()
    rows = _READERS.get(suffix)
    if rows is None:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        what = "text" if isinstance(source, str) else "path"
        raise ValidationError(
            f"items is the {what} '{shown}': give a list of items, or a path that ends in {_SUFFIXES}"
        )
    path = _readable(path, "items file")
    return ItemSource(
        place=f"the file '{path}'",
        identity={"kind": suffix[1:], "path": str(path)},
        reader=lambda: ThreadReader(lambda: rows(path)),
        count=parquet_row_count(path) if suffix == ".parquet" else None,
        look=None if suffix not in _COUNTS else partial(_COUNTS[suffix], path),
    )


def _csv(source: CsvFile) -> ItemSource:
    source.check()
    path = _readable(Path(source.path), "items file")
    there = replace(source, path=path)
    return ItemSource(
        place=f"the file '{path}'",
        identity={"kind": "csv", "path": str(path)},
        reader=lambda: ThreadReader(lambda: csv_rows(there)),
        look=partial(count_csv_rows, there),
    )


def _dead_letters(source: DeadLetters) -> ItemSource:
    path = _readable(Path(source.path), "dead letters")
    return ItemSource(
        place=f"the dead letters of '{path}'",
        identity={"kind": "dead_letters", "path": str(path)},
        reader=lambda: ThreadReader(lambda: dead_items(path)),
    )


def _readable(path: Path, what: str) -> Path:
    """Return the path from the root on, of a file that can be read."""
    path = path.absolute()
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)  # to open a pipe would wait for somebody who writes
        if is_file:
            path.open("rb").close()
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ValidationError(f"{what} '{path}' cannot be read: {reason}") from error
    if not is_file:
        raise ValidationError(f"{what} '{path}' cannot be read: it is no file")
    return path


def screen_source(
    source: ItemSource, *, limit: int | None = None, problem: Callable[[object], str | None] | None = None
) -> ItemSource:
    """Return that source with fewer items.

    Args:
        source: It is never taken for a list afterwards: its items are pulled one by one.
        limit: How many items at most, from the first on; None: all.
        problem: What is wrong with an item, None where nothing is.
    """
    count = source.count if limit is None or source.count is None else min(limit, source.count)
    look = source.look
    return replace(
        source,
        reader=lambda: _ScreenedReader(source.reader(), limit, problem, source.place),
        count=count,
        look=look if look is None or limit is None else lambda: min(limit, look()),
        is_list=False,
        items=(),
    )


class _ScreenedReader:
    """Reads as far as it may."""

    def __init__(
        self, reader: ItemReader, limit: int | None, problem: Callable[[object], str | None] | None, place: str
    ) -> None:
        self._reader = reader
        self._left = limit
        self._problem = problem
        self._place = place

    async def next(self, count: int) -> Pulled:
        """Return the next entries."""
        if self._left is not None:
            count = min(count, self._left)
            if not count:
                return Pulled((), is_exhausted=True)
        pulled = await self._reader.next(count)
        is_exhausted = pulled.is_exhausted
        if self._left is not None:
            self._left -= len(pulled.items)
            is_exhausted = is_exhausted or not self._left
        items = pulled.items if self._problem is None else [self._screen(entry) for entry in pulled.items]
        return Pulled(items, is_exhausted=is_exhausted)

    def _screen(self, entry: ItemEntry) -> ItemEntry:
        if isinstance(entry, RefusedItem) or self._problem is None:
            return entry
        index, item = entry
        problem = self._problem(item)
        if problem is None:
            return entry
        return RefusedItem(index, str(item), ValidationError(f"{self._place}, item {index}: {problem}"), item)

    async def close(self) -> None:
        """Let the source go."""
        await self._reader.close()
