"""What a forked child does before anything else: it leaves its parent's threads, connections and locks alone. Package: process.

A fork copies the memory and the descriptors of a process, and the thread that forks alone. So a module with state of the process
registers a function that begins anew in the child. Must never happen: a child that closes, unlocks or ends what is its parent's.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar, cast
from weakref import WeakSet

__all__ = [
    "ForkAware",
    "abandon",
    "after_fork",
    "is_ray_inherited",
    "new_lock",
    "new_rlock",
    "no_fork",
    "track",
    "was_quiet",
]

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
