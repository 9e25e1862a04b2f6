"""Draws what docs/architecture.md shows of a task's states, from the table that the scheduling machines obey.

In: `ensemble_ray.schedule.states`. Out: the part of the page between its two markers. A picture drawn from the table
cannot be wrong about it; a test compares the page with what this script draws.

    python docs/make_diagrams.py            write the page
    python docs/make_diagrams.py --check    say whether the page is what would be written
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ensemble_ray.schedule import states
from ensemble_ray.schedule.states import TRANSITIONS, TaskState

PAGE = Path(__file__).with_name("architecture.md")
BEGIN = "<!-- drawn by docs/make_diagrams.py: begin -->"
END = "<!-- drawn by docs/make_diagrams.py: end -->"


def state_diagram() -> str:
    """The states and their transitions as a Mermaid block."""
    lines = ["stateDiagram-v2", f"    [*] --> {TaskState.PENDING}"]
    lines += [f"    {before} --> {after}: {why}" for (before, after), why in TRANSITIONS.items()]
    lines += [f"    {state} --> [*]" for state in TaskState if state.is_resolved]
    return "\n".join(["```mermaid", *lines, "```"])


def state_table() -> str:
    """What each state means, in the words of the module that holds the table."""
    meanings = dict(re.findall(r"^`(\w+)` +(.+)$", states.__doc__ or "", flags=re.MULTILINE))
    rows = [f"| `{state}` | {meanings[state]} |" for state in TaskState]
    return "\n".join(["| State | Meaning |", "|---|---|", *rows])


def drawn(page: str) -> str:
    """The page with its drawn part made anew.

    Raises:
        ValueError: the page has lost its markers.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        msg = f"{PAGE.name}: the markers are gone; put them back: {BEGIN} ... {END}"
        raise ValueError(msg)
    return f"{before}{BEGIN}\n\n{state_diagram()}\n\n{state_table()}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the page, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    if "--check" in arguments:
        return 0 if drawn(page) == page else 1
    PAGE.write_text(drawn(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
