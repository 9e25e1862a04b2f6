"""A handful of seeded kills of everything that can die, and a freeze; `make chaos` does the same two hundred times.

Each case runs a team against the protocol server, kills at the seed's moments, goes on until the run has ended, and
asks three witnesses (the record, the server, the disk) whether anything recorded was done again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.chaos.cluster import Cluster, cluster_there
from tests.chaos.harness import run_with_faults
from tests.chaos.moments import OWNED, Moment
from tests.chaos.report import Fault, Report
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.victims import VICTIMS


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster that was there before any of these runs; the last of them gives it a second node, and loses that."""
    with cluster_there() as there:
        yield there


def killed(
    scenario: str,
    victims: Sequence[str],
    *,
    seed: int,
    kills: int,
    fault: Fault = "kill",
    cluster: Cluster | None = None,
) -> Report:
    """A run that was killed, or frozen, that often and kept what was promised."""
    chosen = [VICTIMS[name] for name in victims]
    report = run_with_faults(SCENARIOS[scenario], chosen, seed, kills, fault=fault, cluster=cluster)
    assert not report.violations, str(report)
    assert report.strikes == kills, str(report)
    return report


@pytest.mark.parametrize(
    ("scenario", "seed"),
    [("chain-with-tools", 11), ("fallback", 5), pytest.param("dag-with-tools", 4, marks=pytest.mark.extended)],
)
def test_a_run_in_one_process_is_continued_when_that_is_killed(scenario: str, seed: int) -> None:
    """S-DUR-3, S-DUR-16, S-DUR-22, S-DUR-23, S-DUR-27, S-DUR-30, S-DUR-35, S-DUR-37, S-DUR-38, S-DUR-51, S-FBK-42."""
    report = killed(scenario, ["process"], seed=seed, kills=2)
    assert report.runs == 3


@pytest.mark.extended
@pytest.mark.parametrize(("scenario", "seed"), [("loop", 1), ("phases", 1), ("graph", 1)])
def test_units_are_continued_when_their_process_is_killed(scenario: str, seed: int) -> None:
    """S-DUR-30, S-DUR-37, S-LOOP-54: in an iteration, an attempt or a branch, or while a predicate is asked."""
    assert killed(scenario, ["process"], seed=seed, kills=2).runs == 3


def test_reviews_are_decided_once_when_the_process_of_their_run_is_killed() -> None:
    """S-REV-82, S-REV-115, S-REV-116: before a gate is recorded, and before anything is decided."""
    assert killed("reviews", ["process"], seed=1, kills=3).runs > 4


@pytest.mark.extended
def test_decisions_hold_when_the_process_that_goes_on_is_killed() -> None:
    """S-REV-82, S-REV-115, S-REV-117: after decisions, and before what follows from them."""
    process = VICTIMS["process"]
    # Five requests are made before anything is decided: the sixth follows from a decision.
    moments = [Moment(victim=process, kind=kind, more=more, delay_s=0.0) for kind, more in (("arrived", 6), (OWNED, 0))]
    report = run_with_faults(SCENARIOS["reviews"], [process], 1, len(moments), at=moments)
    assert (report.violations, report.strikes) == ([], 2), str(report)
    first, second = (number for number, each in enumerate(report.story) if each.startswith("kill"))
    assert any(each.startswith("decide") for each in report.story[:first])
    assert any(each.startswith("decide") for each in report.story[second:])


@pytest.mark.extended
@pytest.mark.parametrize(("scenario", "seed"), [("newsroom", 4), ("peers", 2)])
def test_delegations_are_continued_when_their_process_is_killed(scenario: str, seed: int) -> None:
    """S-HIER-41, S-HIER-43, S-HIER-47, S-SET-45, S-DEL-12, S-DEL-41: caps, stages and verdicts are those of one run.

    Once while calls are being decided, once while workers are at it.
    """
    report = killed(scenario, ["process"], seed=seed, kills=2)
    assert (report.runs, report.rules_broken) == (3, 0)


def test_tasks_go_on_elsewhere_when_their_agents_and_the_scheduler_are_killed(cluster: Cluster) -> None:
    """S-DUR-30, S-DUR-31, S-DUR-32, S-DUR-37: the run needs no resumption, and its driver notices nothing."""
    report = killed("dag-with-tools", ["agent", "scheduler"], seed=3, kills=3, cluster=cluster)
    assert report.runs == 1
    assert [kill.split()[1] for kill in report.story if kill.startswith("kill")] == ["scheduler", "agent", "scheduler"]


@pytest.mark.extended
@pytest.mark.parametrize(("scenario", "victim", "seed"), [("newsroom", "manager", 3), ("peers", "agent", 8)])
def test_delegations_go_on_when_who_asked_is_killed(scenario: str, victim: str, seed: int, cluster: Cluster) -> None:
    """S-HIER-41, S-HIER-43, S-SET-45, S-DEL-12, S-DUR-31: the successor asks the same workers for what they are at."""
    report = killed(scenario, [victim], seed=seed, kills=1, cluster=cluster)
    assert (report.runs, report.rules_broken) == (1, 0)


@pytest.mark.extended
def test_nothing_is_asked_again_when_the_event_hub_and_the_driver_are_killed(cluster: Cluster) -> None:
    """S-DUR-33, S-DUR-35, S-DUR-37: the run goes on and ends, and a later process is given the recorded output.

    Events are no part of the record, and their loss repeats nothing.
    """
    report = killed("chain", ["hub", "driver"], seed=2, kills=2, cluster=cluster)
    assert (report.runs, report.repeats_in_flight) == (2, 0)
    assert "state completed" in report.story


@pytest.mark.extended
def test_an_agent_that_was_frozen_is_refused_when_its_task_was_handed_out_again(cluster: Cluster) -> None:
    """S-DUR-16, S-DUR-32: its scheduler dies meanwhile, and the next one gives its task to another process."""
    report = killed("dag-with-tools", ["agent"], seed=16, kills=1, fault="freeze", cluster=cluster)
    assert report.runs == 1


@pytest.mark.extended
def test_a_run_is_continued_on_another_cluster_when_all_of_its_own_is_killed(cluster: Cluster) -> None:
    """S-DUR-34, S-DUR-35, S-DUR-37, S-DUR-51."""
    assert killed("chain-with-tools", ["cluster"], seed=4, kills=1, cluster=cluster).runs == 2


@pytest.mark.extended
def test_a_run_goes_on_when_a_node_is_lost(cluster: Cluster) -> None:
    """S-DUR-7, S-DUR-31: whatever lived there."""
    killed("dag", ["node"], seed=2, kills=1, cluster=cluster)
