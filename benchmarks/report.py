"""What was measured, as a table and as JSON. In: measurements and rows. Out: text for people, a file for machines."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table

from benchmarks.children import ROOT
from benchmarks.harness import Measured
from benchmarks.rows import Overhead, Row, Target

__all__ = ["Cost", "Line", "environment_facts", "lines_of", "overheads_of", "print_report", "verdict", "write_json"]

_SCALE = {"s": 1.0, "ms": 1e3, "MB": 1 / 2**20}
_PACKAGES = ("ray", "openai", "aiohttp", "httpx", "pydantic", "loky")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One cell of the table, with what it is judged by."""

    #: median of the rounds
    value: float
    #: median of the rounds' ratios to the floor of the same round
    ratio: float | None = None
    #: smallest and largest of those
    ratio_range: tuple[float, float] | None = None
    #: the same for processor time of the whole tree, which other processes on the machine hardly disturb
    cpu_ratio: float | None = None
    target: str | None = None
    holds: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the table."""

    scenario: str
    title: str
    unit: str
    floor: Figure | None
    #: by hand on Ray; None: the teams on Ray are compared with `floor`
    floor_ray: Figure | None
    inline: Figure | None
    ray: Figure | None
    references: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One line of the table of what recording costs."""

    scenario: str
    title: str
    unit: str
    #: `inline` or `ray`
    runtime: str
    #: the runs that record nothing; medians as in the other table
    off: Figure
    #: the same runs, recorded; judged by those
    recorded: Figure
    #: median of the rounds' differences, in the unit
    more: float


def overheads_of(overheads: Sequence[Overhead], results: Sequence[Measured]) -> list[Cost]:
    """Return what recording costs, where both sides were measured."""
    by_name = {(result.scenario, result.variant): result for result in results}
    costs: list[Cost] = []
    for each in overheads:
        scale = _SCALE[each.unit]
        off, recorded = by_name.get((each.scenario, each.off)), by_name.get((each.scenario, each.recorded))
        without, with_record = _figure(off, None, None, scale), _figure(recorded, off, each.allowed, scale)
        if off is None or recorded is None or without is None or with_record is None:
            continue
        costs.append(
            Cost(
                scenario=each.scenario,
                title=each.title,
                unit=each.unit,
                runtime=each.off,
                off=without,
                recorded=with_record,
                more=median(mine - its for mine, its in zip(recorded.values, off.values, strict=True)) * scale,
            )
        )
    return costs


def lines_of(rows: Sequence[Row], results: Sequence[Measured]) -> list[Line]:
    """Return the lines of the rows that have something to show."""
    by_name = {(result.scenario, result.variant): result for result in results}
    lines: list[Line] = []
    for row in rows:

        def of(variant: str | None, scenario: str = row.scenario) -> Measured | None:
            # Without recorded runs (`--durability off`), the same team without a record takes their column.
            names = () if variant is None else (variant, variant.removesuffix("-recorded"))
            return next((found for name in names if (found := by_name.get((scenario, name)))), None)

        floor, floor_ray = of(row.floor), of(row.floor_ray)
        scale = _SCALE[row.unit]
        inline = _figure(of(row.inline), floor, row.target_inline, scale)
        ray = _figure(of(row.ray), floor if row.floor_ray is None else floor_ray, row.target_ray, scale)
        if inline or ray:
            references = {
                text: median(found.values) * scale for name, text in row.references if (found := of(name)) is not None
            }
            bounds = [bound for each in (floor, of(row.inline), of(row.ray)) if each for bound in each.bound_s]
            if any(bounds):
                references["nothing can be faster than"] = min(bounds) * scale
            lines.append(
                Line(
                    scenario=row.scenario,
                    title=row.title,
                    unit=row.unit,
                    floor=_figure(floor, None, None, scale),
                    floor_ray=_figure(floor_ray, None, None, scale),
                    inline=inline,
                    ray=ray,
                    references=references,
                )
            )
    return lines


def _figure(result: Measured | None, floor: Measured | None, target: Target | None, scale: float) -> Figure | None:
    if result is None:
        return None
    value = median(result.values)
    if floor is None:
        holds = target.holds(value=value, ratio=0.0, more=0.0) if target else None
        return Figure(value=value * scale, target=str(target) if target else None, holds=holds)
    ratios = [mine / its for mine, its in zip(result.values, floor.values, strict=True)]
    ratio = median(ratios)
    more = median(mine - its for mine, its in zip(result.values, floor.values, strict=True))
    cpu = None
    if result.cpu_s and median(floor.cpu_s) > 0:
        cpu = median(result.cpu_s) / median(floor.cpu_s)
    return Figure(
        value=value * scale,
        ratio=ratio,
        ratio_range=(min(ratios), max(ratios)),
        cpu_ratio=cpu,
        target=str(target) if target else None,
        holds=target.holds(value=value, ratio=ratio, more=more) if target else None,
    )


