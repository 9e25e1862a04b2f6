"""A handful of seeded kills around the submission of batches; `make chaos` does more of the same."""

from __future__ import annotations

import pytest

from tests.chaos.batching import killed_around_batches


@pytest.mark.parametrize(("seed", "kills"), [(1, 3), pytest.param(2, 4, marks=pytest.mark.extended)])
def test_a_map_is_continued_when_it_is_killed_around_a_batch(seed: int, kills: int) -> None:
    """S-BAT-10, S-BAT-11, S-BAT-51: no item is part of two batches, and none is asked or written twice."""
    report = killed_around_batches(seed, kills)
    assert report.violations == [], report.story
    assert report.strikes > 0
