"""The lines that join the rows of a tree. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def branch_lines(depths: Sequence[int]) -> list[str]:
    """Return what stands before each row: for each depth, whether something of that depth is still to come."""
    found: list[str] = []
    #: depths of which a later row belongs to the same parent
    to_come: set[int] = set()
    for row_depth in reversed(depths):
        parts = ["│  " if depth in to_come else "   " for depth in range(1, row_depth)]
        if row_depth:
            parts.append("├─ " if row_depth in to_come else "└─ ")
        found.append("".join(parts))
        to_come = {depth for depth in to_come if depth < row_depth} | {row_depth}
    return found[::-1]