def print_report(lines: Sequence[Line], overheads: Sequence[Cost], facts: Mapping[str, object]) -> None:
    """Print the tables, and under them what it was measured on."""
    table = Table(title="Medians; ratios to the floor of the same run", title_justify="left")
    table.add_column("scenario", max_width=44)
    heads = (
        "unit",
        "floor",
        "by hand",
        "inline",
        "Ray",
        "inline/floor",
        "target",
        "holds",
        "Ray/floor",
        "target",
        "holds",
    )
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for line in lines:
        table.add_row(
            line.title,
            line.unit,
            *(_number(figure) for figure in (line.floor, line.floor_ray, line.inline, line.ray)),
            *_judge(line.inline),
            *_judge(line.ray),
        )
    console = Console(width=None if Console().is_terminal else 170)
    console.print(table)
    for line in lines:
        for text, value in line.references.items():
            console.print(f"{line.title}: {text} {value:.2f} {line.unit}")
        cpu = [
            f"{name} {figure.cpu_ratio:.2f}"
            for name, figure in (("inline", line.inline), ("Ray", line.ray))
            if figure and figure.cpu_ratio is not None
        ]
        if cpu:
            console.print(f"{line.title}: processor time, ratio to the floor's: {', '.join(cpu)}", highlight=False)
    console.print(
        "floor: the same calls by hand with aiohttp and a semaphore, on the same server; by hand: with two Ray actors, which "
        "are the floor of Ray where the column has a figure; cold start and memory: by hand with AsyncOpenAI",
        style="dim",
    )
    if overheads:
        _print_overheads(console, overheads)
    console.print(", ".join(f"{name} {value}" for name, value in facts.items()), style="dim", highlight=False)


def _print_overheads(console: Console, overheads: Sequence[Cost]) -> None:
    table = Table(title="What recording costs; medians of the same rounds", title_justify="left")
    table.add_column("scenario", max_width=60)
    for head in ("unit", "runtime", "off", "recorded", "more", "ratio", "CPU ratio", "allowed", "holds"):
        table.add_column(head, justify="right", no_wrap=True)
    for cost in overheads:
        ratio, allowed, holds = _judge(cost.recorded)
        cpu = cost.recorded.cpu_ratio
        table.add_row(
            cost.title,
            cost.unit,
            cost.runtime,
            _number(cost.off),
            _number(cost.recorded),
            f"{cost.more:+.3g}",
            ratio,
            "-" if cpu is None else f"{cpu:.2f}",
            allowed,
            holds,
        )
    console.print(table)


def _number(figure: Figure | None) -> str:
    return "-" if figure is None else f"{figure.value:.3g}"


def _judge(figure: Figure | None) -> tuple[str, str, str]:
    if figure is None:
        return "-", "-", "-"
    ratio = "-" if figure.ratio is None else f"{figure.ratio:.2f}"
    return ratio, figure.target or "-", verdict(figure.holds)


def verdict(holds: object) -> str:
    """Return the cell that says whether a target is held; None: it has none."""
    return "-" if holds is None else "[green]yes[/]" if holds else "[red]NO[/]"


def environment_facts() -> dict[str, object]:
    """Return what the figures depend on; load and time are added by who measures."""
    facts: dict[str, object] = {"python": platform.python_version(), "cpus": os.cpu_count(), "cpu": _cpu_model()}
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "not installed"
    return facts | {"commit": _commit()}


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _commit() -> str:
    try:
        told = subprocess.run(  # noqa: S603  a fixed command
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"],  # noqa: S607  git of the caller's path
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return told.stdout.strip() or "unknown"


def write_json(
    path: Path,
    lines: Sequence[Line],
    overheads: Sequence[Cost],
    results: Sequence[Measured],
    facts: Mapping[str, object],
) -> None:
    """Everything, round by round."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        "environment": dict(facts),
        "lines": [asdict(line) for line in lines],
        "overheads": [asdict(cost) for cost in overheads],
        "measured": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(data, indent=2) + "\n")
