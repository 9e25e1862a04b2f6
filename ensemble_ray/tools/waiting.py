"""Waiting for awaitables from synchronous code of tools. Package: tools."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar, cast

__all__ = ["run_to_end"]

T = TypeVar("T")


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
