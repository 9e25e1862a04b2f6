"""`python -m benchmarks scale`: whether a task costs the same in a run of a hundred as in one of a hundred thousand.

In: sizes. Out: a table, and JSON, of processor time and memory for each task or item, their ratios to the smallest size,
and whether those hold the target. Each measurement has a process of its own, so that none pays for the memory of another.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.children import DEADLINE_S, ROOT, ChildFailedError, clean_environment, start_child
from benchmarks.report import environment_facts, verdict

__all__ = ["FLAT", "KINDS", "line_of", "main"]

KINDS = (
    "source sequential",
    "source parallel",
    "source loop",
    "source graph",
    "source map-reduce by number",
    "source map-reduce by tokens",
    "run sequential",
    "run parallel",
    "run map-reduce by number",
    "run map-reduce by tokens",
)
_TASKS = (100, 1_000, 10_000, 100_000)
_ITEMS = (1_000, 10_000, 100_000, 1_000_000)
#: Ratio to the smallest size up to which a cost counts as flat.
FLAT = 1.3
#: Above that many tasks or items one round is measured: it is long enough, and has the deadline of so many of that size.
_LARGE = 100_000
RESULTS = ROOT / "benchmarks" / "results" / "scale.json"

#: A line of the table, as the JSON has it.
Line = dict[str, object]


def main(arguments: Sequence[str]) -> int:
    """Measure the chosen kinds and sizes; 1 when one of them could not be measured. A missed target is a result, not a failure."""
    chosen = _parser().parse_args(arguments)
    lines: list[Line] = []
    failed = False
    for kind in chosen.only or KINDS:
        smallest: Line | None = None
        for size in sorted(chosen.items if "map-reduce" in kind else chosen.tasks):
            if not chosen.quiet:
                print(f"{kind}, {size}", file=sys.stderr)
            try:
                line = line_of(_measure(kind, size, rounds=chosen.rounds, with_memory=not chosen.no_memory), smallest)
            except ChildFailedError as error:
                failed = True
                print(f"{kind}, {size}: not measured. {error}", file=sys.stderr)
                continue
            smallest = smallest or line
            lines.append(line)
    _print(lines)
    facts = environment_facts() | {"rounds": chosen.rounds}
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    chosen.json.write_text(json.dumps({"environment": facts, "lines": lines}, indent=2) + "\n")
    print(f"written to {chosen.json}")
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks scale",
        description="What scheduling alone costs for each task of a plan, each iteration, step and item, by the size of "
        "the run: machines by themselves, and coordinators whose executor answers at once.",
    )
    parser.add_argument(
        "--tasks", type=int, nargs="+", default=_TASKS, help="sizes of plans; iterations of loops, steps of graphs"
    )
    parser.add_argument("--items", type=int, nargs="+", default=_ITEMS, help="sizes of map-reduces")
    parser.add_argument(
        "--only", action="append", choices=KINDS, metavar="KIND", help=f"again for more: {', '.join(KINDS)}"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help=f"rounds up to size {_LARGE:,}, the best of which counts; above it is one (default %(default)s)",
    )
    parser.add_argument("--no-memory", action="store_true", help="leave out memory, which takes as long as all rounds")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _measure(kind: str, size: int, *, rounds: int, with_memory: bool) -> Line:
    with tempfile.TemporaryDirectory(prefix="ensemble-ray-bench-") as home:
        chosen = rounds if size <= _LARGE else 1
        command = ["-m", "benchmarks.jobs.scale", kind, str(size), "--rounds", str(chosen)]
        if with_memory:
            command.append("--memory")
        with start_child(command, clean_environment(Path(home))) as child:
            measured: Line = json.loads(child.line(deadline_s=DEADLINE_S * max(1.0, size / _LARGE)))
    return measured


def line_of(measured: Line, smallest: Line | None) -> Line:
    """Return what was measured by task, compared with the smallest size; None: it is the smallest."""
    size, rounds = int(str(measured["size"])), measured["cpu_s"]
    assert isinstance(rounds, list)
    cpu_us = min(rounds) / size * 1e6
    peak = int(str(measured["peak_bytes"]))
    each = peak / size if peak >= 0 else None
    line: Line = measured | {
        "cpu_us_each": cpu_us,
        "collector_us_each": float(str(measured["collector_s"])) / size * 1e6,
        "bytes_each": each,
    }
    first = smallest or line
    line["cpu_ratio"] = cpu_us / float(str(first["cpu_us_each"]))
    line["bytes_ratio"] = None if each is None or not first["bytes_each"] else each / float(str(first["bytes_each"]))
    line["holds"] = None if smallest is None else _is_flat(line)
    return line


def _is_flat(line: Line) -> bool:
    """Whether neither processor time nor memory of a task has grown with the size by more than the target allows."""
    ratios = [line[name] for name in ("cpu_ratio", "bytes_ratio")]
    return all(each <= FLAT for each in ratios if isinstance(each, float))


def _print(lines: Sequence[Line]) -> None:
    table = Table(title="For each task or item; ratios to the smallest size", title_justify="left")
    table.add_column("kind", no_wrap=True)
    for head in ("size", "processor, us", "of it collector, us", "ratio", "bytes", "ratio", "target", "holds"):
        table.add_column(head, justify="right", no_wrap=True)
    for line in lines:
        shown = [line[name] for name in ("cpu_us_each", "collector_us_each", "cpu_ratio", "bytes_each", "bytes_ratio")]
        cells = [f"{each:.2f}" if isinstance(each, float) else "-" for each in shown]
        table.add_row(str(line["kind"]), f"{line['size']:,}", *cells, f"<= {FLAT:g}", verdict(line["holds"]))
    Console(width=None if Console().is_terminal else 140).print(table)
