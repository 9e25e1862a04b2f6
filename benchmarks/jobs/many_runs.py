"""Many small runs at once on one cluster, led by one scheduler, or spread over two or four."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

from benchmarks.setting import MODEL, Round, Setting

__all__ = ["four", "one", "two"]

#: Runs that go on at the same time; those of one scheduler share its processes.
_AT_ONCE = 32


def one(setting: Setting) -> AbstractContextManager[Round]:
    """Lead all runs by one scheduler."""
    return _rounds(setting, shards=1)


def two(setting: Setting) -> AbstractContextManager[Round]:
    """Spread the runs over two schedulers."""
    return _rounds(setting, shards=2)


def four(setting: Setting) -> AbstractContextManager[Round]:
    """Spread the runs over four schedulers."""
    return _rounds(setting, shards=4)


@contextmanager
def _rounds(setting: Setting, *, shards: int) -> Generator[Round]:
    from ensemble_ray import Agent, Ensemble, OpenAIChatModel, RayRuntime, RunOptions, Task

    writer = Agent(role="Writer", goal="Write", llm=OpenAIChatModel(MODEL, base_url=setting.url, api_key="benchmark"))
    team = Ensemble(tasks=[Task(description="Write a sentence", expected_output="One sentence", agent=writer)])
    options = RunOptions(durability=setting.durability)

    async def work(runtime: RayRuntime) -> None:
        slots = asyncio.Semaphore(_AT_ONCE)

        async def run() -> None:
            async with slots:
                await team.arun(runtime=runtime, options=options)

        await asyncio.gather(*(run() for _ in range(setting.size)))

    with RayRuntime("local", shards=shards) as runtime:

        def timed() -> float:
            began = time.perf_counter()
            asyncio.run(work(runtime))
            return time.perf_counter() - began

        yield timed
