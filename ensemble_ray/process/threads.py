"""User code beside the event loop. Package: process.

Synchronous user code runs in daemon threads of our own: a thread-pool executor would hold the process's exit for a
tool that never returns (S-SET-48), and asyncio's default pool is too small for a fan-out of blocking tools.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar, cast

from ensemble_ray.process.forks import new_lock, track

__all__ = ["USER_ERRORS", "DaemonThreads", "call_user", "is_async_callable", "threads"]

P = ParamSpec("P")
R = TypeVar("R")

#: Does the work, and gives what tells its caller.
_Job = Callable[[], Callable[[], None]]
#: What user code may raise that is its own failure. `sys.exit` in a model or a handler ends its task, never our loop;
#: a real Ctrl-C comes to the main thread, where no user code of ours runs.
USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)


class DaemonThreads:
    """Runs functions in daemon threads; an idle thread is used again, a new one is made when none is idle."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self._lock = new_lock()
        self._abandoned = 0
        track(self)

    def after_fork(self) -> None:
        """Begin without threads."""
        self._idle, self._abandoned = [], 0

    @property
    def abandoned(self) -> int:
        """Threads still busy with a call that nobody waits for any more."""
        return self._abandoned

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it in a daemon thread, with the caller's context variables, and give its result.

        A cancelled caller leaves the thread to itself: Python cannot stop it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        context = contextvars.copy_context()

        def resolve(result: R | None, error: BaseException | None) -> None:
            if future.done():
                self._abandoned -= 1
            elif error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast("R", result))

        def job() -> Callable[[], None]:
            result: R | None = None
            error: BaseException | None = None
            try:
                result = context.run(function, *args, **kwargs)
            except BaseException as caught:  # noqa: BLE001  whatever user code raises belongs to the waiting caller
                error = _storable(caught)

            def notify() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(resolve, result, error)

            return notify

        self._submit(job)
        try:
            return await future
        except asyncio.CancelledError:
            if not future.done() or future.cancelled():
                self._abandoned += 1
            raise

    def _submit(self, job: _Job) -> None:
        with self._lock:
            inbox = self._idle.pop() if self._idle else None
        if inbox is None:
            inbox = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(inbox,), name=self._name, daemon=True).start()
        inbox.put(job)

    def _work(self, inbox: queue.SimpleQueue[_Job]) -> None:
        while True:
            notify = inbox.get()()
            # Idle before its caller hears of the end: whoever calls next finds this thread, and makes no new one.
            with self._lock:
                self._idle.append(inbox)
            notify()
            del notify  # nothing of a call is kept until the next one


def _storable(error: BaseException) -> BaseException:
    """Futures refuse StopIteration; user code may raise it all the same."""
    if not isinstance(error, StopIteration):
        return error
    return RuntimeError(f"StopIteration: {error}").with_traceback(error.__traceback__)


#: The process's threads for user code.
threads = DaemonThreads("ensemble-ray-user")


def is_async_callable(function: object) -> bool:
    """Whether calling it gives an awaitable, as far as that can be told without calling it."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def call_user(function: Callable[P, R | Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call user code: async on this loop, sync in a daemon thread; an awaitable result is awaited (S-CONV-16)."""
    if is_async_callable(function):
        outcome = function(*args, **kwargs)
    else:
        outcome = await threads.run(function, *args, **kwargs)
    if inspect.isawaitable(outcome):
        return await outcome
    return outcome
