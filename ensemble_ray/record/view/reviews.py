"""Review gates as rows of a trace's tree: who decided what, and an edit as the difference that it made. Pure.

In: the metadata of a task's trace. Out: titles and details, as they are recorded; whoever shows them makes them safe.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ensemble_ray.facts.lenient import as_mapping, as_sequence, as_text

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Lines of a difference that are shown.
_MOST_LINES = 20
_TIMINGS = {"before_execution": "before", "during_execution": "during", "after_execution": "after"}
_VERDICTS = {"approve": "approved", "edit": "edited", "exit": "ended the run", "waiting": "waits"}


def review_lines(metadata: Mapping[str, object]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Return a title and details for each gate, and the lines of each difference behind it, which have no details."""
    for gate in map(as_mapping, as_sequence(metadata.get("reviews"))):
        verdict, timing = as_text(gate.get("verdict")), as_text(gate.get("timing"))
        asked = as_text(gate.get("question")) or as_text(gate.get("prompt"))
        title = f"review {_TIMINGS.get(timing, timing)}: {_VERDICTS.get(verdict, verdict)}"
        details = (as_text(gate.get("by")), as_text(gate.get("comment")), "timed out" if gate.get("timed_out") else "")
        yield f"{title}, asked: {asked}" if asked else title, tuple(each for each in details if each)
        if verdict == "edit":
            for line in _difference(as_text(gate.get("original")), as_text(gate.get("text"))):
                yield line, ()


def _difference(before: str, after: str) -> Sequence[str]:
    """Return the lines that an edit took away and brought, with little of what stands around them."""
    compared = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=1)
    lines = [line for line in compared if not line.startswith(("---", "+++", "@@"))]
    left_out = len(lines) - _MOST_LINES
    return lines if left_out <= 0 else [*lines[:_MOST_LINES], f"... {left_out:,} more lines"]
