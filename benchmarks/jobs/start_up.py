"""What starting costs, step by step, in one program: `python -m benchmarks start-up`.

Out: seconds, processor seconds and memory that each step adds to this program and all processes below it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from benchmarks.process_tree import cpu_seconds, memory_of

__all__ = ["main"]

_MIB = 2**20
_TEAM = "llm: openai:benchmark\ntasks: {t: {description: d}}\n"


def main(arguments: Sequence[str]) -> int:
    """Measure each step once, in a home of its own."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks start-up",
        description="What starting costs: the import, a run in this process, a local Ray, its further runs, agents, an endpoint.",
    )
    parser.add_argument(
        "--agents", type=int, default=5, help="of the step that starts more of them (default %(default)s)"
    )
    parser.add_argument(
        "--settle-s", type=float, default=2.0, help="after each step, for what it started last (default %(default)s)"
    )
    chosen = parser.parse_args(arguments)
    os.environ["OPENAI_API_KEY"] = "benchmark"
    with tempfile.TemporaryDirectory(prefix="ensemble-ray-bench-") as home:
        os.environ["ENSEMBLE_RAY_HOME"] = home
        print(f"{'step':34}{'s':>8}{'processor s':>13}{'MiB (PSS)':>11}{'processes':>11}")
        _measure_steps(Path(home), agents=chosen.agents, settle_s=chosen.settle_s)
    return 0


def _measure_steps(home: Path, *, agents: int, settle_s: float) -> None:
    def measure(step: str, work: Callable[[], object]) -> None:
        _measure(step, work, settle_s=settle_s)

    measure("import ensemble_ray", _import)
    from ensemble_ray import InlineRuntime, RayRuntime

    inline, on_ray = InlineRuntime(), RayRuntime()
    measure("first run, inline", lambda: _run(inline, 1))
    measure("first run, local Ray", lambda: _run(on_ray, 1))
    measure("further run", lambda: _run(on_ray, 1))
    measure(f"run with {agents} more agents", lambda: _run(on_ray, agents + 1))
    measure("run with the same agents", lambda: _run(on_ray, agents + 1))
    measure("an endpoint: Ray Serve, one replica", lambda: _serve(home))


def _measure(step: str, work: Callable[[], object], *, settle_s: float) -> None:
    here = os.getpid()
    processor_before, memory_before, begun = cpu_seconds(here), memory_of(here), time.perf_counter()
    work()
    took = time.perf_counter() - begun
    time.sleep(settle_s)  # processes that were started go on for a moment
    processor, memory = cpu_seconds(here) - processor_before, memory_of(here)
    added = (memory.pss_bytes - memory_before.pss_bytes) / _MIB
    print(
        f"{step:34}{took:>8.2f}{processor:>13.2f}{added:>11.0f}{memory.processes - memory_before.processes:>11}",
        flush=True,
    )


def _import() -> object:
    from ensemble_ray import Ensemble

    return Ensemble


def _run(runtime: object, agents: int) -> None:
    from ensemble_ray import Agent, Ensemble, Task
    from ensemble_ray.runs.ports import Runtime
    from ensemble_ray.testing import ScriptedModel

    made = [
        Agent(role=f"Writer {number}", goal="Write", llm=ScriptedModel("text"), isolation="process")
        for number in range(agents)
    ]
    tasks = [Task(description=agent.role, expected_output="text", agent=agent) for agent in made]
    Ensemble(tasks=tasks, workflow="parallel").run(runtime=cast("Runtime", runtime))


def _serve(home: Path) -> None:
    from ray import serve

    from ensemble_ray.serve.app import EndpointOptions, app

    team = home / "team.yaml"
    team.write_text(_TEAM, encoding="utf-8")
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": 0})
    serve.run(app(EndpointOptions(ensembles=(str(team),))), name="benchmark", route_prefix="/")
