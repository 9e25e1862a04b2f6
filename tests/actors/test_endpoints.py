"""Updates of endpoints between processes: who gets which."""

from __future__ import annotations

import asyncio

from ensemble_ray.actors.link.limiter import EndpointBoard
from ensemble_ray.actors.scheduler.processes import Lease, ProcessPool
from ensemble_ray.llm.limits.endpoints import EndpointUpdate, process_endpoints

HOME = "http://h/v1 m"
FAILED = EndpointUpdate(endpoint=HOME, category="failed", text="HTTP 503")


async def is_open(process: Lease) -> bool:
    """Whether the endpoint's breaker is open in that process, however long its news were on their way."""

    def asked(_: object) -> bool:
        endpoint = process_endpoints()._endpoints.get(HOME)
        return endpoint is not None and endpoint.breaker.is_open

    found: bool = await process.handle.__ray_call__.remote(asked)
    return found


async def until_all(processes: list[Lease], *, are_open: bool) -> None:
    """Return when all of them have heard; nobody waits for news, and they may overtake a question."""
    async with asyncio.timeout(60):
        while not all([await is_open(process) is are_open for process in processes]):  # noqa: ASYNC110  it happens in another process
            await asyncio.sleep(0.05)


async def test_news_reach_all_processes_but_the_one_that_told_when_an_endpoint_fails(ray_cluster: str) -> None:
    """S-DUR-64: also those that start while the breaker is open; an answer lets all of them go on."""
    pool = ProcessPool()
    told, heard = pool.claim("run"), pool.claim("run")
    for _ in range(5):
        pool.broadcast(FAILED, source=told.name)
    late = pool.claim("run")
    await until_all([heard, late], are_open=True)
    assert not await is_open(told)
    pool.broadcast(EndpointUpdate(endpoint=HOME, category="answered"), source=told.name)
    await until_all([heard, late], are_open=False)
    for process in (told, heard, late):
        pool.put_back(process, keep=None)


def test_only_failures_that_count_are_kept_when_time_passes() -> None:
    """S-DUR-64: not those before the last answer, nor old ones, nor more than open a breaker."""
    board = EndpointBoard()
    for at in range(8):
        board.note(FAILED, at)
    board.note(EndpointUpdate(endpoint=HOME, category="refused"), 8)
    assert len(list(board.current(8))) == 5
    assert len(list(board.current(65))) == 2
    board.note(EndpointUpdate(endpoint=HOME, category="answered"), 9)
    assert not list(board.current(9))
