"""The `CpuPool` port: one suite for every adapter. A new adapter joins by a line in `ADAPTERS`."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import cache
from pathlib import Path
from typing import cast

import pytest

from ensemble_ray import ToolContext, ToolExecutionError, current_tool_context, tool
from ensemble_ray.ports import CpuPool, Services, use_services
from ensemble_ray.tools.call import call_tool
from ensemble_ray.tools.cpu import CannotTravelError, LokyCpuPool, ToolOutcome, pack
from ensemble_ray.tools.registry import resolve_tools
from tests.template import run_forked


@cache
def _local_pool() -> LokyCpuPool:
    """One for all tests: what one of them does to it, the next ones find mended, and processes need not start anew."""
    return LokyCpuPool(workers=2, idle_s=600.0)  # none leaves while tests of another adapter take their time


@asynccontextmanager
async def loky_pool() -> AsyncIterator[CpuPool]:
    """Two processes of this machine."""
    yield _local_pool()


@asynccontextmanager
async def ray_pool() -> AsyncIterator[CpuPool]:
    """Two processors of the shared cluster."""
    from ensemble_ray.actors.spawn import cpu_call
    from ensemble_ray.actors.worker.agent import RayCpuPool

    yield RayCpuPool(cpu_call())


#: Name -> what opens an adapter with room for two calls at once. Those named `ray` find the shared cluster running.
ADAPTERS: dict[str, Callable[[], AbstractAsyncContextManager[CpuPool]]] = {"loky": loky_pool, "ray": ray_pool}


@pytest.fixture(scope="module", autouse=True)
def local_processes() -> Iterator[None]:
    """They end with the last test."""
    yield
    _local_pool().close()


@pytest.fixture(params=sorted(ADAPTERS))
def adapter(request: pytest.FixtureRequest) -> str:
    """The name of each adapter in turn; the cluster is started for the one that needs it."""
    if request.param == "ray":
        request.getfixturevalue("ray_cluster")
    return str(request.param)


@pytest.fixture
async def pool(adapter: str) -> AsyncIterator[CpuPool]:
    """Each adapter in turn."""
    async with ADAPTERS[adapter]() as opened:
        yield opened


def where(n: int) -> tuple[int, int]:
    """The argument and the process."""
    return n, os.getpid()


def meet(here: str, there: str) -> str:
    """Come back only when another call of this function is there at the same time."""
    Path(here).touch()
    until = time.monotonic() + 85
    while not Path(there).exists():
        if time.monotonic() > until:
            msg = "nobody came"
            raise TimeoutError(msg)
        time.sleep(0.01)
    return here


async def until_exists(mark: Path) -> None:
    """Return when a call of `meet` is at work."""
    async with asyncio.timeout(90):
        while not mark.exists():  # noqa: ASYNC110, ASYNC240  the other process has no event to set, and a look is short
            await asyncio.sleep(0.02)


def sleep(seconds: float) -> str:
    """Take long."""
    time.sleep(seconds)
    return "rested"


def fail(text: str) -> None:
    """Raise."""
    raise LookupError(text)


def die() -> None:
    """End the process the hard way."""
    os._exit(1)


async def test_function_runs_elsewhere_when_called(pool: CpuPool) -> None:
    """S-SET-35: in another process; module-level functions and closures alike."""
    n, process = cast("tuple[int, int]", await pool.run(pack(where), {"n": 4}, timeout_s=60))
    assert n == 4
    assert process != os.getpid()
    factor = 3
    assert await pool.run(pack(lambda n: n * factor), {"n": 2}, timeout_s=None) == 6


async def test_calls_overlap_when_there_are_processors(pool: CpuPool, tmp_path: Path) -> None:
    """S-SET-35: cores add up: two calls wait for each other and both come back."""
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    calls = [
        pool.run(pack(meet), {"here": one, "there": two}, timeout_s=90),
        pool.run(pack(meet), {"here": two, "there": one}, timeout_s=90),
    ]
    assert await asyncio.gather(*calls) == [one, two]


async def test_error_arrives_when_the_function_raises(pool: CpuPool) -> None:
    """S-SET-35: as its own class, and the pool goes on."""
    with pytest.raises(LookupError, match=r"(?m)^no such row$"):
        await pool.run(pack(fail), {"text": "no such row"}, timeout_s=60)
    assert await pool.run(pack(sleep), {"seconds": 0}, timeout_s=60) == "rested"


async def test_error_arrives_when_something_cannot_travel(pool: CpuPool) -> None:
    """S-SET-35: the function there, the arguments here, the result back; the pool goes on."""
    with pytest.raises(CannotTravelError):
        await pool.run(b"\x80\x04cnowhere\nthing\n.", {}, timeout_s=60)
    with pytest.raises(CannotTravelError):
        await pool.run(pack(sleep), {"seconds": threading.Lock()}, timeout_s=60)
    with pytest.raises(TypeError, match="cannot travel"):
        await pool.run(pack(threading.Lock), {}, timeout_s=60)
    assert await pool.run(pack(sleep), {"seconds": 0}, timeout_s=60) == "rested"


async def test_call_is_given_up_when_its_time_is_over(pool: CpuPool, tmp_path: Path) -> None:
    """S-SET-34: TimeoutError; a call beside it ends well, and so do later ones, with all processors."""
    begun, over = tmp_path / "begun", tmp_path / "over"
    beside = asyncio.ensure_future(pool.run(pack(meet), {"here": str(begun), "there": str(over)}, timeout_s=90))
    await until_exists(begun)
    with pytest.raises(TimeoutError):
        await pool.run(pack(sleep), {"seconds": 3600}, timeout_s=0.2)
    over.touch()
    assert await beside == str(begun)
    calls = [pool.run(pack(sleep), {"seconds": 0}, timeout_s=60) for _ in range(4)]
    assert await asyncio.gather(*calls) == ["rested"] * 4


async def test_call_is_given_up_when_its_caller_is_cancelled(pool: CpuPool, tmp_path: Path) -> None:
    """S-SET-35: the processor is free again."""
    started = tmp_path / "started"
    running = asyncio.ensure_future(
        pool.run(pack(meet), {"here": str(started), "there": str(tmp_path / "never")}, timeout_s=None)
    )
    await until_exists(started)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    calls = [
        pool.run(pack(meet), {"here": one, "there": two}, timeout_s=90),
        pool.run(pack(meet), {"here": two, "there": one}, timeout_s=90),
    ]
    assert await asyncio.gather(*calls) == [one, two]


async def test_only_one_call_fails_when_its_process_dies(pool: CpuPool, tmp_path: Path) -> None:
    """S-ERR-19: a crash is an error of the call that made it; others end well."""
    begun, over = tmp_path / "begun", tmp_path / "over"
    beside = asyncio.ensure_future(pool.run(pack(meet), {"here": str(begun), "there": str(over)}, timeout_s=90))
    await until_exists(begun)
    with pytest.raises(ToolExecutionError, match="ended unexpectedly"):
        await pool.run(pack(die), {}, timeout_s=60)
    over.touch()
    assert await beside == str(begun)
    assert await pool.run(pack(sleep), {"seconds": 0}, timeout_s=60) == "rested"


@tool(cpu=True, timeout=60)
def digest(text: str, times: int = 1) -> str:
    """Work on a text."""
    context = current_tool_context()
    return f"{text * times} {context.logger.name} {context.idempotency_key} {os.getpid()}"


async def test_tool_runs_elsewhere_when_it_is_heavy(pool: CpuPool) -> None:
    """S-SET-35: `@tool(cpu=True)` end to end; logger and idempotency key are there, the role is not."""
    (bound,) = resolve_tools([digest])
    with use_services(Services(limiter=None, cpu=pool)):  # type: ignore[arg-type]  # nothing here asks for a permit
        outcome = await call_tool(
            bound, '{"text": "a", "times": "3"}', context=ToolContext(tool_name="digest", idempotency_key="k")
        )
    assert isinstance(outcome, ToolOutcome)
    text, logger, key, process = outcome.text.split()
    assert (outcome.outcome, text, logger, key) == ("success", "aaa", "ensemble_ray.tool.digest", "k")
    assert process != str(os.getpid())


def test_process_exits_when_a_call_never_returns(tmp_path: Path) -> None:
    """S-SET-48: the worker processes end with the process that started them."""
    script = (
        "import asyncio, pathlib, sys, threading, time\n"
        "from ensemble_ray.tools.cpu import LokyCpuPool, pack\n"
        "started = pathlib.Path(sys.argv[1])\n"
        "def never():\n"
        "    started.touch()\n"
        "    time.sleep(3600)\n"
        "async def work():\n"
        "    await LokyCpuPool(workers=1).run(pack(never), {}, timeout_s=None)\n"
        "threading.Thread(target=asyncio.run, args=(work(),), daemon=True).start()\n"
        "while not started.exists(): time.sleep(0.02)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "started")]
    run_forked(command, check=True, timeout=120, capture_output=True)
