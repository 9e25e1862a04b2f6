"""Read the files of a folder as items, in the order of their paths."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.pulling import Entries, ItemEntry, RefusedItem
from ensemble_ray.values.attachments import Attachment, File

_MAGIC = re.compile(r"[*?\[]")
_DEEP = "**"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a folder as a source: `MapEnsemble(items=Files("photos/*.jpg"), ...)`.

    Each item is an `Image`, an `Audio` or a `File`, by its content. Its `name` is its path below the folder. The order is
    that of the paths.

    Attributes:
        path: A folder, for all files in it and below it, or a pattern: `*` and `?` match inside a name, `**` matches
            folders. Names that begin with a dot are left out, and links to folders are not followed.
    """

    path: str | Path

    @property
    def folder(self) -> Path:
        """The folder of the pattern: its parts before the first `*`, `?` or `[`."""
        return self._split()[0]

    def check(self) -> None:
        """Raise a ValidationError if the folder cannot be read, or has no such file."""
        folder, pattern = self._split()
        try:
            os.scandir(folder).close()
        except (OSError, ValueError) as error:
            raise ValidationError(f"items folder '{folder}' cannot be read: {_reason(error)}") from error
        if next(self.found(), None) is None:
            raise ValidationError(f"items folder '{folder}' has no file '{'/'.join(pattern)}'")

    def found(self) -> Generator[FoundFile]:
        """Yield the files in the order of their paths, and folders that cannot be read."""
        folder, pattern = self._split()
        return _walk(folder, "", pattern, frozenset({0}))

    def _split(self) -> tuple[Path, Sequence[str]]:
        parts = Path(self.path).parts
        magic = () if os.path.isdir(self.path) else enumerate(parts)  # noqa: PTH112  as below
        fixed = next((at for at, part in magic if _MAGIC.search(part)), len(parts))
        pattern = parts[fixed:] or (_DEEP,)
        return Path(*parts[:fixed]).absolute(), (*pattern, "*") if pattern[-1] == _DEEP else pattern


class FoundFile(NamedTuple):
    """A file, or a folder that cannot be read."""

    name: str  # below the folder of the pattern, with `/`
    path: Path
    problem: str = ""


def folder_items(source: Files) -> Entries:
    """Yield the files. A file or a folder that cannot be read is a refused entry."""
    with closing(source.found()) as found:
        for index, each in enumerate(found):
            if each.problem:
                error = ValidationError(f"items folder '{source.folder}', {each.problem}")
                yield RefusedItem(index, each.name, error, File(each.path, name=each.name))
            else:
                yield read_item(index, each.path, each.name)


def read_item(index: int, path: Path, name: str) -> ItemEntry:
    try:
        return index, Attachment.of_file(path, name=name)
    except ValidationError as error:
        return RefusedItem(index, name, error, File(path, name=name))


def count_files(source: Files) -> int:
    return sum(1 for _ in source.found())


def is_folder_of_items(path: Path) -> bool:
    """Return whether a path is a folder, or a pattern of files in one."""
    return _MAGIC.search(str(path)) is not None or os.path.isdir(path)  # noqa: PTH112  `Path.is_dir` raises for a long name


def _walk(folder: Path, above: str, pattern: Sequence[str], places: frozenset[int]) -> Generator[FoundFile]:
    """Yield the matching files. `places`: the parts of the pattern that a name in this folder may match."""
    try:
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        name = above.rstrip("/")
        yield FoundFile(name, folder, f"folder '{name}' cannot be read: {_reason(error)}")
        return
    reached = {after for at in places for after in _skip_folders(pattern, at)}
    for entry in ordered:
        if entry.name.startswith("."):
            continue
        matched = {at for at in reached if pattern[at] != _DEEP and fnmatch(entry.name, pattern[at])}
        if entry.is_dir(follow_symlinks=False):
            inside = {at + 1 for at in matched if at + 1 < len(pattern)} | {
                at for at in reached if pattern[at] == _DEEP
            }
            if inside:
                yield from _walk(folder / entry.name, f"{above}{entry.name}/", pattern, frozenset(inside))
        elif len(pattern) - 1 in matched and not entry.is_dir():
            yield FoundFile(f"{above}{entry.name}", folder / entry.name)


def _skip_folders(pattern: Sequence[str], at: int) -> Iterator[int]:
    """Yield the place, and the next ones if it is `**`, which also matches no folder."""
    yield at
    while pattern[at] == _DEEP:
        at += 1
        yield at


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)  # a ValueError: a null character in the name
