"""How a list is cut into groups: by weight or by count. Package: schedule, pure.

In come weights or a count, out go groups of positions. Nothing is ever dropped: what is too heavy for any group gets
one of its own, and who asked finds it there.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["chunks", "first_fit_decreasing"]


def first_fit_decreasing(weights: Sequence[int], budget: int) -> list[list[int]]:
    """Pack heaviest first, each into the first bin where it fits, else into a new one (S-MR-70 to S-MR-73).

    Time is in proportion to n log n. A tournament over the bins' rooms finds the first one that fits: a node knows the
    largest room below it. A bin that is not open yet has all of its room, so that it is found when no open one fits.

    Args:
        weights: Weight of each position, >= 0.
        budget: What a bin may weigh; one that a heavier position has for itself takes nothing more, not even 0.

    Returns:
        Positions per bin, bins and their contents in the order in which they were placed.
    """
    size = 1 << (len(weights) - 1).bit_length() if weights else 1
    free = [budget] * (2 * size)  # the node n has the children 2n and 2n + 1; the bin b is the leaf size + b
    bins: list[list[int]] = []
    for position in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):  # stable, also in reverse
        weight = weights[position]
        node = _find_first_fit(free, size, weight) if weight <= budget else size + len(bins)
        if node - size == len(bins):
            bins.append([])
        bins[node - size].append(position)
        _reserve(free, node, weight)
    return bins


def chunks(count: int, size: int) -> list[range]:
    """Positions 0 to count - 1 in order, `size` to a group; the last group may be smaller (S-MR-32)."""
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _find_first_fit(free: list[int], size: int, weight: int) -> int:
    node = 1
    while node < size:
        node *= 2
        if free[node] < weight:
            node += 1
    return node


def _reserve(free: list[int], node: int, weight: int) -> None:
    free[node] -= weight
    node //= 2
    while node:
        most_free = max(free[2 * node], free[2 * node + 1])
        if most_free == free[node]:
            return
        free[node] = most_free
        node //= 2
