"""Waiting for what the code of tools and handlers returns: awaitables, and generators item by item. Package: tools."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from itertools import takewhile
from typing import Any, TypeVar, cast

from ensemble_ray.process.threads import call_user, threads
from ensemble_ray.tools.rendering import MOST_ITEMS, items_of, too_many_items

__all__ = ["call_to_end", "collect", "collect_here", "run_to_end"]

T = TypeVar("T")


async def call_to_end(function: Callable[..., object], /, *args: object, **kwargs: object) -> object:
    """Call a tool's or a handler's code as `call_user` does; what it yields is a list (S-LLM-45, S-LLM-46)."""
    return await collect(await call_user(function, *args, **kwargs))


async def collect(returned: object) -> object:
    """Return what user code returned: an awaitable's result, and the items of a generator as a list.

    Raises:
        ResultError: it yields items without an end.
    """
    while inspect.isawaitable(returned):
        returned = cast("object", await returned)
    if isinstance(returned, AsyncIterator):
        items: list[object] = []
        async for item in cast("AsyncIterator[object]", returned):
            items.append(item)
            if len(items) > MOST_ITEMS:
                raise too_many_items("A generator")
        return items
    if isinstance(returned, Iterator):
        is_over = threading.Event()  # a thread cannot be stopped; it ends with the item at which nobody waits any more
        wanted = takewhile(lambda _: not is_over.is_set(), cast("Iterator[object]", returned))
        try:
            return await threads.run(items_of, wanted, "A generator")
        finally:
            is_over.set()
    return returned


def collect_here(returned: object) -> object:
    """Do what `collect` does, from synchronous code."""
    if inspect.isawaitable(returned) or isinstance(returned, AsyncIterator):
        returned = run_to_end(collect(cast("object", returned)))
    return items_of(cast("Iterator[object]", returned), "A generator") if isinstance(returned, Iterator) else returned


def run_to_end(awaitable: Awaitable[T]) -> T:
    """Wait for an awaitable from synchronous code, also where this thread's event loop is busy with the caller."""

    async def awaited() -> T:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(awaited())
    return _in_a_loop_of_its_own(awaited())


def _in_a_loop_of_its_own(coroutine: Coroutine[object, object, T]) -> T:
    outcome: list[T] = []
    errors: list[BaseException] = []
    context = contextvars.copy_context()

    def work() -> None:
        try:
            outcome.append(context.run(asyncio.run, cast("Coroutine[Any, Any, T]", coroutine)))
        except BaseException as error:  # noqa: BLE001  it belongs to the waiting caller
            errors.append(error)

    thread = threading.Thread(target=work, name="ensemble-ray-tool", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return outcome[0]
