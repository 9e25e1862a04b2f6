"""`python -m benchmarks million`: what an item of a large map-reduce costs on three hosts, two of which are lost."""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.table import Table

from benchmarks.children import ROOT, Child, ChildFailedError, clean_environment
from benchmarks.million.hosts import Host, NoHostsError, hosts
from benchmarks.process_tree import command_of, own_cpu_seconds
from benchmarks.report import environment_facts

__all__ = ["main"]

_SIZES = (10_000, 100_000, 1_000_000)
#: Ratio to the smallest size up to which a cost counts as flat.
FLAT = 1.2
#: What the driver may use, bytes.
DRIVER_BYTES = 400 * 10**6
#: Parts of the items after which a host is cut off, and another one killed.
_CUT_AT, _KILL_AT = 0.3, 0.6
_PORT = 6399
#: The largest run must end within that time, s; on a fast machine it takes half of it.
_DEADLINE_S = 3600.0
#: Between two lines of progress, s.
_TELL_S = 10.0
RESULTS = ROOT / "benchmarks" / "results" / "million.json"

#: Whose processor time is told apart.
PARTS = ("driver", "scheduler", "agents", "Ray")
#: A line of the table, as the JSON has it.
Line = dict[str, float]


def main(arguments: Sequence[str]) -> int:
    """Measure each size; 1 when one of them could not be measured. A missed target is a result, not a failure."""
    chosen = _parser().parse_args(arguments)
    lines: list[Line] = []
    try:
        with hosts(["head", "b", "c", "model"]) as made, tempfile.TemporaryDirectory(prefix="ensemble-bench-") as home:
            for size in sorted(chosen.items):
                has_faults = not chosen.no_faults and size == max(chosen.items)
                print(f"{size:,} items", file=sys.stderr)
                lines.append(_measure(made, Path(home) / str(size), size, chosen, has_faults=has_faults))
    except (NoHostsError, ChildFailedError, subprocess.CalledProcessError) as error:
        print(f"Not measured. {error}", file=sys.stderr)
    if lines:
        _print(lines)
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        facts = environment_facts() | {"latency ms": chosen.latency_ms, "in flight": chosen.window}
        chosen.json.write_text(json.dumps({"environment": facts, "lines": lines}, indent=2) + "\n")
        print(f"written to {chosen.json}")
    return int(len(lines) < len(chosen.items))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks million",
        description="What an item of a large map-reduce costs by the number of items, on a Ray cluster of three hosts that are "
        "network namespaces of this machine (Linux, root), with the endpoint on a fourth. During the largest run one host is "
        "cut off and one killed; no recorded answer may be requested again. A million items take up to 30 minutes on two "
        "cores and about 6 GB of disk.",
    )
    parser.add_argument(
        "--items", type=int, nargs="+", default=_SIZES, help="sizes (default: 10,000, 100,000, 1,000,000)"
    )
    parser.add_argument("--window", type=int, default=600, help="calls at the same time (default %(default)s)")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="of the endpoint (default %(default)s)")
    parser.add_argument("--no-faults", action="store_true", help="lose no host")
    parser.add_argument("--json", type=Path, default=RESULTS, help="where the figures go (default: %(default)s)")
    return parser


def _measure(made: Sequence[Host], home: Path, size: int, chosen: argparse.Namespace, *, has_faults: bool) -> Line:
    """Run that many items on a new cluster."""
    head, second, third, model_host = made
    home.mkdir()
    token = home / "token"
    token.write_text("benchmark-of-a-million-items")
    environment = clean_environment(home) | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ADDRESS": f"{head.address}:{_PORT}",
        "NO_PROXY": "*",
        # A host that does not answer counts as lost after 15 s instead of a minute.
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_timeout_ms": "5000",
        "RAY_health_check_failure_threshold": "3",
    }
    recorded = home / "recorded"
    recorded.write_bytes(bytes(size))
    with contextlib.ExitStack() as stack:
        model = _start(
            stack,
            model_host,
            ["-m", "benchmarks.million.model", model_host.address, str(chosen.latency_ms)],
            environment,
        )
        url = model.line()
        stack.enter_context(_ray([head, second, third], environment))
        used = stack.enter_context(_Processor([head, second, third]))
        driver = _start(stack, head, ["-m", "benchmarks.million.driver", url], environment)
        driver.line()
        model.ask(f"begin {recorded} {size}")
        used.begin()
        losses = [(_CUT_AT, second.cut_off), (_KILL_AT, third.kill)] if has_faults else []
        with _watching(model, size, losses):
            answer = driver.ask(f"{recorded} {size} {chosen.window}", deadline_s=_DEADLINE_S)
        measured: dict[str, float] = json.loads(answer)
        counts: dict[str, int] = json.loads(model.ask("counts"))
        spent = {part: value / size * 1e3 for part, value in used.spent_s().items()}
        return {
            "size": size,
            "lost_hosts": len(losses),
            "seconds": measured["seconds"],
            "ms_each": measured["seconds"] / size * 1e3,
            "cpu_ms_each": sum(spent.values()),
            **{f"{part}_cpu_ms_each": value for part, value in spent.items()},
            "record_bytes_each": measured["record_bytes"] / size,
            "driver_bytes": measured["peak_bytes"],
            "requests": counts["requests"],
            "repeated in flight": counts["repeated"],
            "requested after record": counts["after_record"],
            "missing": measured["missing"] + size - counts["items"],
        }


