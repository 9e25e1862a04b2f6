"""`python -m benchmarks soak`: whether the memory of each process of an endpoint is flat under steady load.

In: for how long, how many requests a second. Out: a table, and JSON, of each process's share of memory (PSS) over time. The first
third warms up: processes start, pools and caches fill. A process is flat when its median of the last third is at most 2 MB or 2 %
above that of the second; one that was not there in both thirds is not judged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.children import ROOT
from benchmarks.endpoint.client import Answers
from benchmarks.endpoint.places import endpoint, surroundings
from benchmarks.process_tree import memory_by_process
from benchmarks.report import environment_facts

__all__ = ["Growth", "growths_of", "main"]

RESULTS = ROOT / "benchmarks" / "results" / "soak.json"
_MB = 1e6
#: What counts as flat, bytes and share.
_FLAT_BYTES, _FLAT_SHARE = 2 * _MB, 0.02
#: A load is sent in parts of so many seconds; memory is looked at so often, s.
_PART_S, _LOOK_S = 30.0, 5.0

#: Bytes of each process, by id and name, at a time.
Look = tuple[float, Mapping[tuple[int, str], int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A process that was there in the second third and the last one."""

    pid: int
    name: str
    #: in the middle of the second and of the last third, bytes
    before_bytes: float
    after_bytes: float

    @property
    def is_flat(self) -> bool:
        """Whether it did not grow."""
        return self.after_bytes - self.before_bytes <= max(_FLAT_BYTES, self.before_bytes * _FLAT_SHARE)


def growths_of(looks: Sequence[Look]) -> list[Growth]:
    """Return what became of each process, largest growth first. Ray's call themselves after what they do just now."""
    thirds: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(3)]
    names: dict[int, str] = {}
    began, ended = looks[0][0], looks[-1][0]
    for at, sizes in looks:
        third = min(2, int(3 * (at - began) / max(ended - began, 1e-9)))
        for (pid, name), size in sizes.items():
            thirds[third][pid].append(size)
            names.setdefault(pid, name)
    _, before, after = thirds
    found = [
        Growth(pid=pid, name=names[pid], before_bytes=median(before[pid]), after_bytes=median(after[pid]))
        for pid in before
        if pid in after
    ]
    return sorted(found, key=lambda each: each.before_bytes - each.after_bytes)


def main(arguments: Sequence[str]) -> int:
    """Run it; 1 when a request failed, or a process is not flat."""
    chosen = _parser().parse_args(arguments)
    facts = environment_facts() | {"rate": chosen.rate, "minutes": chosen.minutes, "load before": os.getloadavg()[0]}
    looks: list[Look] = []
    parts: list[Answers] = []
    with (
        surroundings(latency_ms=chosen.latency_ms) as around,
        endpoint(chosen.place, around) as place,
        ThreadPoolExecutor(1) as sending,
    ):
        began = time.monotonic()
        while (left_s := began + chosen.minutes * 60 - time.monotonic()) > 0:
            requests = max(1, int(min(_PART_S, left_s) * chosen.rate))
            part = sending.submit(around.clients.send, place.load("mixed", requests=requests, rate=chosen.rate))
            while not part.done():
                looks.append((time.monotonic() - began, memory_by_process(place.child.pid)))
                time.sleep(_LOOK_S)
            parts.append(part.result())
            if not chosen.quiet:
                print(_format_look(looks[-1], parts[-1]), file=sys.stderr)
    growths = growths_of(looks)
    facts |= {"load after": os.getloadavg()[0]}
    failed = _print(growths, parts, facts)
    chosen.json.parent.mkdir(parents=True, exist_ok=True)
    found = {
        "environment": facts,
        "growths": [asdict(each) | {"is_flat": each.is_flat} for each in growths],
        "parts": [asdict(each) for each in parts],
        "looks": [
            {"at_s": at, "bytes": {f"{pid} {name[:80]}": size for (pid, name), size in sizes.items()}}
            for at, sizes in looks
        ],
    }
    chosen.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {chosen.json}")
    return int(bool(failed) or not all(each.is_flat for each in growths))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks soak",
        description="Whether the memory of each process of an endpoint is flat under steady load: completions, whole and "
        "streamed, runs that are waited for, runs whose events are read.",
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="(default %(default)s)")
    parser.add_argument("--rate", type=float, default=10.0, help="requests a second (default %(default)s)")
    parser.add_argument("--place", choices=("inline", "ray", "ray-2"), default="ray-2", help="(default %(default)s)")
    parser.add_argument("--latency-ms", type=int, default=50, help="what the model takes (default %(default)s)")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    return parser


def _format_look(look: Look, part: Answers) -> str:
    at, sizes = look
    took = f"{median(part.took_s) * 1e3:.0f} ms" if part.took_s else "-"
    return f"{at:.0f} s: {sum(sizes.values()) / _MB:.0f} MB in {len(sizes)} processes, {took}, {part.failed} failed {part.errors}"


def _print(growths: Sequence[Growth], parts: Sequence[Answers], facts: Mapping[str, object]) -> int:
    """Print the tables; return how many requests failed."""
    table = Table(title="Share of memory (PSS), MB", title_justify="left")
    for head in ("process", "second third", "last third", "more", "flat"):
        table.add_column(head, justify="left" if head == "process" else "right", no_wrap=True)
    for each in growths:
        before, after = each.before_bytes / _MB, each.after_bytes / _MB
        flat = "[green]yes[/]" if each.is_flat else "[red]NO[/]"
        table.add_row(
            f"{each.pid} {_short(each.name)}", f"{before:.1f}", f"{after:.1f}", f"{after - before:+.2f}", flat
        )
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    failed = sum(each.failed for each in parts)
    took = [seconds for each in parts for seconds in each.took_s]
    console.print(f"{len(took)} requests, {median(took) * 1e3 if took else 0:.0f} ms in the middle, {failed} failed")
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim", highlight=False)
    return failed


def _short(name: str) -> str:
    """Return what a process is, without interpreter, paths and arguments."""
    words = [word for word in name.split() if not word.endswith(("/python", "/python3")) and not word.startswith("-")]
    return words[0].rpartition("/")[2][:50] if words else name[:50]
