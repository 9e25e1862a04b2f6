"""The process's event loop for everything of ours.

One daemon thread runs one loop: all inline work, all clients, all waiting for Ray. Callers bridge to it, from a
script, from async code, or from inside a notebook's running loop (S-CONV-15).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import ctypes
import inspect
import os
import queue
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any, ParamSpec, Protocol, TypeVar, cast
from weakref import WeakSet

_Function = TypeVar("_Function", bound=Callable[[], None])
_Tracked = TypeVar("_Tracked", bound="ForkAware")

#: Longest time that a fork waits for other threads to leave what must not be copied half done, s.
_PATIENCE_S = 5.0
_PAUSE_S = 0.0005


class ForkAware(Protocol):
    """An object with threads, handles or waiting callers of its process."""

    def after_fork(self) -> None:
        """Begin anew in a forked child."""
        ...


class _Resettable(Protocol):
    """A lock of the interpreter: `logging` and `threading` renew theirs in the same way."""

    def _at_fork_reinit(self) -> None: ...


_functions: list[Callable[[], None]] = []
_tracked: WeakSet[ForkAware] = WeakSet()
_locks: WeakSet[_Resettable] = WeakSet()


def after_fork(function: _Function) -> _Function:
    """Have a function called in each forked child; a decorator."""
    _functions.append(function)
    return function


def track(holder: _Tracked) -> _Tracked:
    """Have `holder.after_fork()` called in each forked child, as long as the holder lives; return it."""
    _tracked.add(holder)
    return holder


def new_lock() -> threading.Lock:
    """Return a lock that is free in a forked child, also if another thread of the parent held it."""
    lock = threading.Lock()
    _locks.add(cast("_Resettable", lock))
    return lock


def new_rlock() -> threading.RLock:
    """Return a reentrant lock; as `new_lock`."""
    lock = threading.RLock()
    _locks.add(cast("_Resettable", lock))
    return lock


def abandon(*objects: object) -> None:
    """Keep objects of the parent for the life of the child, so that no finaliser closes what the parent still uses.

    A socket that a child closes in an event loop, for one, leaves the poller that it shares with its parent.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


# Threads inside of what must not be copied half done.

#: thread -> how deep
_inside: dict[int, int] = {}
#: held while a thread forks, and which
_forking = threading.Lock()
_forker = 0
_was_quiet = True


@contextlib.contextmanager
def no_fork() -> Generator[None]:
    """Keep other threads from forking inside the block: SQLite's own locks would stay locked in the child."""
    me = threading.get_ident()
    depth = _inside.get(me, 0)
    _inside[me] = depth + 1
    while not depth and _forking.locked() and _forker != me:
        del _inside[me]
        with _forking:
            _inside[me] = 1
    try:
        yield
    finally:
        if depth:
            _inside[me] = depth
        else:
            _inside.pop(me, None)


def was_quiet() -> bool:
    """Return whether no other thread was inside of `no_fork` when this process was forked."""
    return _was_quiet


def is_ray_inherited() -> bool:
    """Return whether this process was forked from one that was connected to a Ray cluster."""
    return _is_ray_inherited


_is_ray_inherited = False


def _before() -> None:
    global _forker, _was_quiet  # noqa: PLW0603  read in the child
    _forking.acquire()
    me, until = threading.get_ident(), time.monotonic() + _PATIENCE_S
    _forker = me
    while not (quiet := not _inside.keys() - {me}) and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    _was_quiet = quiet


def _after_in_parent() -> None:
    global _forker  # noqa: PLW0603
    _forker = 0
    _forking.release()


def _after_in_child() -> None:
    global _is_ray_inherited  # noqa: PLW0603
    _after_in_parent()
    for thread in _inside.keys() - {threading.get_ident()}:
        del _inside[thread]
    for lock in list(_locks):
        lock._at_fork_reinit()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]  as the standard library does
    ray = sys.modules.get("ray")
    is_connected = cast("Callable[[], bool] | None", getattr(ray, "is_initialized", None))
    _is_ray_inherited = _is_ray_inherited or (is_connected is not None and is_connected())
    for function in _functions:
        function()
    for holder in list(_tracked):
        holder.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


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


class _SteadyClock:
    """Counts on from the latest time that the computer's clock has shown."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._offset_s = float("-inf")

    def now(self) -> float:
        """Return the Unix time, s; never an earlier one than before."""
        # In this order, a pause between the two readings makes the offset too small, and a later reading replaces it. In the other
        # order it would be too large for good: this process would be ahead of others by the longest pause.
        wall_s = time.time()
        elapsed_s = time.monotonic()
        offset_s = wall_s - elapsed_s
        if offset_s > self._offset_s:  # seldom: the offset only grows, so that most calls need no lock
            with self._lock:
                self._offset_s = max(self._offset_s, offset_s)
        return self._offset_s + elapsed_s


#: One for the whole process: what one part of it began, another one ends.
_steady = _SteadyClock()


class SystemClock:
    """The computer's clock; within a process it never goes back, so that nothing takes less than no time."""

    #: Returns the Unix time, s; after the computer's clock was set back, it counts on from the time before. Each task asks for it
    #: eight times.
    now = staticmethod(_steady.now)

    async def sleep(self, delay_s: float) -> None:
        """Sleep on the loop."""
        await asyncio.sleep(delay_s)


#: Held while a person is asked at the terminal: questions of several tasks and runs come one after the other.
terminal_lock = new_lock()


def is_terminal(stream: object) -> bool:
    """Return whether a person is at it; a process may have none, or a closed one."""
    try:
        return bool(cast("Any", stream).isatty())
    except (AttributeError, ValueError):
        return False
