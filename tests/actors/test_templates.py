"""Kinds of agents on a real cluster: sent once, kept while they are needed, sent again where somebody lacks them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ensemble_ray import RayRuntime, tool
from tests.actors.feeding import Driver, Placed
from tests.builders import agent


@pytest.fixture
def runtime(ray_runtime: RayRuntime) -> RayRuntime:
    """The shared one; its processes stay warm from test to test."""
    return ray_runtime


def own_tool(number: int) -> object:
    """A tool that is an object of its own."""

    @tool
    def tell() -> str:
        """Tell a number."""
        return str(number)

    return tell


async def test_agents_with_tools_of_their_own_work_by_the_hundred(runtime: RayRuntime) -> None:
    """S-MR-142: in a few processes, which keep 64 of their kinds at most; one that was let go of works again."""
    model = Placed()
    workers = [agent(model, f"W{n}", tools=[own_tool(n)]) for n in range(100)]
    async with Driver(runtime) as driver:
        for turn in range(2):
            driver.executor.start([driver.order(f"map-{turn}-{n}", workers[n]) for n in range(100)])
            await driver.until(100 * (turn + 1))
        kept = await driver.in_run(lambda session: len(session._templates))
        sizes = await in_processes(driver, templates_hosted)
    assert len(driver.texts()) == 200
    assert kept == 64
    assert 1 <= len([size for size in sizes if size]) <= 4
    assert max(sizes) <= 64


def templates_hosted(host: Any) -> int:
    """How many kinds a process keeps."""
    return sum((len(run.templates) for run in host._host._runs.values()), 0)


async def in_processes(driver: Driver, look: Any) -> list[Any]:
    """What a function finds in each of the run's processes."""
    return await asyncio.gather(*(handle.__ray_call__.remote(look) for handle in await driver.processes()))


async def test_kind_is_sent_again_when_it_was_let_go_of(runtime: RayRuntime) -> None:
    """S-MR-142: by the scheduler, or by a process of agents; whoever lacks it says so, and no order is lost."""

    def forget(session: Any) -> None:
        session._templates._values.clear()
        session._templates._idle.clear()

    def forget_hosted(host: Any) -> None:
        for run in host._host._runs.values():
            run.templates._values.clear()
            run.templates._idle.clear()

    worker = agent(Placed(), replicas=1)
    async with Driver(runtime) as driver:
        for turn in range(2):
            driver.executor.start([driver.order(f"map-{turn}-{n}", worker) for n in range(6)])
            await driver.until(6 * (turn + 1))
            if not turn:
                await driver.in_run(forget)
        await in_processes(driver, forget_hosted)
        driver.executor.start([driver.order("one", worker)])
        await driver.until(13)
        await in_processes(driver, forget_hosted)
        driver.executor.start([driver.order(f"more-{n}", worker) for n in range(6)])
        await driver.until(19)
    assert len(driver.texts()) == 19
