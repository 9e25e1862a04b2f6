"""Which scheduler has a run."""

from __future__ import annotations

from collections import Counter

from ensemble_ray.plan.placement import shard_of


def test_run_is_found_again_by_its_id_alone() -> None:
    """S-CLU-61: written down here, since another process, and a later version, must come to the same."""
    assert [shard_of(run_id, 4) for run_id in ("", "a", "run-1", "01J9ZK")] == [0, 2, 1, 0]
    assert {shard_of(f"run-{number}", 1) for number in range(99)} == {0}


def test_runs_are_spread_evenly() -> None:
    """S-CLU-61: each of four has a quarter, more or less."""
    counts = Counter(shard_of(f"run-{number}", 4) for number in range(4000))
    assert set(counts) == {0, 1, 2, 3}
    assert min(counts.values()) > 900
