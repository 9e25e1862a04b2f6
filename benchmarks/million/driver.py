"""The program that owns the runs: `python -m benchmarks.million.driver MODEL_URL`; the cluster is in `RAY_ADDRESS`.

Reads lines `FILE SIZE WINDOW`: maps and reduces that many items, and sets the item's byte of the file to 1 once its
answer is recorded. Prints seconds, peak of memory and bytes of the record as JSON.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from pathlib import Path

from benchmarks.million.model import REDUCE
from ensemble_ray import (
    Agent,
    MapReduceEnsemble,
    MapReduceRun,
    OpenAIChatModel,
    RayRuntime,
    RetryPolicy,
    RunOptions,
    Task,
)
from ensemble_ray.runs.ports import Runtime

#: Outputs of a group.
_GROUP = 100


def _run(runtime: Runtime, url: str, recorded: Path, size: int, window: int) -> dict[str, float]:
    model = OpenAIChatModel("benchmark", base_url=url, api_key="benchmark")
    worker = Agent(role="Reader", goal="Read", llm=model)

    def part(number: int) -> Task:
        return Task(
            description=f"Summarise item {number} in one sentence.", expected_output="One sentence", agent=worker
        )

    def join(group: list[Task]) -> Task:
        return Task(description=REDUCE, expected_output="One sentence", agent=worker, context=group)

    team = MapReduceEnsemble(
        items=iter(range(size)),
        map_task=part,
        reduce_task=join,
        chunk_size=_GROUP,
        mode="pipelined",
        max_parallel_tasks=window,
        retry=RetryPolicy(max_attempts=8),
    )
    home = Path(os.environ["ENSEMBLE_RAY_HOME"])
    before = _bytes_of(home)
    began = time.perf_counter()
    begun = team.start(runtime=runtime, options=RunOptions(durability="effects"))
    assert isinstance(begun, MapReduceRun)
    with recorded.open("r+b") as file, mmap.mmap(file.fileno(), size) as done:
        for result in begun.items():
            done[result.index] = 1
        begun.result()
        missing = size - done[:].count(1)
    took_s = time.perf_counter() - began
    return {"seconds": took_s, "missing": missing, "peak_bytes": _peak(), "record_bytes": _bytes_of(home) - before}


def _peak() -> int:
    """Return the largest resident set of this process so far."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _bytes_of(home: Path) -> int:
    return sum(path.stat().st_size for path in home.rglob("*") if path.is_file())


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray prints what its processes say
    with RayRuntime() as on_ray:
        print("ready", file=answers, flush=True)
        for line in sys.stdin:
            file, *numbers = line.split()
            size, window = map(int, numbers)
            print(json.dumps(_run(on_ray, sys.argv[1], Path(file), size, window)), file=answers, flush=True)
