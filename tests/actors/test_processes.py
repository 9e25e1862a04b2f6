"""ProcessPool over real processes: used again, replaced, watched; a death frees what the dead one held."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions

from ensemble_ray import RateLimit
from ensemble_ray.actors import spawn
from ensemble_ray.actors.scheduler.processes import Lease, ProcessPool
from ensemble_ray.actors.shared.journal import RateLimiter
from ensemble_ray.llm.limits.bucket import Dismiss, Grant, Requested
from ensemble_ray.llm.limits.limiter import Acquire
from ensemble_ray.plan.placement import ClusterNode
from ensemble_ray.values.ids import new_object_id

#: Longest time to wait for what must come, s.
PATIENCE_S = 60.0


async def pid_of(process: Lease) -> int:
    """Its id for the operating system."""
    found: int = await process.handle.__ray_call__.remote(lambda _: os.getpid())
    return found


async def ended(process: Lease) -> None:
    """Return when it is gone."""
    with pytest.raises(ray.exceptions.RayActorError):
        async with asyncio.timeout(PATIENCE_S):
            await process.handle.watch.remote()


async def test_process_is_used_again_when_it_was_kept(ray_cluster: str) -> None:
    """S-SET-42, S-MR-141, S-HIER-1: by its type, and those for several nodes by where they were begun; then it ends.

    Lists of processes show what is a manager's. One at work is given to nobody else.
    """
    pool = ProcessPool()
    nodes = [ClusterNode(node_id=ray.get_runtime_context().get_node_id(), resources={"CPU": 1})]
    first = [pool.claim("1"), pool.claim("1", nodes=nodes), pool.claim("1", "callables"), pool.claim("1", "manager")]
    for process in first:
        pool.put_back(process, keep="warm")
    agent, host, manager = pool.claim("2"), pool.claim("2", "callables"), pool.claim("2", "manager")
    spread = pool.claim("2", nodes=nodes)
    assert [each.process for each in (agent, spread, host, manager)] == [each.process for each in first]
    everyone = (manager, host, spread, agent)
    pids = await asyncio.gather(*map(pid_of, everyone))
    assert len({process.name for process in everyone}) == len(set(pids)) == 4
    title = await asyncio.to_thread(Path("/proc", str(pids[0]), "cmdline").read_text)
    assert title.startswith("ray::ManagerActor")
    told: list[Lease] = []
    spread.on_death = manager.on_death = lambda process, _: told.append(process)
    pool.end(spread.process)
    pool.end(manager.process)
    pool.put_back(agent, keep=None)
    pool.put_back(host, keep="warm")
    pool.evict_idle()
    assert [process.is_alive for process in everyone] == [False] * 4
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*pool._watches, *map(ended, everyone))
    assert told == []  # an end that was wanted is no failure


async def test_death_is_told_once_and_frees_permits_when_a_process_is_killed(ray_cluster: str) -> None:
    """S-PAR-34, S-SET-36: to whoever has it; its place at the rate limiter is free; nobody gets it again."""
    pool = ProcessPool()
    busy, idle = pool.claim("run"), pool.claim("run")
    pids = [await pid_of(process) for process in (busy, idle)]
    deaths: list[tuple[Lease, BaseException]] = []
    told = asyncio.Event()

    def on_death(process: Lease, error: BaseException) -> None:
        deaths.append((process, error))
        told.set()

    busy.on_death = idle.on_death = on_death
    pool.put_back(idle, keep="warm")
    limiter, bucket, limit = spawn.rate_limiter(RateLimiter), new_object_id(), RateLimit.of(1, 3600.0)

    def acquire(holder: str, waiter: str) -> Any:
        request = Requested(holder=holder, waiter=waiter, timeout_s=PATIENCE_S)
        return limiter.receive.remote(Acquire(bucket=bucket, limit=limit, request=request))

    assert isinstance(await acquire("other", "other/0"), Grant)
    waiting = acquire(busy.name, f"{busy.name}/0")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(PATIENCE_S):
        await told.wait()
        await asyncio.gather(*pool._watches)
        assert await waiting == Dismiss(waiter=f"{busy.name}/0")
    ((dead, error),) = deaths
    assert dead is busy
    assert isinstance(error, ray.exceptions.RayActorError)
    assert [busy.is_alive, idle.is_alive] == [False, False]
    pool.put_back(busy, keep="warm")
    fresh = pool.claim("next")
    assert fresh.process not in {busy.process, idle.process}
    pool.put_back(fresh, keep=None)
