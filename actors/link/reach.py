"""`reach`: one call to an actor that may just be started again, tried until it arrives.

In: a call, and the pauses between tries. Out: its reply. Only calls that may arrive twice are made so: whether a call
whose process died was carried out is not known.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

import ray.exceptions

__all__ = ["RESTART_PAUSES_S", "patiently", "reach"]

Reply = TypeVar("Reply")
#: How long an actor that Ray starts again is waited for before each further try, s; then it is given up.
RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
#: The same for an actor that is never given up; the last pause is repeated.
_PATIENT_PAUSES_S = (0.1, 0.5, 1.0)


def patiently() -> Iterator[float]:
    """Return the pauses of a caller who never gives up, s."""
    return itertools.chain(_PATIENT_PAUSES_S, itertools.repeat(_PATIENT_PAUSES_S[-1]))


async def reach(
    call: Callable[[], Awaitable[Reply]],
    pauses: Iterable[float],
    *,
    retry_on: type[ray.exceptions.RayError] = ray.exceptions.ActorUnavailableError,
    before_retry: Callable[[], Awaitable[None]] | None = None,
) -> Reply:
    """Make a call again and again until it is answered, and return the reply.

    Args:
        call: Make the call once.
        pauses: How long to wait before each further try, s; the call's error is raised when there are no more.
        retry_on: Errors after which it is tried again.
        before_retry: Awaited after each pause; what it raises ends the tries.

    Raises:
        RayError: the call failed in another way, or once more after the last pause.
    """
    waiting = iter(pauses)
    while True:
        try:
            return await call()
        except retry_on:
            pause_s = next(waiting, None)
            if pause_s is None:
                raise
        await asyncio.sleep(pause_s)
        if before_retry is not None:
            await before_retry()
