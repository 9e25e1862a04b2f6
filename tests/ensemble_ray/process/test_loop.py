"""The library's own loop, and the ways onto it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import signal
import sys
import threading
from contextvars import ContextVar

import pytest

from ensemble_ray.process.concurrency import bridge, library_loop, on_library_loop, run_blocking, submit

#: Longest wait for what must come, s; a test that needs it has failed.
PATIENCE_S = 60.0

field: ContextVar[str] = ContextVar("field", default="unset")


async def where() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """Where this runs."""
    await asyncio.sleep(0)
    return asyncio.get_running_loop(), threading.current_thread()


def waits_for_result(thread: int) -> bool:
    """Whether that thread has come as far as waiting."""
    frame = sys._current_frames()[thread]
    while frame.f_back is not None and frame.f_code is not concurrent.futures.Future.result.__code__:
        frame = frame.f_back
    return frame.f_code is concurrent.futures.Future.result.__code__


class Stuck:
    """Work that waits for ever; tells when it began and when it was cancelled."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.cancelled = threading.Event()

    async def __call__(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def test_everything_runs_on_one_daemon_thread() -> None:
    """S-CONV-15: whoever asks."""
    loop, thread = run_blocking(where())
    assert (loop, thread) == submit(where()).result(PATIENCE_S)
    assert loop is library_loop()
    assert thread.daemon
    assert thread is not threading.current_thread()
    assert not on_library_loop()


async def test_blocking_call_works_inside_a_running_loop() -> None:
    """S-CONV-15: as in a notebook."""
    loop, _ = run_blocking(where())
    assert loop is not asyncio.get_running_loop()


async def test_bridge_leads_from_any_loop() -> None:
    """S-CONV-15: and stays where it is on the library's loop itself."""
    loop, thread = await bridge(where())
    assert loop is library_loop()

    async def inner() -> asyncio.Task[object] | None:
        async def current() -> asyncio.Task[object] | None:
            return asyncio.current_task()

        assert on_library_loop()
        return await bridge(current()) if asyncio.current_task() is await bridge(current()) else None

    assert await bridge(inner()) is not None
    assert thread is not threading.current_thread()


def test_context_variables_come_along() -> None:
    """S-PAR-16, S-CONV-35: the caller's, and what the work sets stays with it."""

    async def work() -> str:
        before = field.get()
        field.set("changed")
        return before

    token = field.set("mine")
    try:
        assert run_blocking(work()) == "mine"
        assert field.get() == "mine"
    finally:
        field.reset(token)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_error_of_the_work_comes_to_its_caller_alone(error: type[BaseException]) -> None:
    """S-SET-27: even what is meant to end a process leaves the loop and everybody else's work alive."""
    other = Stuck()
    waiting = submit(other())
    assert other.begun.wait(PATIENCE_S)

    async def work() -> None:
        await asyncio.sleep(0)
        raise error

    with pytest.raises(error):
        run_blocking(work())
    assert run_blocking(where())[0] is library_loop()
    assert not waiting.done()
    waiting.cancel()
    assert other.cancelled.wait(PATIENCE_S)


def test_loop_lives_on_when_a_bare_task_of_it_exits() -> None:
    """S-SET-27: asyncio leaves a loop whose task raises SystemExit; ours goes on."""

    async def leave() -> None:
        raise SystemExit(3)

    async def begin() -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(leave())

    async def told(task: asyncio.Task[None]) -> BaseException | None:
        await asyncio.wait([task])
        return task.exception()

    leaving = run_blocking(begin())
    assert isinstance(run_blocking(told(leaving)), SystemExit)


def test_work_is_cancelled_with_its_future() -> None:
    """S-SET-27: and the future is cancelled, not left waiting."""
    work = Stuck()
    future = submit(work())
    assert work.begun.wait(PATIENCE_S)
    assert future.cancel()
    assert work.cancelled.wait(PATIENCE_S)


def test_future_is_cancelled_with_its_work() -> None:
    """S-SET-27: work that cancels itself leaves nobody waiting."""

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)

    with pytest.raises(concurrent.futures.CancelledError):
        submit(work()).result(PATIENCE_S)


def test_interrupt_of_the_caller_cancels_the_work() -> None:
    """S-SET-27: Ctrl-C gets through a blocking call."""
    work = Stuck()
    caller = threading.get_ident()

    def interrupt() -> None:
        while not waits_for_result(caller):
            work.begun.wait(0.01)
        signal.pthread_kill(caller, signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_blocking(work())
    assert work.cancelled.wait(PATIENCE_S)


def test_blocking_call_on_the_loop_itself_is_refused() -> None:
    """S-CONV-15: it would wait for itself for ever."""

    async def work() -> None:
        run_blocking(where())

    with pytest.raises(RuntimeError, match="a blocking call of ensemble_ray was made on its own loop"):
        run_blocking(work())
