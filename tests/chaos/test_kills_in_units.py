"""Kills at chosen places of loops, phases and graphs: the model server answers nothing behind the request that is counted.

Where that is follows from the teams of `team_units`: a task with tools makes three requests, one without makes one.
"""

from __future__ import annotations

import pytest

from tests.chaos.harness import run_with_faults
from tests.chaos.moments import ASKED, Moment
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.victims import VICTIMS


@pytest.mark.parametrize(
    ("scenario", "kind", "count", "most"),
    [
        # One task, then iterations of four requests: the twelfth to the fifteenth are those of the third.
        pytest.param("loop", "arrived", 12, 12, id="third-iteration-begins", marks=pytest.mark.extended),
        pytest.param("loop", "arrived", 15, 15, id="third-iteration-is-criticised", marks=pytest.mark.extended),
        # Its third predicate has answered, and the first request of the fourth iteration is not answered.
        pytest.param("loop", ASKED, 3, 16, id="after-a-predicate"),
        # Drafts and their review make four requests, the phase beside them three; then the draft is written again.
        pytest.param("phases", "arrived", 9, 9, id="phase-is-retried", marks=pytest.mark.extended),
        pytest.param("phases", "arrived", 11, 11, id="retry-is-reviewed", marks=pytest.mark.extended),
        # Two visits, and the split; then three requests of one branch and eight of the other.
        pytest.param("graph", ASKED, 2, 7, id="after-a-condition", marks=pytest.mark.extended),
        pytest.param("graph", "arrived", 9, 9, id="both-branches-run"),
        pytest.param("graph", "arrived", 14, 14, id="one-branch-runs", marks=pytest.mark.extended),
    ],
)
def test_run_that_is_killed_inside_a_unit_goes_on_from_there(scenario: str, kind: str, count: int, most: int) -> None:
    """S-DUR-30, S-DUR-37, S-DUR-122, S-LOOP-54, S-GRAPH-72: nothing recorded is asked again, and the output is the same."""
    victim = VICTIMS["process"]
    moment = Moment(victim=victim, kind=kind, more=count, delay_s=0.0, most=most)
    report = run_with_faults(SCENARIOS[scenario], [victim], 1, 1, at=[moment])
    assert not report.violations, str(report)
    assert (report.strikes, report.runs) == (1, 2), str(report)
    assert report.repeats_of_recorded == 0
