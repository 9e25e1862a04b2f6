"""`python -m benchmarks endpoint`: what a request costs by the number of clients, beside a handler written by hand.

In: which endpoints, how many clients. Out: a table, and JSON, of requests a second, how long answers and first texts took, processor
time a request; and 200 runs at once over two replicas, with the processes that they took. Each endpoint is started once and warmed
up; rounds are told one by one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.children import ROOT, ChildFailedError
from benchmarks.endpoint.client import Answers
from benchmarks.endpoint.places import PLACES, Clients, Place, endpoint, surroundings
from benchmarks.process_tree import cpu_seconds, processes_of
from benchmarks.report import environment_facts

__all__ = ["main"]

RESULTS = ROOT / "benchmarks" / "results" / "endpoint.json"
#: Requests of a round for each client, and at least.
_EACH, _LEAST = 2, 50
_AT_ONCE = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What one load came to."""

    place: str
    kind: str
    clients: int
    requests: int
    wall_s: float
    #: of the endpoint and all that it started, s
    cpu_s: float
    #: in the middle, and what 99 of 100 stay below, s
    took_s: float
    took_99_s: float
    #: until the first text, in the middle, s; None: the answer came whole
    first_s: float | None
    failed: int
    errors: list[str]
    #: processes of agents when it was over
    agents: int


def main(arguments: Sequence[str]) -> int:
    """Measure the chosen endpoints; 1 when one could not be measured, or a request failed."""
    chosen = _parser().parse_args(arguments)
    load_before = os.getloadavg()[0]
    rounds: list[Round] = []
    is_whole = True
    with surroundings(latency_ms=chosen.latency_ms) as around:
        for name in chosen.only or PLACES:
            try:
                with endpoint(name, around) as place:
                    rounds += _rounds(place, around.clients, chosen)
            except ChildFailedError as error:
                is_whole = False
                print(f"{name}: not measured. {error}", file=sys.stderr)
    facts = environment_facts() | {
        "model's latency, ms": chosen.latency_ms,
        "rounds": chosen.rounds,
        "load before": round(load_before, 2),
        "load after": round(os.getloadavg()[0], 2),
    }
    _print(rounds, facts)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    found = {"environment": facts, "rounds": [asdict(each) for each in rounds]}
    chosen.json.write_text(json.dumps(found, indent=2) + "\n")
    print(f"written to {chosen.json}")
    return int(not is_whole or any(each.failed for each in rounds))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks endpoint",
        description="What a request to an endpoint costs: beside a handler of FastAPI and AsyncOpenAI, and with its runs in "
        "the same process; and 200 runs at once over two replicas.",
    )
    parser.add_argument(
        "--only", action="append", choices=PLACES, metavar="PLACE", help=f"again for more: {', '.join(PLACES)}"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=(1, 50, 500), help="at a time (default: 1 50 500)")
    parser.add_argument(
        "--at-once", type=int, default=_AT_ONCE, help="runs at once over two replicas (default %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each load (default %(default)s)")
    parser.add_argument("--latency-ms", type=int, default=0, help="what the model takes (default %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _rounds(place: Place, clients: Clients, chosen: argparse.Namespace) -> list[Round]:
    """Return the rounds of one endpoint; the first load of each kind is not measured."""
    rounds: list[Round] = []
    if place.name == "ray-2":
        # The first one starts the processes that it needs; the others find them.
        loads = [("run", chosen.at_once, chosen.at_once)]
    else:
        loads = [(kind, each, max(_LEAST, _EACH * each)) for kind in ("chat", "stream") for each in chosen.clients]
        for kind in ("chat", "stream"):
            clients.send(place.load(kind, requests=20, clients=5))
    for kind, at_once, requests in loads:
        for number in range(chosen.rounds):
            before_s = cpu_seconds(place.child.pid)
            answers = clients.send(place.load(kind, requests=requests, clients=at_once))
            cpu_s = cpu_seconds(place.child.pid) - before_s
            rounds.append(_round(place, kind, at_once, answers, cpu_s))
            if not chosen.quiet:
                last = rounds[-1]
                said = f"{last.requests / last.wall_s:.0f}/s, {last.took_s * 1e3:.1f} ms, {last.failed} failed"
                print(f"{place.name}, {kind}, {at_once} clients, round {number + 1}: {said}", file=sys.stderr)
    return rounds


def _round(place: Place, kind: str, clients: int, answers: Answers, cpu_s: float) -> Round:
    took = sorted(answers.took_s) or [float("nan")]
    return Round(
        place=place.name,
        kind=kind,
        clients=clients,
        requests=len(answers.took_s),
        wall_s=answers.wall_s,
        cpu_s=cpu_s,
        took_s=median(took),
        took_99_s=took[int(len(took) * 0.99)],
        first_s=median(answers.first_s) if answers.first_s else None,
        failed=answers.failed,
        errors=answers.errors,
        agents=sum("AgentActor" in name for name in processes_of(place.child.pid).values()),
    )


def _print(rounds: Sequence[Round], facts: dict[str, object]) -> None:
    table = Table(title="An endpoint; medians of the rounds", title_justify="left")
    table.add_column("load", no_wrap=True)
    for head in (
        "clients",
        "place",
        "requests/s",
        "ms each",
        "of the bare one",
        "took, ms",
        "99 %",
        "first text",
        "CPU ms",
        "agents",
    ):
        table.add_column(head, justify="right")
    loads = list(dict.fromkeys((each.kind, each.clients, each.place) for each in rounds))
    for kind, clients, place in sorted(loads, key=lambda load: (load[0], load[1], PLACES.index(load[2]))):
        these = [each for each in rounds if (each.kind, each.clients, each.place) == (kind, clients, place)]
        bare = [each for each in rounds if (each.kind, each.clients, each.place) == (kind, clients, "bare")]
        each_ms = median(one.wall_s / max(1, one.requests) for one in these) * 1e3
        more = f"+{each_ms - median(one.wall_s / max(1, one.requests) for one in bare) * 1e3:.2f}" if bare else "-"
        first = [one.first_s for one in these if one.first_s is not None]
        table.add_row(
            kind,
            str(clients),
            place,
            f"{1e3 / each_ms:.0f}",
            f"{each_ms:.2f}",
            "-" if place == "bare" else more,
            f"{median(one.took_s for one in these) * 1e3:.1f}",
            f"{median(one.took_99_s for one in these) * 1e3:.1f}",
            f"{median(first) * 1e3:.1f}" if first else "-",
            f"{median(one.cpu_s / max(1, one.requests) for one in these) * 1e3:.2f}",
            str(max(one.agents for one in these)),
        )
    console = Console(width=None if Console().is_terminal else 150)
    console.print(table)
    for one in rounds:
        if one.failed:
            console.print(f"{one.place}, {one.kind}, {one.clients} clients: {one.failed} failed: {one.errors}")
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim", highlight=False)
