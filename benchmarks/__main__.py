"""`python -m benchmarks`: measure, print the table, write `benchmarks/results/latest.json`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.children import ChildFailedError
from benchmarks.harness import Conditions, Measured, WrongCountError, measure, scenarios_named
from benchmarks.report import environment_facts, lines_of, overheads_of, print_report, write_json
from benchmarks.rows import OVERHEADS, ROWS
from benchmarks.scenarios import SCENARIOS

__all__ = ["main"]

#: Load before the first round, per processor, up to which a machine counts as quiet.
_QUIET_LOAD_PER_CPU = 0.25
#: Measured at a load of 9 on two processors: 64 CPU-heavy calls over a process pool took longer than over threads.
_BUSY = (
    "The machine was busy with other things before the first round. Ratios of processor time still hold; those of "
    "wall time do not where work runs in several processes: one of many threads gets more of a crowded processor than "
    "one of few."
)
#: Modules of other measurements, by subcommand.
_OTHERS = {
    "scale": "benchmarks.scale",
    "check": "benchmarks.counts",
    "cached-prompts": "benchmarks.cached_prompts",
    "endpoint": "benchmarks.endpoint.requests",
    "million": "benchmarks.million.measure",
    "soak": "benchmarks.endpoint.soak",
    "start-up": "benchmarks.jobs.start_up",
    "scheduler-memory": "benchmarks.jobs.scheduler_memory",
}
RESULTS = Path(__file__).parent / "results" / "latest.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen scenarios; 1 when one of them could not be measured. A missed target is a result, not a failure."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given and given[0] in _OTHERS:
        other = importlib.import_module(_OTHERS[given[0]])
        return int(other.main(given[1:]))
    chosen = _parser().parse_args(arguments)
    if chosen.profile:
        from benchmarks.profiling import print_profile

        print_profile(size=chosen.size or 1000)
        return 0
    conditions = Conditions(
        rounds=chosen.rounds or (3 if chosen.quick else 5),
        size=chosen.size,
        with_ray=not chosen.no_ray,
        durability=chosen.durability,
        progress=_quiet if chosen.quiet else _print,
    )
    load_before = os.getloadavg()[0]
    results: list[Measured] = []
    failed = False
    for scenario in scenarios_named(chosen.only, SCENARIOS):
        try:
            results += measure(scenario, conditions)
        except (ChildFailedError, WrongCountError) as error:
            failed = True
            print(f"{scenario.name}: not measured. {error}", file=sys.stderr)
    facts = environment_facts() | {
        "rounds": conditions.rounds,
        "durability of recorded runs": conditions.durability,
        "load before": round(load_before, 2),
        "load after": round(os.getloadavg()[0], 2),
    }
    lines = lines_of(ROWS, results)
    overheads = overheads_of(OVERHEADS, results)
    print_report(lines, overheads, facts)
    if load_before > _QUIET_LOAD_PER_CPU * (os.cpu_count() or 1):
        print(_BUSY)
    write_json(chosen.json, lines, overheads, results, facts)
    print(f"written to {chosen.json}")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What a run costs beside the bare calls it is made of: ratios to hand-written aiohttp code, "
        "on the same local protocol server, in the same run. Takes some minutes; a quiet machine gives quiet figures. "
        "Other measurements: `python -m benchmarks scale`, what scheduling alone costs, by size; `check`, calls per task beside a "
        "baseline; `endpoint`, what a request to an endpoint costs; `million`, a large map-reduce on three hosts; `soak`, whether its memory is flat under steady load; `scheduler-memory`, "
        "what large outputs cost the scheduler; `start-up`, what starting costs, step by step. Each has a `--help`.",
    )
    names = [scenario.name for scenario in SCENARIOS]
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        choices=names,
        metavar="SCENARIO",
        help=f"again for more: {', '.join(names)}",
    )
    parser.add_argument("--rounds", type=int, help="measured rounds per variant (default 5)")
    parser.add_argument("--quick", action="store_true", help="3 rounds")
    parser.add_argument("--size", type=int, help="things per round, instead of each scenario's own number")
    parser.add_argument("--no-ray", action="store_true", help="leave out what needs Ray")
    parser.add_argument(
        "--durability",
        choices=("effects", "run", "off"),
        default="effects",
        help="of the runs that show what recording costs (default: %(default)s); off: leave them out",
    )
    parser.add_argument(
        "--profile", action="store_true", help="show where the time of the inline fan-out goes, instead"
    )
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _print(text: str) -> None:
    print(text, file=sys.stderr)


def _quiet(_text: str) -> None:
    pass


if __name__ == "__main__":
    sys.exit(main())
