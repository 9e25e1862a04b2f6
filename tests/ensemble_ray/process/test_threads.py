"""Synchronous user code beside the event loop."""

import asyncio
import subprocess
import sys
import threading
import weakref
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import pytest

from ensemble_ray.process import concurrency as module
from ensemble_ray.process.concurrency import DaemonThreads, call_user, is_async_callable

field: ContextVar[str] = ContextVar("field", default="unset")


async def test_sync_code_runs_in_a_daemon_thread() -> None:
    """S-SET-48, S-CONV-16: never in the loop's thread."""
    thread = await call_user(threading.current_thread)
    assert thread is not threading.current_thread()
    assert thread.daemon


async def test_async_code_runs_on_the_loop() -> None:
    """S-CONV-16, S-SET-33: awaited where it was called."""

    async def work(value: int) -> tuple[int, threading.Thread]:
        await asyncio.sleep(0)
        return value, threading.current_thread()

    assert await call_user(work, 3) == (3, threading.current_thread())


async def test_awaitable_is_awaited_when_sync_code_gave_one() -> None:
    """S-CONV-16: a lambda around a coroutine function is user code too."""

    async def work() -> int:
        return 7

    assert await call_user(lambda: work()) == 7  # noqa: PLW0108  that is the point
    assert await call_user(partial(work)) == 7


async def test_loop_serves_others_while_sync_code_blocks() -> None:
    """S-CONV-16: a blocking call holds up nobody."""
    release = threading.Event()
    blocked = asyncio.ensure_future(call_user(release.wait, 60))
    assert await call_user(lambda: "served") == "served"
    assert not blocked.done()
    release.set()
    assert await blocked


async def test_many_blocking_calls_run_at_the_same_time() -> None:
    """S-CONV-16, S-SET-48: no pool bounds them; each waits for all others here."""
    barrier = threading.Barrier(100)
    assert len(await asyncio.gather(*(call_user(barrier.wait, 60) for _ in range(100)))) == 100


async def test_context_variables_are_carried_in_and_not_out() -> None:
    """S-CONV-35, S-ENG-20: user code sees the log context of its task, and changes only its own copy."""
    field.set("outer")

    def work() -> str:
        seen = field.get()
        field.set("inner")
        return seen

    assert await call_user(work) == "outer"
    assert field.get() == "outer"


@pytest.mark.parametrize("error", [ValueError("x"), KeyError("k"), SystemExit(2)])
async def test_what_user_code_raises_reaches_its_caller(error: BaseException) -> None:
    """S-CONV-16: the object itself, and the thread serves on."""

    def work() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await call_user(work)
    assert caught.value is error
    assert await call_user(lambda: 1) == 1


async def test_stop_iteration_becomes_an_error_that_futures_can_hold() -> None:
    """S-CONV-16: asyncio refuses it; the caller must not wait for ever."""
    with pytest.raises(RuntimeError, match="StopIteration: done"):
        await call_user(_stop)


def _stop() -> None:
    raise StopIteration("done")


async def test_abandoned_thread_is_counted_until_it_returns() -> None:
    """S-SET-48: a cancelled caller leaves the thread to itself, and the process knows."""
    threads = DaemonThreads("test")
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(60)

    job = asyncio.ensure_future(threads.run(work))
    await call_user(begun.wait, 60)
    job.cancel()
    with pytest.raises(asyncio.CancelledError):
        await job
    assert threads.abandoned == 1
    release.set()
    await threads.run(lambda: None)
    async with asyncio.timeout(60):
        while threads.abandoned:  # noqa: ASYNC110  the thread tells its loop in its own time
            await asyncio.sleep(0)


async def test_idle_thread_is_used_again() -> None:
    """Starting a thread costs more than most tools: calls one after the other share one."""
    threads = DaemonThreads("test")
    seen = {(await threads.run(threading.get_ident)) for _ in range(50)}
    assert len(seen) == 1


async def test_nothing_of_a_call_is_kept_when_it_has_ended() -> None:
    """S-SET-48: a thread that waits for its next call holds neither what it called nor what that gave."""
    threads = DaemonThreads("test")

    class Large:
        """What is looked for afterwards."""

    given = weakref.ref(await threads.run(Large))
    async with asyncio.timeout(60):
        while given() is not None:  # noqa: ASYNC110  the thread lets go in its own time
            await asyncio.sleep(0)


def test_thread_survives_when_the_loop_is_closed_before_it_returns() -> None:
    """S-SET-48: nobody waits any more, nothing is raised in the thread."""
    threads = DaemonThreads("test")
    begun, release, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        release.wait(60)

    async def abandon() -> None:
        job = asyncio.ensure_future(threads.run(work))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 60)
        job.cancel()

    asyncio.run(abandon())
    release.set()
    asyncio.run(threads.run(done.set))
    assert done.is_set()


@pytest.mark.program
def test_process_ends_when_user_code_never_returns() -> None:
    """S-SET-48: the exit does not wait for the thread."""
    code = (
        "import asyncio, threading\n"
        "from ensemble_ray.process.concurrency import call_user\n"
        "async def main():\n"
        "    begun = threading.Event()\n"
        "    job = asyncio.ensure_future(call_user(lambda: (begun.set(), threading.Event().wait())))\n"
        "    await call_user(begun.wait)\n"
        "    job.cancel()\n"
        "asyncio.run(main())\n"
        "print('ended')\n"
    )
    home = Path(module.__file__).parents[2]
    done = subprocess.run(  # noqa: S603  our own code
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=home, check=True
    )
    assert done.stdout == "ended\n"


def test_async_callables_are_recognised() -> None:
    """S-CONV-16: functions, and objects whose `__call__` is async."""

    async def work() -> None: ...

    class Callable:
        async def __call__(self) -> None: ...

    assert is_async_callable(work)
    assert is_async_callable(Callable())
    assert not is_async_callable(len)
