"""Memory of the scheduler's process for a planned run on Ray whose outputs are large: `python -m benchmarks scheduler-memory`.

Out: what is resident in it before the run, at its peak and after it, in MB.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["main", "measure"]

_MB = 1_000_000


def main(arguments: Sequence[str]) -> int:
    """Measure a run of the chosen size, recorded in a folder that goes with it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks scheduler-memory",
        description="What the scheduler's process holds while a planned run on Ray gives large outputs.",
    )
    parser.add_argument("--tasks", type=int, default=2000, help="independent tasks (default %(default)s)")
    parser.add_argument("--bytes", type=int, default=100_000, help="size of each output (default %(default)s)")
    chosen = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="ensemble-ray-bench-") as home:
        os.environ["ENSEMBLE_RAY_HOME"] = home
        measure(chosen.tasks, chosen.bytes)
    return 0


def measure(tasks: int, output_bytes: int) -> None:
    """Run that many independent tasks with outputs of that size, and print the figures."""
    from ensemble_ray import Ensemble, RayRuntime, Task, Workflow

    def team(count: int) -> Ensemble:
        made = [
            Task(
                name=f"t{number}",
                description=f"Write part {number}",
                expected_output="text",
                handler=lambda _: "x" * output_bytes,
            )
            for number in range(count)
        ]
        return Ensemble(tasks=made, workflow=Workflow.PARALLEL)

    with RayRuntime() as runtime:
        team(1).run(runtime=runtime)
        before = in_scheduler("VmRSS")
        begun = time.monotonic()
        output = team(tasks).run(runtime=runtime)
        took = time.monotonic() - begun
        held = sum(len(each.raw) for each in output.task_outputs)
        peak, after = in_scheduler("VmHWM"), in_scheduler("VmRSS")
    print(
        f"{tasks} tasks, {held / _MB:.0f} MB of outputs, {took:.1f} s: scheduler {before / _MB:.0f} MB before, "
        f"peak {peak / _MB:.0f} MB ({(peak - before) / _MB:+.0f}), {after / _MB:.0f} MB after"
    )


def in_scheduler(name: str) -> int:
    """Return a memory figure of the scheduler's process, bytes: `VmRSS` is now, `VmHWM` the peak."""
    import ray

    scheduler: Any = ray.get_actor("scheduler", namespace="ensemble_ray")
    return int(ray.get(scheduler.__ray_call__.remote(lambda _, name=name: resident_bytes(name))))  # noqa: TID251  a script


def resident_bytes(name: str) -> int:
    """Return that memory figure of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
