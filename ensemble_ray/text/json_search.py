"""Find JSON in a text of unknown origin. Package: text, below everything that reads texts of models. Pure.

In: a text, and where a value may begin. Out: the first value that decodes, and where it stands. The work is bounded:
a text may be made so that each of its brackets costs a pass over the rest of it.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import islice

__all__ = ["FoundJson", "find_json"]

#: Places that are tried before a text counts as garbage.
_MOST_OPENINGS = 1000
#: How often the length of the text may be read in vain, all places together. A text in prose needs less than one pass:
#: what does not decode fails within a few characters, and what is nested in it is tried before what follows.
_MOST_PASSES = 8
_decoder = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class FoundJson:
    """A JSON value in a text."""

    value: object
    start: int
    end: int


def find_json(text: str, openings: re.Pattern[str]) -> FoundJson | None:
    """Return the first JSON value that decodes; None where there is none, or finding it would take too long.

    Args:
        text: Any text.
        openings: Matches where a value may begin; must be linear.
    """
    left = _MOST_PASSES * len(text)
    for opening in islice(openings.finditer(text), _MOST_OPENINGS):
        start = opening.start()
        try:
            value, end = _decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            # an unterminated string is reported where it begins, and was read to the end of the text
            left -= (len(text) if error.msg.startswith("Unterminated") else error.pos) - start
        except ValueError:  # a number of more digits than Python converts; where it stands is not said
            left -= len(text) - start
        except RecursionError:  # nested beyond reason, and so it is from the next places on
            return None
        else:
            return FoundJson(value, start, end)
        if left < 0:
            return None
    return None
