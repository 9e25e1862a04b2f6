"""`python -m benchmarks check`: Python calls and context switches per task, and modules at import, beside a baseline.

These figures hardly depend on the machine or its load, so a small change of the code shows. Each is measured in a
fresh process. A figure per task is the difference between two sizes of a run, so the costs of its beginning and end
are a figure of their own.
"""

from __future__ import annotations

import argparse
import cProfile
import importlib
import importlib.metadata
import json
import platform
import pstats
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.children import ROOT, clean_environment, start_child
from benchmarks.harness import scenarios_named
from benchmarks.report import verdict
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.setting import Round, Setting

__all__ = ["BASELINE", "Figures", "compare", "main", "versions"]

BASELINE = ROOT / "benchmarks" / "baseline.json"
#: A figure may exceed the baseline by this share.
_ALLOWED = 0.03
#: Packages whose version changes the number of calls.
_PACKAGES = ("aiohttp", "pydantic", "yarl", "multidict")
#: By name: the scenario, and the sizes of both runs.
_KINDS: Mapping[str, tuple[str, int, int]] = {
    "chain": ("chain", 20, 60),
    "fallback": ("fallback", 20, 60),
    "tool loop": ("tool-loop", 5, 20),
    "manager": ("manager", 5, 15),
    "fan-out": ("fan-out-0ms", 100, 300),
    "map": ("map-10k-0ms", 100, 300),
}
_UNITS = {"tool loop": "tool call", "manager": "delegation"}
#: By name of the figure.
Figures = dict[str, float]


def main(arguments: Sequence[str]) -> int:
    """Measure, and compare with the baseline; 1 if a figure exceeds it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks check",
        description="Calls and context switches per task, and modules at import, beside `benchmarks/baseline.json`. Fails "
        f"if a figure of our own code is more than {_ALLOWED:.0%} above it. All calls and context switches are only shown: they "
        "depend on how many answers arrive together. The number of all modules is judged only with the versions of the baseline.",
    )
    parser.add_argument("--only", action="append", choices=[*_KINDS, "import"], help="again for more")
    parser.add_argument("--write", action="store_true", help="write the baseline instead")
    chosen = parser.parse_args(arguments)
    found: Figures = {}
    for kind in chosen.only or [*_KINDS, "import"]:
        found |= _import_figures() if kind == "import" else _figures_of(kind)
    baseline = json.loads(BASELINE.read_text()) if BASELINE.exists() else {"versions": {}, "figures": {}}
    if chosen.write:
        figures = {name: round(value, 1) for name, value in (baseline["figures"] | found).items()}
        BASELINE.write_text(json.dumps({"versions": versions(), "figures": figures}, indent=2) + "\n")
        print(f"written to {BASELINE}")
        return 0
    is_same = baseline["versions"] == versions()
    rows = compare(found, baseline["figures"], has_same_versions=is_same)
    _print(found, baseline["figures"], rows)
    if not is_same:
        print(
            f"Other versions than the baseline's {baseline['versions']}: {versions()}. Modules of libraries are not judged."
        )
    return int(not all(rows.values()))


def versions() -> dict[str, str]:
    """Return the versions on which the figures depend."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"python": python} | {package: importlib.metadata.version(package) for package in _PACKAGES}


#: The end of the name of a figure that is only shown: how many commits share the beginning and the end depends on time.
_ONCE = "at its beginning and end"


def compare(found: Figures, baseline: Figures, *, has_same_versions: bool) -> dict[str, bool]:
    """Return for each judged figure whether it holds.

    Args:
        found: The figures of this measurement.
        baseline: The figures to compare with.
        has_same_versions: Whether both were measured with the same libraries. Otherwise the number of all modules is not judged.
    """
    return {
        name: value <= baseline[name] * (1 + _ALLOWED)
        for name, value in found.items()
        if name in baseline
        and not name.endswith(_ONCE)
        and ("own" in name or ("modules" in name and has_same_versions))
    }


