"""Sources of the items of a map-reduce. No item is read before a run requests it (S-MR-120)."""

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
from ensemble_ray.items import pulling
from ensemble_ray.items.folders import Files, count_files, folder_items, is_folder_of_items
from ensemble_ray.items.results import DeadLetters, dead_items
from ensemble_ray.items.tables import Table, parquet_row_count, parquet_rows, rows_of_table
from ensemble_ray.items.text_files import CsvFile, count_csv_rows, count_lines, csv_rows, json_lines
from ensemble_ray.values.attachments import Attachment

NO_ITEMS = "items must not be None or empty"  # S-MR-10, S-MR-122
_SUFFIXES = ".jsonl, .csv or .parquet"
_FORMATS: Mapping[str, tuple[Callable[[Path], pulling.Entries], Callable[[Path], int] | None]] = {
    ".jsonl": (json_lines, count_lines),
    ".csv": (lambda path: csv_rows(CsvFile(path)), lambda path: count_csv_rows(CsvFile(path))),
    ".parquet": (parquet_rows, None),
}
_SHOWN = 80


@dataclass(slots=True, kw_only=True)
class ItemSource:
    """Items that can be read from the beginning."""

    place: str  # for messages
    identity: Mapping[str, JsonValue]  # for the record
    reader: Callable[[], pulling.ItemReader]  # from the first item on
    count: int | None = None  # if known without reading
    look: Callable[[], int] | None = None  # counts the items of a file, in the calling thread
    is_list: bool = False  # a sequence, which static mode maps at construction
    items: Sequence[object] = ()  # of a sequence
    is_one_shot: bool = False  # an iterator
    _is_open: bool = field(default=False, init=False)

    def open(self) -> pulling.ItemReader:
        """Return a reader. A ValidationError: an iterator was opened before (S-MR-124)."""
        if self.is_one_shot and self._is_open:
            msg = (
                "items is an iterator that an earlier run has consumed: pass a list, a file, or a new iterator per run"
            )
            raise ValidationError(msg)
        self._is_open = True
        return self.reader()


def source_of(items: object) -> ItemSource:
    """Return the source of the user's `items` (S-MR-120)."""
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
                reader=lambda: pulling.ThreadReader(lambda: dead_items(path)),
            )
        case CsvFile():
            return _csv(items)
        case Files():
            return _folder(items)
        case str() | os.PathLike():
            return _file(cast("str | os.PathLike[str]", items))
        case _ if (table := rows_of_table(items)) is not None:
            return _table(table)
        case bytes() | bytearray() | memoryview() | Mapping() | BaseModel() | Attachment():
            raise _not_items(items)
        case Sequence():
            return _sequence(cast("Sequence[object]", items))
        case _:
            return _iterable(items)


_ADVICE = f"pass a list of items, an iterable, a folder, or a path that ends in {_SUFFIXES}"


def _not_items(items: object) -> ValidationError:
    """Python can iterate over such an object, but its parts are not items."""
    advice = f"items is {type(items).__name__}: {_ADVICE}"
    match items:
        case Mapping():
            advice += ". For one item pass [mapping], for its parts list(mapping.values()) or list(mapping.items())"
        case BaseModel() | Attachment():
            advice += ". For one item pass a list with it"
        case _:
            pass
    return ValidationError(advice)


def _sequence(items: Sequence[object]) -> ItemSource:
    if not len(items):
        raise ValidationError(NO_ITEMS)
    # S-CONV-5. Another sequence may load each item from a disk.
    kept = tuple(items) if isinstance(items, list) else items
    is_plain = isinstance(kept, tuple | range)
    return ItemSource(
        place=f"{len(kept)} items",
        identity={"kind": "list", "count": len(kept)},
        reader=(lambda: pulling.ListReader(kept))
        if is_plain
        else (lambda: pulling.ThreadReader(lambda: pulling.number_items(kept))),
        count=len(kept),
        is_list=True,
        items=kept,
    )


