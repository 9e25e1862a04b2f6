"""A handful of seeded freezes, damages and deletions in one process; `make chaos` does more, and on Ray.

What a frozen process of Ray's does when it wakes is in `test_kills`, which has a cluster.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ensemble_ray.record.sqlite.journal import CommitLock
from tests.chaos.damaging import HARMS, harm
from tests.chaos.freezing import holds
from tests.chaos.harness import run_with_faults
from tests.chaos.report import Fault, Report
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.victims import VICTIMS


def struck(scenario: str, fault: Fault, *, seed: int, most: int = 1) -> Report:
    """A run that was disturbed that often and kept what was promised."""
    report = run_with_faults(SCENARIOS[scenario], [VICTIMS["process"]], seed, most, fault=fault)
    assert not report.violations, str(report)
    assert report.strikes == most, str(report)
    return report


@pytest.mark.extended
@pytest.mark.parametrize(("scenario", "seed", "most"), [("chain-with-tools", 19, 2), ("pipelined", 5, 1)])
def test_a_process_that_was_frozen_goes_on_or_is_refused(scenario: str, seed: int, most: int) -> None:
    """S-DUR-15, S-DUR-16, S-DUR-17, S-MR-130: soon awake it goes on; after a takeover its facts are refused.

    In a map-reduce it writes no row that its successor has written. One that was in the middle of a commit is ended.
    """
    report = struck(scenario, "freeze", seed=seed, most=most)
    assert (report.runs, report.refused + report.ended) == (2, 1)


@pytest.mark.parametrize("seed", [3, pytest.param(7, marks=pytest.mark.extended)])  # both damage the log
def test_a_damaged_record_is_told_or_nothing_of_it_is_lost(seed: int) -> None:
    """S-DUR-80, S-DUR-81, S-DUR-83, S-DUR-86: nothing is asked before somebody allows the loss; no effect is done twice."""
    report = struck("chain-with-tools", "damage", seed=seed)
    assert report.told + report.unaffected == 1


@pytest.mark.parametrize("seed", [1, pytest.param(3, marks=pytest.mark.extended)])
def test_a_run_whose_record_is_removed_says_so(seed: int) -> None:
    """S-DUR-85: it ends with an error that names the record, and nobody goes on with what is not there."""
    report = struck("chain-with-tools", "delete", seed=seed)
    assert (report.runs, report.told) == (1, 1)


def test_files_are_harmed_as_the_seed_says(tmp_path: Path) -> None:
    """A case that failed can be repeated alone, and every harm is one."""
    file = tmp_path / "file"
    whole = random.Random("whole").randbytes(20_000)  # noqa: S311  repeatable
    met: set[str] = set()
    for seed in range(40):
        found: list[tuple[str, bytes]] = []
        for _ in range(2):
            file.write_bytes(whole)
            found.append((harm(file, random.Random(seed)), file.read_bytes()))  # noqa: S311  repeatable
        assert found[0] == found[1]
        what, harmed = found[0]
        met.add(what.rpartition(" at ")[0])
        assert len(harmed) == len(whole) or what.startswith("cut off")
        assert harmed != whole or what.startswith("a page of another place")
    assert met == set(HARMS)


def test_whoever_holds_a_lock_is_known(tmp_path: Path) -> None:
    """The kernel tells who is in the middle of a commit."""
    lock = CommitLock(tmp_path / "commit.lock")
    assert lock.acquire()
    assert holds(os.getpid(), lock.path)
    lock.release()
    assert not holds(os.getpid(), lock.path)
    lock.close()
