"""Runs a scenario, disturbs it at seeded moments, goes on until it has ended, and judges it.

In: a scenario, what is done to whom, a seed, how often. Out: a `Report`; a broken promise is a line in it, never an
exception. The moments hang on requests that reach the protocol server, not on the clock, so that a seed means the same
on a busy machine.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache

from ensemble_ray import EnsembleError
from tests.chaos.audit import of_lines
from tests.chaos.cluster import Cluster
from tests.chaos.comparison import Undisturbed
from tests.chaos.damaging import damage
from tests.chaos.deleting import delete
from tests.chaos.disturbed import Disturbed
from tests.chaos.freezing import freeze
from tests.chaos.killing import kill
from tests.chaos.moments import Moment, moments
from tests.chaos.report import Fault, Report
from tests.chaos.scenarios import Scenario
from tests.chaos.victims import Victim

__all__ = ["run_with_faults", "undisturbed"]


#: What is done to a run once.
_ONCE: Mapping[Fault, Callable[[Disturbed, Moment, random.Random], bool]] = {"damage": damage, "delete": delete}


@cache
def undisturbed(name: str) -> Undisturbed:
    """What a scenario gives when nobody disturbs it; it does not depend on where it runs."""
    from tests.chaos.scenarios import SCENARIOS

    scenario = SCENARIOS[name]
    with Disturbed.of(scenario, cluster=None, ground="inline") as run:
        output = run.run_here()
        assert run.server.stats()["requests"] == scenario.calls or scenario.has_own_shape, run.server.stats()
        assert len(run.world.asked()) == scenario.questions, run.world.asked()
        found = run.judged()
        assert not found.violations, found.violations
        assert not scenario.check(output, run.world)
        return Undisturbed.of(output, run.facts(), run.world.letters(), has_own_shape=scenario.has_own_shape)


def run_with_faults(
    scenario: Scenario,
    victims: Sequence[Victim],
    seed: int,
    most: int,
    *,
    fault: Fault = "kill",
    cluster: Cluster | None = None,
    at: Sequence[Moment] | None = None,
) -> Report:
    """Run it, disturb it, go on, judge.

    Args:
        scenario: What is run.
        victims: Who is disturbed, by lot; all of the same ground.
        seed: Decides when whom.
        most: How often at most; a run that ends before is not disturbed any more.
        fault: What is done.
        cluster: The one that is there, for victims that live in one; a run that loses its own goes on there.
        at: When; None: by lot.
    """
    if cluster is not None and any(victim.ground == "two_nodes" for victim in victims):
        cluster.have_second_node()
    expected = undisturbed(scenario.name) if scenario.is_compared else None
    if scenario.is_fed:
        victims = [victim.in_dynamic_run() for victim in victims]
    rng = random.Random(f"{scenario.name}/{seed}")  # noqa: S311  repeatable, keeps no secret
    begun = time.monotonic()
    with Disturbed.of(scenario, cluster=cluster, ground=victims[0].ground) as run:
        report = run.report
        report.seed, report.victims, report.fault = seed, "+".join(victim.name for victim in victims), fault
        try:
            run.start_first()
            kills = 1 if fault in _ONCE else most
            if _disturb(run, at or moments(scenario, victims, kills, rng, fault=fault), rng):
                output = run.finish()
                if output is not None and expected is not None:
                    report.violations += expected.differences(output, run.facts(), run.world.letters())
                if output is not None:
                    report.violations += scenario.check(output, run.world)
                _judge(run)
            else:
                report.violations += of_lines(run.world.done())
        except (AssertionError, TimeoutError, EnsembleError) as error:
            run.break_promise(f"the harness gave up: {error}")
        _count(run)
    report.seconds = time.monotonic() - begun
    return report


def _disturb(run: Disturbed, when: Sequence[Moment], rng: random.Random) -> bool:
    """Disturb it; False when it is over with that, and nobody can go on with it."""
    fault = run.report.fault
    if fault in _ONCE:
        return _ONCE[fault](run, when[0], rng)
    strike = kill if fault == "kill" else freeze
    for moment in when:
        if not strike(run, moment, rng):
            break
    return True


def _judge(run: Disturbed) -> None:
    report, found = run.report, run.judged()
    report.violations += found.violations
    report.repeats_of_recorded, report.repeats_in_flight = found.repeats_of_recorded, found.repeats_in_flight
    report.unknown_outcomes, report.rules_broken = found.unknown_outcomes, found.rules_broken
    report.policies_asked_again, report.slipped = found.policies_asked_again, found.slipped


def _count(run: Disturbed) -> None:
    report = run.report
    report.requests = run.server.stats()["requests"]
    report.record_bytes, report.most_alike = run.record_bytes(), max(run.server.counts.values(), default=0)
    if report.violations:
        report.violations += run.last_words()
