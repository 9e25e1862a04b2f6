"""How a list is cut into groups: by size or by count. Package: schedule, pure.

In come sizes or a count, out go groups of positions. Nothing is ever dropped: what is too large for any group gets
one of its own, and who asked finds it there.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["chunks", "first_fit_decreasing"]


def first_fit_decreasing(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Pack largest first, each into the first bin where it fits, else into a new one (S-MR-70 to S-MR-73).

    Time is in proportion to n log n. A tournament over the bins' rooms finds the first one that fits: a node knows the
    largest room below it. A bin that is not open yet has all of its room, so that it is found when no open one fits.

    Args:
        sizes: Size of each position, >= 0.
        budget: What a bin may hold; one that a larger position has for itself takes nothing more, not even 0.

    Returns:
        Positions per bin, bins and their contents in the order in which they were placed.
    """
    leaf_count = 1 << (len(sizes) - 1).bit_length() if sizes else 1
    # The node n has the children 2n and 2n + 1; the bin b is the leaf leaf_count + b.
    free = [budget] * (2 * leaf_count)
    bins: list[list[int]] = []
    for position in sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True):  # stable, also in reverse
        size = sizes[position]
        node = _find_first_fit(free, leaf_count, size) if size <= budget else leaf_count + len(bins)
        if node - leaf_count == len(bins):
            bins.append([])
        bins[node - leaf_count].append(position)
        _reserve(free, node, size)
    return bins


def chunks(count: int, size: int) -> list[range]:
    """Positions 0 to count - 1 in order, `size` to a group; the last group may be smaller (S-MR-32)."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _find_first_fit(free: list[int], leaf_count: int, size: int) -> int:
    node = 1
    while node < leaf_count:
        node *= 2
        if free[node] < size:
            node += 1
    return node


def _reserve(free: list[int], node: int, size: int) -> None:
    free[node] -= size
    node //= 2
    while node:
        most_free = max(free[2 * node], free[2 * node + 1])
        if most_free == free[node]:
            return
        free[node] = most_free
        node //= 2
