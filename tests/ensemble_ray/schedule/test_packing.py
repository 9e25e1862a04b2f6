"""First-fit decreasing and chunks, by the table and against their definitions."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble_ray.schedule.map_reduce_groups import chunks, first_fit_decreasing

SEEDED = settings(max_examples=60)


def naive(weights: Sequence[int], budget: int) -> list[list[int]]:
    """S-MR-70 and S-MR-71, word by word."""
    bins: list[list[int]] = []
    for position in sorted(range(len(weights)), key=lambda each: -weights[each]):
        fits = (each for each in bins if sum(weights[other] for other in each) + weights[position] <= budget)
        first = next(fits, None)
        if first is None or weights[position] > budget:
            bins.append([position])
        else:
            first.append(position)
    return bins


@pytest.mark.parametrize(
    ("weights", "budget", "bins"),
    [
        ([40, 30, 30, 50, 20], 100, [[3, 0], [1, 2, 4]]),
        ([60, 50, 50, 40], 100, [[0, 3], [1, 2]]),
        ([150, 50, 50], 100, [[0], [1, 2]]),
        ([50, 50, 50, 50], 100, [[0, 1], [2, 3]]),
        ([10] * 10, 35, [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]),
        ([100, 1], 100, [[0], [1]]),
        ([120, 130], 100, [[1], [0]]),
    ],
)
def test_bins_are_those_of_the_table_when_packed(weights: list[int], budget: int, bins: list[list[int]]) -> None:
    """S-MR-70, S-MR-71."""
    assert first_fit_decreasing(weights, budget) == bins


def test_nothing_is_packed_when_there_is_nothing() -> None:
    """S-MR-73."""
    assert first_fit_decreasing([], 10) == []


def test_weight_zero_joins_only_what_is_not_over_when_bins_are_full() -> None:
    """S-MR-72."""
    assert first_fit_decreasing([100, 0], 100) == [[0, 1]]
    assert first_fit_decreasing([101, 0], 100) == [[0], [1]]


@SEEDED
@given(weights=st.lists(st.integers(0, 40), max_size=40), budget=st.integers(1, 60))
def test_bins_equal_the_definition_when_weights_are_random(weights: list[int], budget: int) -> None:
    """S-MR-70 to S-MR-72."""
    assert first_fit_decreasing(weights, budget) == naive(weights, budget)


def test_every_position_is_in_a_full_bin_when_there_are_many() -> None:
    """S-MR-70: far too many for looking at each bin for each position."""
    weights = [7 * place % 1000 for place in range(30_000)]

    bins = first_fit_decreasing(weights, 2000)

    assert sorted(place for each in bins for place in each) == list(range(30_000))
    assert max(sum(weights[place] for place in each) for each in bins) <= 2000
    assert len(bins) <= sum(weights) / 2000 * 11 / 9 + 1  # what first-fit decreasing is known to stay within


@pytest.mark.parametrize(
    ("count", "size", "groups"),
    [(0, 3, []), (1, 3, [[0]]), (3, 3, [[0, 1, 2]]), (7, 3, [[0, 1, 2], [3, 4, 5], [6]])],
)
def test_chunks_are_consecutive_when_cut(count: int, size: int, groups: list[list[int]]) -> None:
    """S-MR-32: the last may be smaller, down to one."""
    assert [list(each) for each in chunks(count, size)] == groups
