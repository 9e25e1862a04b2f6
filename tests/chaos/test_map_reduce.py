"""A handful of seeded kills of map-reduces whose tasks are made while they run; `make chaos` does more of the same."""

from __future__ import annotations

import pytest

from tests.chaos.test_kills import killed


@pytest.mark.parametrize(
    ("scenario", "seed", "kills"), [pytest.param("mapreduce", 4, 2, marks=pytest.mark.extended), ("pipelined", 2, 1)]
)
def test_a_map_reduce_is_continued_when_its_process_is_killed(scenario: str, seed: int, kills: int) -> None:
    """S-MR-130, S-MR-151, S-MR-161, S-MR-163, S-DUR-37, S-DUR-51: nothing that is recorded is asked or done again.

    Every item is in the tree once, and in one of the two files once; the last answer is made of all outputs.
    """
    report = killed(scenario, ["process"], seed=seed, kills=kills)
    assert report.runs == kills + 1
