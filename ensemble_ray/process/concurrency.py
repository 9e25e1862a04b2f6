"""Threads, the library's event loop, calls of user code, and clocks, all of which survive a fork."""

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

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
_Function = TypeVar("_Function", bound=Callable[[], None])
_Tracked = TypeVar("_Tracked", bound="ForkAware")
_Job = Callable[[], Callable[[], None]]  # runs a call and returns a function that reports its end

_PATIENCE_S = 5.0  # of a fork, for threads inside `no_fork`
_PAUSE_S = 0.0005
#: `sys.exit` in user code ends its task, not the library's loop. Ctrl-C reaches the main thread, which runs no user
#: code.
USER_ERRORS = (Exception, SystemExit, KeyboardInterrupt)


class ForkAware(Protocol):
    """Has threads, handles or waiting callers of its process."""

    def after_fork(self) -> None: ...


_functions: list[Callable[[], None]] = []
_tracked: WeakSet[ForkAware] = WeakSet()
_locks: WeakSet[Any] = WeakSet()

_inside: dict[int, int] = {}  # thread -> depth of its `no_fork` blocks
_forking = threading.Lock()  # held during a fork
_forker = 0
_was_quiet = True
_is_ray_inherited = False


def after_fork(function: _Function) -> _Function:
    """Call the function in each forked child."""
    _functions.append(function)
    return function


def track(holder: _Tracked) -> _Tracked:
    """Call `after_fork` of an object, by a weak reference, in each forked child."""
    _tracked.add(holder)
    return holder


def new_lock() -> threading.Lock:
    """The lock is free in a forked child, even if another thread of the parent held it."""
    lock = threading.Lock()
    _locks.add(lock)
    return lock


def new_rlock() -> threading.RLock:
    lock = threading.RLock()
    _locks.add(lock)
    return lock


def abandon(*objects: object) -> None:
    """Keep objects of the parent alive in the child, so that no finalizer closes handles that the parent uses.

    For example, a socket of an event loop that is closed here leaves the poller of the parent.
    """
    for each in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))


@contextlib.contextmanager
def no_fork() -> Generator[None]:
    """Prevent forks by other threads: locks inside SQLite would stay locked in the child."""
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
    """Whether no other thread was inside `no_fork` at the fork of this process."""
    return _was_quiet


def is_ray_inherited() -> bool:
    """Whether the parent was connected to a Ray cluster at the fork."""
    return _is_ray_inherited


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
        lock._at_fork_reinit()  # noqa: SLF001  like the standard library
    ray = sys.modules.get("ray")
    is_connected = cast("Callable[[], bool] | None", getattr(ray, "is_initialized", None))
    _is_ray_inherited = _is_ray_inherited or (is_connected is not None and is_connected())
    for function in _functions:
        function()
    for holder in list(_tracked):
        holder.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)


# The library's event loop, in a daemon thread: all inline work, all clients and all waiting for Ray (S-CONV-15).

_lock = new_lock()
_loop: list[tuple[asyncio.AbstractEventLoop, threading.Thread]] = []  # after the first use


def library_loop() -> asyncio.AbstractEventLoop:
    with _lock:
        if not _loop:
            loop = asyncio.new_event_loop()

            def run() -> None:
                while True:  # asyncio leaves the loop when a task raises one of these errors
                    with contextlib.suppress(SystemExit, KeyboardInterrupt):
                        loop.run_forever()

            thread = threading.Thread(target=run, name="ensemble-ray-loop", daemon=True)
            thread.start()
            _loop.append((loop, thread))
        return _loop[0][0]


@after_fork
def _begin_without_loop() -> None:
    abandon(*_loop)
    _loop.clear()


def submit(work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
    context = contextvars.copy_context()
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    loop = library_loop()

    async def guarded() -> T:
        try:
            return await work
        except (SystemExit, KeyboardInterrupt) as stop:
            # asyncio would end the loop, and with it the work of other callers.
            outcome.set_exception(stop)
            raise asyncio.CancelledError from stop

    def begin() -> None:
        task = loop.create_task(guarded(), context=context)

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
    """Whether waiting for the loop is a deadlock here."""
    return any(thread is threading.current_thread() for _, thread in _loop)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
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
    if asyncio.get_running_loop() is library_loop():
        return await work
    return await asyncio.wrap_future(submit(work))


class DaemonThreads:
    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[queue.SimpleQueue[_Job]] = []
        self._lock = new_lock()
        self._abandoned = 0
        track(self)

    def after_fork(self) -> None:
        self._idle, self._abandoned = [], 0

    @property
    def abandoned(self) -> int:
        return self._abandoned

    async def run(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Keep the caller's context variables. A cancelled caller leaves the thread running."""
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
            except BaseException as caught:  # noqa: BLE001  it is for the caller
                error = caught
                if isinstance(caught, StopIteration):  # futures refuse it
                    error = RuntimeError(f"StopIteration: {caught}").with_traceback(caught.__traceback__)

            def notify() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
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
            # Idle before the caller resumes, so that its next call finds this thread.
            with self._lock:
                self._idle.append(inbox)
            notify()
            del notify  # it refers to the call


threads = DaemonThreads("ensemble-ray-user")


def is_async_callable(function: object) -> bool:
    """As far as this is known without the call."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def call_user(function: Callable[P, R | Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
    """Call async functions on this loop, others in a daemon thread; await an awaitable result (S-CONV-16)."""
    if inspect.iscoroutinefunction(function):
        return function(*args, **kwargs)  # itself, without a frame around it: each model call goes through here
    return _call_any(function, *args, **kwargs)


async def _call_any(function: Callable[P, R | Awaitable[R]], /, *args: P.args, **kwargs: P.kwargs) -> R:
    if is_async_callable(function):
        outcome = function(*args, **kwargs)
    else:
        outcome = await threads.run(function, *args, **kwargs)
    if inspect.isawaitable(outcome):
        return await outcome
    return outcome


class _SteadyClock:
    """Continues from the latest time of the computer's clock."""

    def __init__(self) -> None:
        self._lock = new_lock()
        self._offset_s = float("-inf")

    def now(self) -> float:
        # A pause between the readings makes the offset too small, and a later reading corrects it. The other order
        # could leave this process ahead of others.
        wall_s = time.time()
        elapsed_s = time.monotonic()
        offset_s = wall_s - elapsed_s
        if offset_s > self._offset_s:  # rare, because the offset only grows
            with self._lock:
                self._offset_s = max(self._offset_s, offset_s)
        return self._offset_s + elapsed_s


_steady = _SteadyClock()  # one part of the process ends what another part began


class SystemClock:
    """The computer's clock, s since the Unix epoch; it never goes back within a process."""

    now = staticmethod(_steady.now)  # each task calls it eight times

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


terminal_lock = new_lock()  # held during a question, so that questions of several tasks do not mix


def is_terminal(stream: object) -> bool:
    """A process may have no stream, or a closed one."""
    try:
        return bool(cast("Any", stream).isatty())
    except (AttributeError, ValueError):
        return False
