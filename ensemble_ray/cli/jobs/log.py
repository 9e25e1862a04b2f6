"""A job's log, told apart: what a command printed as its result, and everything else. Package: cli. Pure.

In: pieces of a log that has both streams of a program. Out: lines, and results exactly as they were written. The program
writes each result in one line of JSON behind a mark that nobody else knows (`terminal.frame_results`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["JobLog", "JobLogLine"]


#: What Ray says of the job itself.
_OF_RAY = re.compile(r"[\d-]+ [\d:,]+\s+INFO job_manager\.py:\d+ -- ")


class JobLogLine(NamedTuple):
    """One line of a log."""

    text: str
    is_result: bool


class JobLog:
    """Takes a log piece by piece.

    Args:
        mark: What stands before results.
    """

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._rest = ""

    def feed(self, text: str) -> Iterator[JobLogLine]:
        """Return the lines that are whole now."""
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            yield from self._split(line)

    def close(self) -> Iterator[JobLogLine]:
        """Return what is left of a last line without an end."""
        rest, self._rest = self._rest, ""
        if rest:
            yield from self._split(rest)

    def _split(self, line: str) -> Iterator[JobLogLine]:
        if _OF_RAY.match(line):
            return
        before, mark, found = line.partition(self._mark)
        if not mark:
            yield JobLogLine(line, is_result=False)
            return
        try:
            result = json.loads(found)
        except ValueError:  # the command, shown by somebody
            yield JobLogLine(line, is_result=False)
            return
        if before:  # somebody wrote a line without an end
            yield JobLogLine(before, is_result=False)
        yield JobLogLine(str(result), is_result=True)
