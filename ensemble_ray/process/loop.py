"""The process's event loop for everything of ours. Package: process.

One daemon thread runs one loop: all inline work, all clients, all waiting for Ray. Callers bridge to it, from a
script, from async code, or from inside a notebook's running loop (S-CONV-15).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from ensemble_ray.process.forks import abandon, after_fork, new_lock

__all__ = ["bridge", "library_loop", "on_library_loop", "run_blocking", "submit"]

T = TypeVar("T")

_lock = new_lock()
#: The loop and its thread, once they are needed.
_loop: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []


def library_loop() -> asyncio.AbstractEventLoop:
    """Return the loop; its thread is started on first use."""
    with _lock:
        if not _loop:
            loop = asyncio.new_event_loop()
            thread = threading.Thread(target=_run, args=(loop,), name="ensemble-ray-loop", daemon=True)
            thread.start()
            _loop.append((loop, thread))
        return _loop[0][0]


@after_fork
def _begin_without_loop() -> None:
    abandon(*_loop)
    _loop.clear()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """Run it as long as the process lives; asyncio leaves it when any task raises what is meant to end the process."""
    while True:
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # kept in its task, for whoever waits for that
            loop.run_forever()


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    """Run a coroutine on the loop, with the caller's context variables."""
    context = contextvars.copy_context()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    loop = library_loop()

    async def kept() -> T:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as stop:
            # asyncio would end the loop's thread with it, and everybody else's work; it belongs to the caller alone.
            outcome.set_exception(stop)
            raise asyncio.CancelledError from stop

    def begin() -> None:
        task = loop.create_task(kept(), context=context)

        def resolve(done: asyncio.Task[T]) -> None:
            if outcome.done():
                return
            if done.cancelled():
                outcome.cancel()
                outcome.set_running_or_notify_cancel()
            elif (error := done.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(done.result())

        task.add_done_callback(resolve)
        outcome.add_done_callback(lambda future: loop.call_soon_threadsafe(task.cancel) if future.cancelled() else None)

    loop.call_soon_threadsafe(begin)
    return outcome


def on_library_loop() -> bool:
    """Whether this is the loop's own thread, where waiting for the loop would never end."""
    return any(thread is threading.current_thread() for _, thread in _loop)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run it on the loop and wait; Ctrl-C gets through and cancels it.

    Raises:
        RuntimeError: called on the library's own loop thread.
    """
    if on_library_loop():
        work.close()
        raise RuntimeError("a blocking call of ensemble_ray was made on its own loop, from an async callable")
    future = submit(work)
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise


async def bridge(work: Coroutine[Any, Any, T]) -> T:
    """Run it on the library's loop from any loop; directly when this is that loop."""
    if asyncio.get_running_loop() is library_loop():
        return await work
    return await asyncio.wrap_future(submit(work))
