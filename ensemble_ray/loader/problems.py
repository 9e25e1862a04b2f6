"""What is wrong with a team file, and where. Package: loader. Pure.

In: one finding at a time, each with its line and column. Out: one `ValidationError` that names them all, in file order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

from ensemble_ray.errors import ValidationError

__all__ = ["Problems", "Spot", "list_known_names", "nearest", "suggestion"]

#: Names and findings that one message lists.
_SHOWN_NAMES = 20
_SHOWN_PROBLEMS = 20
#: Names that a misspelt one is compared with, and their longest, characters: items bring names of their own.
_MOST_COMPARED, _LONGEST_COMPARED = 1000, 100


@dataclass(frozen=True, slots=True, order=True)
class Spot:
    """A place in a file; both numbers count from 1."""

    line: int
    column: int


class Problems:
    """Findings in one file."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._found: dict[tuple[Spot, str], None] = {}

    def __len__(self) -> int:
        return len(self._found)

    def add(self, spot: Spot, where: str, text: str) -> None:
        """Note one.

        Args:
            spot: Its line and column.
            where: The path of keys, such as `agents.writer.goal`; empty for the whole file.
            text: What is wrong and what to do.
        """
        self._found[spot, f"{where}: {text}" if where else text] = None

    def check(self) -> None:
        """Let the file pass if nothing was found.

        Raises:
            ValidationError: something was; everything is named, each with file, line and column.
        """
        if not self._found:
            return
        lines = [f"{self._file}:{spot.line}:{spot.column}: {text}" for spot, text in sorted(self._found)]
        if len(lines) == 1:
            raise ValidationError(lines[0])
        more = [f"and {len(lines) - _SHOWN_PROBLEMS} more"] if len(lines) > _SHOWN_PROBLEMS else []
        listed = "\n  ".join([*lines[:_SHOWN_PROBLEMS], *more])
        raise ValidationError(f"{self._file} has {len(lines)} problems:\n  {listed}")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Return the known name nearest to that one, if any is near."""
    if len(name) > _LONGEST_COMPARED:
        return []
    by_lower = {each.lower(): each for each in islice(known, _MOST_COMPARED) if len(each) <= _LONGEST_COMPARED}
    return [by_lower[close] for close in difflib.get_close_matches(name.lower(), by_lower, n=1)]


def suggestion(name: str, known: Iterable[str]) -> str:
    """Return ` Did you mean 'x'?` for the known name nearest to that one, or nothing."""
    close = nearest(name, known)
    return f" Did you mean '{close[0]}'?" if close else ""


def list_known_names(known: Iterable[str]) -> str:
    """Return `Known: [a, b]`, cut where there are very many."""
    names = list(known)
    more = f", and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return f"Known: [{', '.join(names[:_SHOWN_NAMES])}{more}]"
