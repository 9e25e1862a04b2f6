"""Find JSON in a text of unknown origin. Package: text, below everything that reads texts of models. Pure.

In: a text, and where a value may begin. Out: the values that decode, and where they stand. The work is bounded: a text may be
made so that each of its brackets costs a pass over the rest of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

__all__ = ["FoundJson", "find_json", "iter_json"]

#: Places that are tried in vain before the rest of a text counts as garbage: an error counts the lines before it.
_MOST_OPENINGS = 1000
#: How often the length of the text may be read in vain, all places together: an unterminated string is read to the end.
_MOST_PASSES = 8
_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class FoundJson:
    """A JSON value in a text."""

    value: object
    start: int
    end: int


def find_json(text: str, openings: re.Pattern[str]) -> FoundJson | None:
    """Return the first of the values that `iter_json` yields; None: there is none."""
    return next(iter_json(text, openings), None)


def iter_json(text: str, openings: re.Pattern[str]) -> Iterator[FoundJson]:
    """Yield the JSON values that decode, in the order of the text; what finding more would take too long for is left out.

    A value inside another one, or inside the part of a broken one that decodes, is not yielded by itself.

    Args:
        text: Any text.
        openings: Matches where a value may begin; must be linear.
    """
    left = _MOST_PASSES * len(text)
    failed = position = 0
    while failed < _MOST_OPENINGS and left >= 0 and (opening := openings.search(text, position)) is not None:
        start = opening.start()
        failed += 1
        position = start + 1
        try:
            value, end = _decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            # an unterminated string is reported where it begins, and was read to the end of the text
            left -= (len(text) if error.msg.startswith("Unterminated") else error.pos) - start
            position = max(position, error.pos)
        except ValueError:  # a number of more digits than Python converts; where it stands is not said
            left -= len(text) - start
        except RecursionError:  # nested beyond reason, and so it is from the next places on
            return
        else:
            failed -= 1
            position = end
            yield FoundJson(value, start, end)
