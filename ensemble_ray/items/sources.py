"""Sources of the items of a map-reduce: `source_of` turns the user's `items` into a source for each run (S-MR-120).

A file is opened once to check that it can be read. No item is read before a run requests it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import cast

from pydantic import BaseModel, JsonValue

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.pulling import (
    AsyncReader,
    Entries,
    ItemEntry,
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

#: The message about an empty source (S-MR-10, S-MR-122).
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
#: Limit of a quoted text in an error, characters.
_SHOWN = 80


@dataclass(slots=True, kw_only=True)
class ItemSource:
    """Items that can be read from the beginning."""

    #: description for messages
    place: str
    #: kind, and path of a file, for the record
    identity: Mapping[str, JsonValue]
    #: returns a reader that begins at the first item
    reader: Callable[[], ItemReader]
    #: number of items if known without reading them
    count: int | None = None
    #: counts the items of a file, in the calling thread; None: only a run can count them
    look: Callable[[], int] | None = None
    #: whether it is a sequence in memory, which static mode maps at construction
    is_list: bool = False
    #: the items of a sequence; empty for other sources
    items: Sequence[object] = ()
    #: whether it is an iterator, which only one run can read
    is_one_shot: bool = False
    _is_open: bool = field(default=False, init=False)

    def open(self) -> ItemReader:
        """Return a reader from the first item on. A ValidationError: an iterator was opened before (S-MR-124)."""
        if self.is_one_shot and self._is_open:
            msg = (
                "items is an iterator that an earlier run has consumed: pass a list, a file, or a new iterator per run"
            )
            raise ValidationError(msg)
        self._is_open = True
        return self.reader()


def source_of(items: object) -> ItemSource:
    """Return the source of the user's `items` (S-MR-120). A ValidationError: these are no items."""
    match items:
        case None:
            raise ValidationError(NO_ITEMS)
        case ItemSource():
            return items
        case DeadLetters():
            path = _readable(Path(items.path), "dead letters")
            return ItemSource(
                place=f"the dead letters of '{path}'",
                identity={"kind": "dead_letters", "path": str(path)},
                reader=lambda: ThreadReader(lambda: dead_items(path)),
            )
        case CsvFile():
            return _csv(items)
        case str() | os.PathLike():
            return _file(cast("str | os.PathLike[str]", items))
        case _ if (table := rows_of_table(items)) is not None:
            return _table(table)
        case bytes() | bytearray() | memoryview() | Mapping() | BaseModel():
            raise _not_items(items)
        case Sequence():
            return _sequence(cast("Sequence[object]", items))
        case _:
            return _iterable(items)


_ADVICE = f"pass a list of items, an iterable, or a path that ends in {_SUFFIXES}"


def _not_items(items: object) -> ValidationError:
    """Return the error about an object that Python can iterate over, but whose parts are not items."""
    advice = f"items is {type(items).__name__}: {_ADVICE}"
    match items:
        case Mapping():
            advice += ". For one item pass [mapping], for its parts list(mapping.values()) or list(mapping.items())"
        case BaseModel():
            advice += ". For one item pass a list with it"
        case _:
            pass
    return ValidationError(advice)


def _sequence(items: Sequence[object]) -> ItemSource:
    if not len(items):
        raise ValidationError(NO_ITEMS)
    # The user may change a list later (S-CONV-5). Another sequence may load each item from a disk.
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
            f"items is the {what} '{shown}': pass a list of items, or a path that ends in {_SUFFIXES}"
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


def _readable(path: Path, what: str) -> Path:
    path = path.absolute()
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)  # opening a pipe would wait for its writer
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
    """Return a source with at most `limit` items; `problem` returns the reason to refuse an item, or None.

    The result reads its items one by one, even if the source is a list.
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
    """Reads up to a limit and refuses items with a problem."""

    def __init__(
        self, reader: ItemReader, limit: int | None, problem: Callable[[object], str | None] | None, place: str
    ) -> None:
        self._reader = reader
        self._left = limit
        self._problem = problem
        self._place = place

    async def next(self, count: int) -> Pulled:
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
        await self._reader.close()
