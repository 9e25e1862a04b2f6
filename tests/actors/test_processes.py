"""ProcessPool over real processes: used again, replaced, watched; a death frees what the dead one held."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions

from actors import spawn
from actors.processes import Process, ProcessPool
from ensemble_ray import RateLimit
from ensemble_ray.ids import new_object_id
from ensemble_ray.limits.desk import Acquire, Dismissed, Granted

#: Longest time to wait for what must come, s.
PATIENCE_S = 60.0


async def pid_of(process: Process) -> int:
    """Its id for the operating system."""
    found: int = await process.handle.__ray_call__.remote(lambda _: os.getpid())
    return found


async def ended(process: Process) -> None:
    """Return when it is gone."""
    with pytest.raises(ray.exceptions.RayActorError):
        async with asyncio.timeout(PATIENCE_S):
            await process.handle.watch.remote()


async def test_process_is_used_again_when_it_was_kept(ray_cluster: str) -> None:
    """S-SET-42: by its kind; one at work is given to nobody else; what is not kept, or cooled, ends."""
    pool = ProcessPool()
    agent, host = pool.take(), pool.take("callables")
    assert agent.name != host.name
    agent.busy.add("a#0")
    for process in (host, agent):
        pool.give_back(process, keep=True)
    assert pool.take() is agent
    assert not agent.busy
    assert pool.take("callables") is host
    assert await pid_of(agent) != await pid_of(host)
    pool.give_back(agent, keep=False)
    pool.give_back(host, keep=True)
    pool.cool()
    assert [agent.is_alive, host.is_alive] == [False, False]
    await asyncio.gather(ended(agent), ended(host))


async def test_process_of_a_manager_is_nobody_elses(ray_cluster: str) -> None:
    """S-HIER-1, S-SET-42: it is kept for managers, and lists of processes show what it is."""
    pool = ProcessPool()
    manager = pool.take("manager")
    pool.give_back(manager, keep=True)
    agent = pool.take()
    assert agent is not manager
    place = Path("/proc", str(await pid_of(manager)), "cmdline")
    assert (await asyncio.to_thread(place.read_text)).startswith("ray::ManagerActor")
    assert pool.take("manager") is manager
    pool.end(agent)
    pool.end(manager)


async def test_death_is_told_once_and_frees_permits_when_a_process_is_killed(ray_cluster: str) -> None:
    """S-PAR-34, S-SET-36: to whoever has it; its place at the rate limiter is free; nobody gets it again."""
    pool = ProcessPool()
    busy, idle = pool.take(), pool.take()
    pids = [await pid_of(process) for process in (busy, idle)]
    deaths: list[tuple[Process, BaseException]] = []
    told = asyncio.Event()

    def on_death(process: Process, error: BaseException) -> None:
        deaths.append((process, error))
        told.set()

    busy.on_death = idle.on_death = on_death
    pool.give_back(idle, keep=True)
    limiter, bucket, limit = spawn.rate_limiter(), new_object_id(), RateLimit.of(1, 3600.0)

    def acquire(holder: str, waiter: str) -> Any:
        return limiter.receive.remote(
            Acquire(bucket=bucket, limit=limit, holder=holder, waiter=waiter, timeout_s=PATIENCE_S)
        )

    assert isinstance(await acquire("other", "other/0"), Granted)
    waiting = acquire(busy.name, f"{busy.name}/0")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await told.wait()
        await asyncio.gather(*pool._watches)
        assert await waiting == Dismissed()
    ((dead, error),) = deaths
    assert dead is busy
    assert isinstance(error, ray.exceptions.RayActorError)
    assert [busy.is_alive, idle.is_alive] == [False, False]
    pool.give_back(busy, keep=True)
    fresh = pool.take()
    assert fresh not in {busy, idle}
    pool.give_back(fresh, keep=False)


async def test_death_is_not_told_when_the_pool_ended_it(ray_cluster: str) -> None:
    """An end that was wanted is no failure."""
    pool = ProcessPool()
    process = pool.take()
    await pid_of(process)
    process.on_death = lambda *_: pytest.fail("told")
    pool.end(process)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*pool._watches)


async def test_process_that_is_spread_is_not_one_that_was_placed_where_there_was_room(ray_cluster: str) -> None:
    """S-MR-141, S-SET-42: replicas of a run on several nodes take only those that were begun for that."""
    pool = ProcessPool()
    plain, spread = pool.take(), pool.take(is_spread=True)
    assert await pid_of(plain) != await pid_of(spread)
    for process in (plain, spread):
        pool.give_back(process, keep=True)
    assert pool.take(is_spread=True) is spread
    assert pool.take() is plain
    pool.end(plain)
    pool.end(spread)
