"""Failed items in a file, and out of it again. Package: items.

In: items that failed. Out: one JSON line for each, once per run, resumed or not (S-MR-151); and those items again, as a
source (S-MR-126). Several runs may write into one file, also the run that reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from ensemble_ray.errors import ValidationError
from ensemble_ray.items.index_set import IndexSet
from ensemble_ray.items.line_file import LineFile, is_carried, json_line
from ensemble_ray.items.pulling import Entries
from ensemble_ray.items.text_files import loads_line
from ensemble_ray.process.threads import threads
from ensemble_ray.values.outputs import FailedItem

__all__ = ["DeadLetterFile", "DeadLetters", "dead_items"]


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """The failed items of earlier runs, as a source: `MapEnsemble(items=DeadLetters("failed.jsonl"), ...)`.

    Each comes once, with the index that it had then.

    Attributes:
        path: The file that those runs had as `dead_letters`.
    """

    path: str | Path


class DeadLetterFile:
    """Takes the failed items of one run. Made by `open`."""

    def __init__(self, lines: LineFile, run_id: str) -> None:
        """Write into that file."""
        self._lines = lines
        self._run_id = run_id

    @classmethod
    async def open(cls, path: str | Path, *, run_id: str, is_resumed: bool) -> DeadLetterFile:
        """Go on with the file, or begin one; an item that has a line of this run gets no second one.

        Raises:
            RecordError: it cannot be written.
        """
        lines = threads.run(LineFile, Path(path), "dead letters", partial(_index_of, run_id), is_resumed=is_resumed)
        return cls(await lines, run_id)

    async def write(self, failed: Sequence[FailedItem]) -> None:
        """Write a line for each.

        Raises:
            RecordError: they cannot be written.
        """
        await threads.run(self._lines.append, [(each.index, partial(_line_of, each, self._run_id)) for each in failed])

    async def close(self) -> None:
        """Close the file."""
        await threads.run(self._lines.close)


def _line_of(failed: FailedItem, run_id: str) -> bytes:
    is_text = not is_carried(failed.item)
    row = {
        "index": failed.index,
        "item": _text_of(failed.item) if is_text else failed.item,
        "error_type": failed.error_type,
        "message": failed.message,
        "attempts": failed.attempts,
        "run_id": run_id,
        **({} if failed.raw is None else {"raw": failed.raw}),
    }
    return json_line({**row, "is_text": True} if is_text else row)


def _text_of(item: object) -> str:
    try:
        return str(item)
    except Exception:  # noqa: BLE001  a text of the user's class that fails
        return f"<{type(item).__name__}>"


def _index_of(run_id: str, line: bytes) -> int | None:
    """Return the index of a line that this run wrote; lines of other runs have none."""
    try:
        index, row = _parse_row(line, "")
    except ValidationError:
        return None
    return index if row.get("run_id") == run_id else None


def dead_items(path: Path) -> Entries:
    """Return the items of a dead-letter file with their first indices, each once.

    Raises:
        ValidationError: a line is no dead letter.
    """
    seen = IndexSet()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            index, row = _parse_row(line, f"dead letters '{path}', line {number}")
            if seen.add(index):
                yield index, row["item"]


def _parse_row(line: bytes, where: str) -> tuple[int, Mapping[str, object]]:
    try:
        found = loads_line(line)
    except ValueError as error:
        raise ValidationError(
            f"{where}: not JSON: {error}; resume the run that wrote it, or remove the line"
        ) from error
    row = cast("Mapping[str, object]", found) if isinstance(found, dict) else {}
    index = row.get("index")
    if not isinstance(index, int) or isinstance(index, bool) or index < 0 or "item" not in row:
        raise ValidationError(f"{where}: no dead letter: it needs 'index' and 'item'")
    return index, row
