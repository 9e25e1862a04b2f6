"""Kills for long: `python -m tests.chaos --kills 200 --seed N`. Prints the seed first and a table at the end.

In: how many kills, a seed, and what to restrict them to. Out: progress, a table of victims by counts, exit code 1 when
a promise was broken, with the command that repeats that run alone.
"""

# ruff: noqa: T201  a program that prints

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Self

from tests.chaos.cluster import Cluster, cluster_there
from tests.chaos.harness import run_with_kills
from tests.chaos.report import Report
from tests.chaos.scenarios import SCENARIOS, Scenario, big
from tests.chaos.teams import BIG
from tests.chaos.victims import VICTIMS, Victim

__all__ = ["main"]

#: Victims that die in one run together, each with its share of the runs.
_CASTS: tuple[tuple[int, Sequence[str]], ...] = (
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
)
_GROUND_OF = {"inline": {"inline"}, "ray": {"cluster", "own_cluster", "two_nodes"}}
#: Kills in one run: more where the run does not have to start a cluster again.
_KILLS_A_RUN = {"inline": 4, "cluster": 3, "own_cluster": 2, "two_nodes": 1}
#: So many runs in which nobody could be killed end the whole.
_IDLE = 6
_COLUMNS = (
    "kills",
    "runs",
    "requests",
    "repeats_of_recorded",
    "repeats_in_flight",
    "policies_asked_again",
    "rules_broken",
    "unknown_outcomes",
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


def cases(
    seed: int, scenarios: Sequence[Scenario], victims: Sequence[str], grounds: set[str]
) -> Iterator[tuple[Scenario, Sequence[Victim], int]]:
    """Without end: which scenario, whom to kill in it, and the run's own seed."""
    if victims:
        casts: list[Sequence[str]] = [victims]
    else:
        casts = [cast for share, cast in _CASTS for _ in range(share) if VICTIMS[cast[0]].ground in grounds]
    number = seed
    while True:
        # A run's seed alone repeats it, so nothing is drawn from a stream of the whole.
        rng = random.Random(f"case {number}")  # noqa: S311  repeatable, keeps no secret
        scenario = rng.choice(list(scenarios))
        able = [cast for cast in casts if scenario.has_manager or "manager" not in cast]
        yield scenario, [VICTIMS[name] for name in rng.choice(able)], number
        number += 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Kill until that many kills have happened; gives the exit code."""
    chosen = _parsed(arguments)
    grounds = set().union(*(_GROUND_OF[name] for name in ([chosen.runtime] if chosen.runtime else _GROUND_OF)))
    scenarios = [big(chosen.items) if name == "big" else SCENARIOS[name] for name in chosen.scenario or SCENARIOS]
    seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    print(f"seed {seed}", flush=True)
    reports: list[Report] = []
    begun = time.monotonic()
    try:
        with _Clusters() as clusters:
            for scenario, victims, number in cases(seed, scenarios, chosen.victim or (), grounds):
                most = min(_KILLS_A_RUN[victims[0].ground], max(1, chosen.kills - _killed(reports)))
                report = run_with_kills(scenario, victims, number, most, cluster=clusters.of(victims[0].ground))
                reports.append(report)
                print(f"[{_killed(reports)}/{chosen.kills}, {time.monotonic() - begun:.0f} s] {report}", flush=True)
                if report.violations:
                    print(f"  repeat it: {_command(scenario, victims, number, most)}", flush=True)
                if _killed(reports) >= chosen.kills or (chosen.stop and report.violations):
                    break
                if not _killed(reports[-_IDLE:]) and len(reports) >= _IDLE:
                    print(f"{_IDLE} runs without a kill: something is wrong with them, or with the harness")
                    break
    except KeyboardInterrupt:
        print("interrupted")
    print(_table(reports))
    print(f"seed {seed}, {_killed(reports)} kills, {time.monotonic() - begun:.0f} s")
    return 1 if any(report.violations for report in reports) else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=main.__doc__)
    parser.add_argument("--kills", type=int, default=200, help="end after that many")
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
    return chosen


def _killed(reports: Sequence[Report]) -> int:
    return sum(report.kills for report in reports)


def _command(scenario: Scenario, victims: Sequence[Victim], number: int, most: int) -> str:
    names = " ".join(f"--victim {victim.name}" for victim in victims)
    size = f" --items {scenario.environment[BIG]}" if BIG in scenario.environment else ""
    return f"python -m tests.chaos --kills {most} --stop --seed {number} --scenario {scenario.name}{size} {names}"


def _table(reports: Sequence[Report]) -> str:
    """Victims by counts, and their sums."""
    groups: dict[str, list[Report]] = {}
    for report in reports:
        groups.setdefault(report.victims, []).append(report)
    lines = [("killed", "cases", *(name.replace("_", " ") for name in _COLUMNS), "broken")]
    for name, group in [*sorted(groups.items()), ("all", list(reports))]:
        sums = [sum(getattr(report, column) for report in group) for column in _COLUMNS]
        lines.append((name, str(len(group)), *map(str, sums), str(sum(bool(each.violations) for each in group))))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


if __name__ == "__main__":
    sys.exit(main())
