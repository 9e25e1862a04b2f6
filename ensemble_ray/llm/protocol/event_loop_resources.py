"""Things that belong to an event loop and end with it: HTTP sessions, clients. Package: llm.

A library that is called in a loop it does not own never hears of the loop's end. One thing does: when a loop is shut
down (`asyncio.run` does it, and every runner), it closes the asynchronous generators that run in it. So one generator
per loop holds the closers. Nothing here may keep a closed loop's resources for long, or make a sound at exit.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Generic, TypeVar

from ensemble_ray.process.forks import abandon, after_fork, track

__all__ = ["PerLoop"]

T = TypeVar("T")

_Closer = Callable[[], Awaitable[object]]
_closers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[list[_Closer], AsyncGenerator[None]]] = (
    weakref.WeakKeyDictionary()
)


class PerLoop(Generic[T]):
    """One resource per running event loop.

    Args:
        close: Ends a resource, in the loop it was made in.
        forget: Lets go of a resource whose loop was closed without being shut down; its sockets died with it.
    """

    def __init__(self, close: Callable[[T], Awaitable[object]], forget: Callable[[T], object] | None = None) -> None:
        self._close = close
        self._forget = forget
        self._held: dict[asyncio.AbstractEventLoop, T] = {}
        track(self)

    def after_fork(self) -> None:
        """Begin without resources."""
        abandon(self._held)
        self._held = {}

    def get(self) -> T | None:
        """Return the running loop's resource; None while there is none."""
        return self._held.get(asyncio.get_running_loop())

    def put(self, resource: T) -> T:
        """Make it the running loop's resource, closed when the loop ends; one held before is closed then too."""
        loop = asyncio.get_running_loop()
        for other in [other for other in self._held if other.is_closed()]:
            forgotten = self._held.pop(other)
            if self._forget is not None:
                self._forget(forgotten)
        self._held[loop] = resource

        async def close() -> None:
            if self._held.get(loop) is resource:
                del self._held[loop]
            await self._close(resource)

        _closers_of(loop).append(close)
        return resource


def _closers_of(loop: asyncio.AbstractEventLoop) -> list[_Closer]:
    entry = _closers.get(loop)
    if entry is None:
        closers: list[_Closer] = []
        generator = _run_at_end(closers)
        # One step makes the generator known to the loop; it suspends at its first yield without waiting.
        with contextlib.suppress(StopIteration):
            generator.asend(None).send(None)
        entry = _closers[loop] = (closers, generator)
    return entry[0]


async def _run_at_end(closers: list[_Closer]) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await _close_all(closers)


async def _close_all(closers: list[_Closer]) -> None:
    while closers:
        with contextlib.suppress(Exception):
            await closers.pop()()


@after_fork
def _begin_without_loops() -> None:
    for loop, (closers, generator) in list(_closers.items()):
        abandon(loop, generator, *closers)
        closers.clear()  # the child may end the loop that its parent forked in
    _closers.clear()


@atexit.register
def _close_at_exit() -> None:
    """Close what a loop in another thread still holds, so that nothing is said about it while the process ends."""
    for loop, (closers, _) in list(_closers.items()):
        if loop.is_running() and closers:
            with contextlib.suppress(Exception):
                asyncio.run_coroutine_threadsafe(_close_all(closers), loop).result(timeout=1)
