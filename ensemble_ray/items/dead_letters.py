"""Failed items in a file, and out of it again. Room: items."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.index_set import IndexSet
from ensemble_ray.items.pulling import Entries
from ensemble_ray.items.text_files import loads_line

__all__ = ["DeadLetters", "dead_items"]


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The failed items of an earlier run, as a source of items (S-MR-126).

    Attributes:
        path: The file that the run had as `dead_letters`.
    """

    path: str | Path


def dead_items(path: Path) -> Entries:
    """The items of a dead-letter file with their first indices, each once.

    Raises:
        ValidationError: a line is no dead letter.
    """
    seen = IndexSet()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            index, item = _letter(line, f"dead letters '{path}', line {number}")
            if seen.add(index):
                yield index, item


def _letter(line: bytes, where: str) -> tuple[int, object]:
    try:
        found = loads_line(line)
    except ValueError as error:
        raise ValidationError(
            f"{where}: not JSON: {error}; resume the run that wrote it, or remove the line"
        ) from error
    letter = cast("Mapping[str, object]", found) if isinstance(found, dict) else {}
    index = letter.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0 or "item" not in letter:
        raise ValidationError(f"{where}: no dead letter: it needs 'index' and 'item'")
    return index, letter["item"]
