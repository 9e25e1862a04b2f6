"""Faults for long: `python -m tests.chaos --kills 200 --seed N`. Prints the seed first and a table at the end.

In: how many, a seed, and what to restrict them to. Out: progress, a table of faults and victims by counts, exit code 1
when a promise was broken, with the command that repeats that run alone.
"""

# ruff: noqa: T201  a program that prints

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from tests.chaos.batching import killed_around_batches
from tests.chaos.cluster import Cluster, cluster_there
from tests.chaos.harness import run_with_faults
from tests.chaos.report import FAULTS, Fault, Report
from tests.chaos.scenarios import SCENARIOS, Scenario, big
from tests.chaos.teams import BIG
from tests.chaos.victims import VICTIMS, Victim

__all__ = ["main"]

#: Victims that die, or stand still, in one run together, each with its share of the runs.
_CASTS: Mapping[Fault, Sequence[tuple[int, Sequence[str]]]] = {
    "kill": (
        (6, ("process",)),
        (2, ("agent",)),
        (2, ("manager",)),
        (2, ("scheduler",)),
        (1, ("hub",)),
        (1, ("driver",)),
        (3, ("agent", "callables", "scheduler", "hub")),
        (3, ("manager", "agent", "callables", "scheduler")),
        (1, ("cluster",)),
        (1, ("own-driver",)),
        (1, ("node",)),
    ),
    "freeze": (
        (6, ("process",)),
        (2, ("agent",)),
        (2, ("manager",)),
        (2, ("scheduler",)),
        (1, ("hub",)),
        (2, ("driver",)),
        (1, ("callables",)),
        (2, ("manager", "agent", "callables", "scheduler", "hub")),
        (1, ("cluster",)),
        (1, ("own-driver",)),
        (1, ("node",)),
    ),
    # Processes must be gone before the record is damaged, and live while it is removed.
    "damage": ((6, ("process",)), (3, ("cluster",))),
    "delete": ((6, ("process",)), (3, ("driver",))),
    # A map of its own is killed around its calls of the Batch API, whatever the scenario.
    "batch": ((1, ("process",)),),
}
_GROUND_OF = {"inline": {"inline"}, "ray": {"cluster", "own_cluster", "two_nodes"}}
#: Faults in one run: more where the run does not have to start a cluster again.
_FAULTS_A_RUN = {"inline": 4, "cluster": 3, "own_cluster": 2, "two_nodes": 1}
#: So many runs in which nobody could be struck end the whole.
_IDLE = 6
_COLUMNS = (
    "strikes",
    "in_commits",
    "runs",
    "requests",
    "repeats_of_recorded",
    "repeats_in_flight",
    "policies_asked_again",
    "rules_broken",
    "unknown_outcomes",
    "refused",
    "ended",
    "slipped",
    "told",
    "unaffected",
)