def _start(stack: contextlib.ExitStack, host: Host, arguments: Sequence[str], environment: Mapping[str, str]) -> Child:
    child = Child(arguments, environment, command=host.command(sys.executable))
    stack.callback(child.detach)
    return child


@contextlib.contextmanager
def _ray(cluster: Sequence[Host], environment: Mapping[str, str]) -> Generator[None]:
    """Start Ray on each host, the first of which is the head; its processes end with the block."""
    for host in cluster:
        where = (
            ["--head", f"--port={_PORT}", "--include-dashboard=false"]
            if host is cluster[0]
            else [f"--address={environment['RAY_ADDRESS']}"]
        )
        started = subprocess.run(  # noqa: S603  Ray's own program
            host.command(
                sys.executable,
                "-m",
                "ray.scripts.scripts",
                "start",
                *where,
                f"--node-ip-address={host.address}",
                "--num-cpus=1",
                "--object-store-memory=200000000",
                "--disable-usage-stats",
            ),
            check=False,
            capture_output=True,
            text=True,
            env=dict(environment),
            cwd=ROOT,
            timeout=120,
        )
        if started.returncode:
            raise ChildFailedError(f"Ray did not start on {host.name}:\n{started.stderr[-3000:]}")
    try:
        yield
    finally:
        for host in reversed(cluster):
            host.kill()


class _Processor:
    """Processor time of all processes of some hosts, also of those that have ended."""

    def __init__(self, cluster: Sequence[Host]) -> None:
        self._cluster = cluster
        self._last: dict[int, float] = {}
        self._before: dict[int, float] = {}
        self._parts: dict[int, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def begin(self) -> None:
        """Count from here."""
        self._look_once()
        self._before = self._last.copy()

    def spent_s(self) -> dict[str, float]:
        """Return what was used since `begin` by part, s; of a process that ended, up to the last second before."""
        self._look_once()
        spent = dict.fromkeys(PARTS, 0.0)
        for pid, used in self._last.copy().items():
            spent[self._parts.get(pid, "Ray")] += used - self._before.get(pid, 0.0)
        return spent

    def _look_once(self) -> None:
        for host in self._cluster:
            for pid in host.pids():
                if (used := own_cpu_seconds(pid)) is not None:
                    self._last[pid] = used
                    if part := _part_of(command_of(pid)):  # a worker of Ray changes its name when it gets an actor
                        self._parts[pid] = part

    def _look(self) -> None:
        while not self._ended.wait(1.0):
            self._look_once()


def _part_of(command: str) -> str | None:
    """Return the part of a process by its command; None: one of Ray's own, or not known yet."""
    if "benchmarks.million.driver" in command:
        return "driver"
    if command.startswith("ray::Scheduler"):
        return "scheduler"
    return "agents" if command.startswith("ray::") and "IDLE" not in command else None


@contextlib.contextmanager
def _watching(model: Child, size: int, losses: Sequence[tuple[float, Callable[[], None]]]) -> Generator[None]:
    """Print progress, and lose each host once its part of the items was requested."""
    ended = threading.Event()

    def watch() -> None:
        left, told_at = list(losses), 0.0
        while not ended.wait(0.5):
            items = json.loads(model.ask("counts"))["items"]
            if left and items >= left[0][0] * size:
                _, lose = left.pop(0)
                lose()
                print(f"  lost a host after {items:,} items", file=sys.stderr)
            if time.monotonic() - told_at > _TELL_S:
                told_at = time.monotonic()
                print(f"  {items:,} of {size:,} items requested", file=sys.stderr)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _print(lines: Sequence[Line]) -> None:
    table = Table(title="Map-reduce on three hosts; in brackets the ratio to the smallest size", title_justify="left")
    table.add_column("items", no_wrap=True)
    for line in lines:
        table.add_column(f"{line['size']:,}", justify="right", no_wrap=True)

    def add(head: str, text: Callable[[Line], str]) -> None:
        table.add_row(head, *map(text, lines))

    def compared(line: Line, name: str, form: str) -> str:
        return f"{line[name]:{form}} ({line[name] / lines[0][name]:.2f})"

    add("hosts lost", lambda line: f"{line['lost_hosts']}")
    add("seconds", lambda line: f"{line['seconds']:.1f}")
    add("ms for each item", lambda line: compared(line, "ms_each", ".2f"))
    add("processor ms for each item", lambda line: compared(line, "cpu_ms_each", ".2f"))
    for part in PARTS:
        table.add_row(f"  of it {part}", *(f"{line[f'{part}_cpu_ms_each']:.2f}" for line in lines))
    add("bytes of the record for each item", lambda line: compared(line, "record_bytes_each", ",.0f"))
    add("memory of the driver, MB", lambda line: f"{line['driver_bytes'] / 1e6:.0f}")
    for name in ("requests", "repeated in flight", "requested after record", "missing"):
        table.add_row(name, *(f"{line[name]:,.0f}" for line in lines))
    Console(width=None if Console().is_terminal else 120).print(table)
    print(f"Targets: ratios at most {FLAT}, driver below {DRIVER_BYTES / 1e6:.0f} MB, none after record, none missing.")