def _print(found: Figures, baseline: Figures, rows: Mapping[str, bool]) -> None:
    table = Table(title="Counts that do not depend on the machine", title_justify="left")
    table.add_column("figure", no_wrap=True)
    for head in ("baseline", "now", "holds"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, value in found.items():
        before = f"{baseline[name]:.1f}" if name in baseline else "-"
        table.add_row(name, before, f"{value:.1f}", verdict(rows.get(name)))
    Console(width=None if Console().is_terminal else 100).print(table)


def _figures_of(kind: str) -> Figures:
    name, small, large = _KINDS[kind]
    (scenario,) = scenarios_named([name], SCENARIOS)
    first, second = (_counted(scenario, size) for size in (small, large))
    each = {name: (second[name] - first[name]) / (large - small) for name in first}
    once = {name: first[name] - small * each[name] for name in first}
    return {
        f"{kind}: {text} per {_UNITS.get(kind, 'task')}": each[name]
        for name, text in (("calls", "calls"), ("own", "own calls"), ("switches", "context switches"))
    } | ({f"{kind}: own calls at its beginning and end": once["own"]} if kind == "chain" else {})


def _counted(scenario: Scenario, size: int) -> Figures:
    """Count one run of a size in a fresh process."""
    with tempfile.TemporaryDirectory(prefix="ensemble-ray-bench-") as home:
        environment = clean_environment(Path(home))
        command = ["-m", "ensemble_ray.testing.model_server", "--until-stdin-closes", "--text", "A short answer."]
        server = start_child([*command, *(each.format(size=size) for each in scenario.server)], environment)
        with (
            server as model,
            start_child(
                ["-m", "benchmarks.counts", _variant_of(scenario), str(size), model.line()], environment
            ) as run,
        ):
            figures: Figures = json.loads(run.line())
    return figures


def _variant_of(scenario: Scenario) -> str:
    """Return the job of a recorded run in this process."""
    name = f"inline-{scenario.name}"
    return scenario.variants[name if name in scenario.variants else "inline-recorded"]


def _import_figures() -> Figures:
    names = "from ensemble_ray import Agent, Ensemble, Task"
    code = f"import sys; before = set(sys.modules); {names}; print(*(set(sys.modules) - before))"
    with (
        tempfile.TemporaryDirectory(prefix="ensemble-ray-bench-") as home,
        start_child(["-c", code], clean_environment(Path(home))) as child,
    ):
        found = child.line().split()
    return {
        "import: modules": len(found),
        "import: own modules": sum(name.partition(".")[0] == "ensemble_ray" for name in found),
    }


def _run_counted(job: str, size: int, url: str) -> Figures:
    """Count what happens on the library's loop in a recorded run that is not the first."""
    from ensemble_ray.process.concurrency import run_blocking
    from ensemble_ray.record.sqlite import journal

    # Which thread commits depends on the speed of the disk: here it is never the loop's.
    journal.SHORT_S = 0.0
    module, _, name = job.partition(":")
    make = getattr(importlib.import_module(f"benchmarks.jobs.{module}"), name)

    async def switch(profile: cProfile.Profile, *, on: bool) -> None:  # a profile counts the thread that enables it
        (profile.enable if on else profile.disable)()

    def counted(one_round: Round) -> Figures:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
        one_round()
        switches = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - before
        profile = cProfile.Profile()
        run_blocking(switch(profile, on=True))
        one_round()
        run_blocking(switch(profile, on=False))
        counts: Figures = {"calls": 0, "own": 0, "switches": switches}
        for (file, _line, _name), (_primitive, calls, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]  # untyped there
            counts["calls"] += calls
            # An environment inside the repository contains libraries.
            counts["own"] += calls if file.startswith(str(ROOT)) and "site-packages" not in file else 0
        return counts

    setting = Setting(url=url, runtime="inline", size=size, durability="effects", extra={"slots": 50})
    with make(setting) as one_round:
        one_round()
        # A busy machine adds some rounds of the event loop and switches of threads: the smallest figure is the code's.
        found = [counted(one_round) for _ in range(3)]
    return {name: min(each[name] for each in found) for name in found[0]}


if __name__ == "__main__":
    print(json.dumps(_run_counted(sys.argv[1], int(sys.argv[2]), sys.argv[3])), flush=True)