class _Clusters:
    """Clusters that are there: started when first needed, kept for all runs. Those that lose nodes are apart."""

    def __init__(self) -> None:
        self._opened = contextlib.ExitStack()
        self._clusters: dict[str, Cluster] = {}

    def of(self, ground: str) -> Cluster | None:
        """The cluster that victims of that ground live in; None where each run has its own, or none."""
        if ground not in {"cluster", "two_nodes"}:
            return None
        if ground not in self._clusters or self._clusters[ground].program.process.poll() is not None:
            self._clusters[ground] = self._opened.enter_context(cluster_there())
        return self._clusters[ground]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One run: what is done to whom in which scenario."""

    scenario: Scenario
    fault: Fault
    victims: Sequence[Victim]
    #: the run's own seed
    seed: int

    def command(self, most: int) -> str:
        """What repeats it alone."""
        names = " ".join(f"--victim {victim.name}" for victim in self.victims)
        size = f" --items {self.scenario.environment[BIG]}" if BIG in self.scenario.environment else ""
        return (
            f"python -m tests.chaos --kills {most} --stop --seed {self.seed} --kinds {self.fault} "
            f"--scenario {self.scenario.name}{size} {names}"
        )


def cases(
    seed: int, scenarios: Sequence[Scenario], faults: Sequence[Fault], victims: Sequence[str], grounds: set[str]
) -> Iterator[_Case]:
    """Without end: which scenario, what to do to whom in it, and the run's own seed."""
    casts = {
        fault: [cast for share, cast in _CASTS[fault] for _ in range(share) if VICTIMS[cast[0]].ground in grounds]
        for fault in faults
    }
    number = seed
    while True:
        # A run's seed alone repeats it, so nothing is drawn from a stream of the whole.
        rng = random.Random(f"case {number}")  # noqa: S311  repeatable, keeps no secret
        scenario, fault = rng.choice(list(scenarios)), rng.choice(list(faults))
        if scenario.is_reviewed and fault != "kill":  # it is disturbed in no other way
            number += 1
            continue
        able = [cast for cast in casts[fault] if scenario.has_manager or "manager" not in cast]
        names = victims or rng.choice(able)
        yield _Case(scenario=scenario, fault=fault, victims=[VICTIMS[name] for name in names], seed=number)
        number += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Disturb until that many faults have happened; gives the exit code."""
    chosen = _parsed(arguments)
    grounds = set().union(*(_GROUND_OF[name] for name in ([chosen.runtime] if chosen.runtime else _GROUND_OF)))
    scenarios = [big(chosen.items) if name == "big" else SCENARIOS[name] for name in chosen.scenario or SCENARIOS]
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    reports: list[Report] = []
    begun = time.monotonic()
    try:
        with _Clusters() as clusters:
            for case in cases(seed, scenarios, chosen.kinds, chosen.victim or (), grounds):
                ground = case.victims[0].ground
                most = min(_FAULTS_A_RUN[ground], max(1, chosen.kills - _struck(reports)))
                if case.fault == "batch":
                    report = killed_around_batches(case.seed, most)
                else:
                    report = run_with_faults(
                        case.scenario, case.victims, case.seed, most, fault=case.fault, cluster=clusters.of(ground)
                    )
                reports.append(report)
                print(f"[{_struck(reports)}/{chosen.kills}, {time.monotonic() - begun:.0f} s] {report}", flush=True)
                if report.violations:
                    print(f"  repeat it: {case.command(most)}", flush=True)
                if _struck(reports) >= chosen.kills or (chosen.stop and report.violations):
                    break
                if not _struck(reports[-_IDLE:]) and len(reports) >= _IDLE:
                    print(f"{_IDLE} runs without a fault: something is wrong with them, or with the harness")
                    break
    except KeyboardInterrupt:
        print("interrupted")
    print(_table(reports))
    print(f"seed {seed}, {_struck(reports)} faults, {time.monotonic() - begun:.0f} s")
    return 1 if any(report.violations for report in reports) else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=main.__doc__)
    parser.add_argument("--kills", type=int, default=200, help="end after that many faults, of whatever kind")
    parser.add_argument("--kinds", type=_kinds, default=FAULTS, help=f"of faults; default: {','.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=None, help="default: by lot; it is printed")
    names = sorted([*SCENARIOS, "big"])
    parser.add_argument("--scenario", action="append", choices=names, help="only these; repeatable")
    parser.add_argument("--items", type=int, default=10_000, help="of the scenario 'big', which is run only when named")
    parser.add_argument(
        "--victim", action="append", choices=sorted(VICTIMS), help="only these, all in one run; repeatable"
    )
    parser.add_argument("--runtime", choices=sorted(_GROUND_OF), help="only victims of that runtime")
    parser.add_argument("--stop", action="store_true", help="stop at the first broken promise")
    chosen = parser.parse_args(arguments)
    grounds = {VICTIMS[name].ground for name in chosen.victim or ()}
    if len(grounds) > 1:
        parser.error(f"these victims do not live together: {', '.join(chosen.victim)}")
    if "manager" in (chosen.victim or ()):
        led = [name for name in chosen.scenario or SCENARIOS if name in SCENARIOS and SCENARIOS[name].has_manager]
        if not led:
            parser.error(f"no manager leads {', '.join(chosen.scenario)}")
        chosen.scenario = led
    if set(chosen.scenario or ()) == {"reviews"} and "kill" not in chosen.kinds:
        parser.error("the run of the scenario 'reviews' is killed, and disturbed in no other way")
    return chosen


def _kinds(text: str) -> Sequence[Fault]:
    found = [fault for fault in FAULTS if fault in text.split(",")]
    if len(found) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"'{text}' names another kind than {', '.join(FAULTS)}")
    return found


def _struck(reports: Sequence[Report]) -> int:
    return sum(report.strikes for report in reports)


def _table(reports: Sequence[Report]) -> str:
    """Faults and victims by counts, and their sums."""
    groups: dict[str, list[Report]] = {}
    for report in reports:
        groups.setdefault(f"{report.fault} {report.victims}", []).append(report)
    lines = [("what", "cases", *(name.replace("_", " ") for name in _COLUMNS), "broken")]
    for name, group in [*sorted(groups.items()), ("all", list(reports))]:
        sums = [sum(getattr(report, column) for report in group) for column in _COLUMNS]
        lines.append((name, str(len(group)), *map(str, sums), str(sum(bool(each.violations) for each in group))))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