def _iterable(items: object) -> ItemSource:
    rows = getattr(items, "iter_rows", None)
    if callable(rows):
        make_rows = cast("Callable[[], Iterable[object]]", rows)
        reader = partial(pulling.ThreadReader, lambda: pulling.number_items(make_rows()))
        return ItemSource(place="a Dataset", identity={"kind": "dataset"}, reader=reader)
    if isinstance(items, AsyncIterable):
        several = cast("AsyncIterable[object]", items)
        is_once = isinstance(items, AsyncIterator)
        place, read = f"an async {'iterator' if is_once else 'iterable'}", partial(pulling.AsyncReader, several)
        return ItemSource(place=place, identity={"kind": "async"}, reader=read, is_one_shot=is_once)
    if isinstance(items, Iterable) or hasattr(type(items), "__getitem__"):
        each = cast("Iterable[object]", items)
        is_once = isinstance(items, Iterator)
        place = "an iterator" if is_once else f"a {type(items).__name__}"
        reader = partial(pulling.ThreadReader, lambda: pulling.number_items(each))
        return ItemSource(place=place, identity={"kind": "iterable"}, reader=reader, is_one_shot=is_once)
    raise ValidationError(f"items is of type {type(items).__name__}, which has no items: {_ADVICE}")


def _table(table: Table) -> ItemSource:
    if table.count == 0:
        raise ValidationError(NO_ITEMS)
    return ItemSource(
        place=table.place,
        identity={"kind": "table", "count": table.count},
        reader=lambda: pulling.ThreadReader(lambda: pulling.number_items(table.rows())),
        count=table.count,
        is_one_shot=table.is_one_shot,
    )


def _file(source: str | os.PathLike[str]) -> ItemSource:
    text = os.fsdecode(source)
    path = Path(text)
    suffix = path.suffix.lower()
    rows, count = _FORMATS.get(suffix, (None, None))
    if rows is None and "\0" not in text and is_folder_of_items(path):
        return _folder(Files(path))
    if rows is None:
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
        what = "text" if isinstance(source, str) else "path"
        msg = f"items is the {what} '{shown}': pass a list of items, a folder, or a path that ends in {_SUFFIXES}"
        raise ValidationError(msg)
    path = _readable(path, "items file")
    return ItemSource(
        place=f"the file '{path}'",
        identity={"kind": suffix[1:], "path": str(path)},
        reader=lambda: pulling.ThreadReader(lambda: rows(path)),
        count=parquet_row_count(path) if suffix == ".parquet" else None,
        look=None if count is None else partial(count, path),
    )


def _csv(source: CsvFile) -> ItemSource:
    source.check()
    path = _readable(Path(source.path), "items file")
    there = replace(source, path=path)
    return ItemSource(
        place=f"the file '{path}'",
        identity={"kind": "csv", "path": str(path)},
        reader=lambda: pulling.ThreadReader(lambda: csv_rows(there)),
        look=partial(count_csv_rows, there),
    )


def _folder(source: Files) -> ItemSource:
    there = replace(source, path=Path(source.path).absolute())
    there.check()
    return ItemSource(
        place=f"the folder '{there.path}'",
        identity={"kind": "files", "path": str(there.path)},
        reader=lambda: pulling.ThreadReader(lambda: folder_items(there)),
        look=partial(count_files, there),
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
    """Return a source with at most `limit` items; `problem` returns the reason to refuse an item.

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
    def __init__(
        self, reader: pulling.ItemReader, limit: int | None, problem: Callable[[object], str | None] | None, place: str
    ) -> None:
        self._reader = reader
        self._left = limit
        self._problem = problem
        self._place = place

    async def next(self, count: int) -> pulling.Pulled:
        if self._left is not None:
            count = min(count, self._left)
            if not count:
                return pulling.Pulled((), is_exhausted=True)
        pulled = await self._reader.next(count)
        is_exhausted = pulled.is_exhausted
        if self._left is not None:
            self._left -= len(pulled.items)
            is_exhausted = is_exhausted or not self._left
        items = pulled.items if self._problem is None else [self._screen(entry) for entry in pulled.items]
        return pulling.Pulled(items, is_exhausted=is_exhausted)

    def _screen(self, entry: pulling.ItemEntry) -> pulling.ItemEntry:
        if isinstance(entry, pulling.RefusedItem) or self._problem is None:
            return entry
        index, item = entry
        problem = self._problem(item)
        if problem is None:
            return entry
        return pulling.RefusedItem(index, str(item), ValidationError(f"{self._place}, item {index}: {problem}"), item)

    async def close(self) -> None:
        await self._reader.close()
