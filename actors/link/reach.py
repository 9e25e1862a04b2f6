"""Calls to actors that may be restarting, and small helpers for asyncio and errors in actors."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

import ray
import ray.exceptions

from ensemble_ray.errors import EnsembleError, IllegalStateError, message_of
from ensemble_ray.record.stores import resume_advice

#: Pauses before each try to reach a restarting actor, s. After the last try, the call fails.
RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
#: The same without an end; the last pause is repeated.
_PATIENT_PAUSES_S = (0.1, 0.5, 1.0)
#: Allocations before a collection of the youngest generation; Python's default is 700.
_YOUNGEST = 20_000
Reply = TypeVar("Reply")


async def reach(
    call: Callable[[], Awaitable[Reply]],
    pauses: Iterable[float],
    *,
    retry_on: type[ray.exceptions.RayError] = ray.exceptions.ActorUnavailableError,
    before_retry: Callable[[], Awaitable[None]] | None = None,
) -> Reply:
    """Make a call until it is answered, and return the reply.

    Only for calls that may arrive twice: if the actor's process dies, it may have handled the call.

    Args:
        pauses: Pauses before further tries, s. After the last one, the call's error is raised.
        before_retry: Awaited after each pause; an error that it raises ends the tries.

    Raises:
        RayError: the call failed with another error, or after the last pause.
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


def patiently() -> Iterator[float]:
    """Return the pauses of a caller that never gives up, s."""
    return itertools.chain(_PATIENT_PAUSES_S, itertools.repeat(_PATIENT_PAUSES_S[-1]))


def ours(error: BaseException, run_id: str, origin: str) -> BaseException:
    """Return the error that `run()` raises for a failed call to an actor; `origin` is the one of `resume_advice`."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EnsembleError | IllegalStateError):
        return cause
    if isinstance(error, ray.exceptions.RayActorError):
        lost = EnsembleError(
            f"Run {run_id}: the scheduler's process died ({_first_line(error)}). "
            f"What was recorded is kept; continue the run: {resume_advice(run_id, origin)}"
        )
        lost.run_id = run_id
        return lost
    if isinstance(error, ray.exceptions.RayError):
        text = message_of(cause) if isinstance(cause, BaseException) else _first_line(error)
        broken = EnsembleError(
            f"Run {run_id}: the cluster failed: {text}. What was recorded is kept: {resume_advice(run_id, origin)}"
        )
        broken.run_id = run_id
        return broken
    return error


def last_line(error: BaseException) -> str:
    """Return Ray's last line about an error; its own stack comes before that."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _first_line(error: BaseException) -> str:
    return next(iter(message_of(error).strip().splitlines()), type(error).__name__)


def refuse(awaited: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future. No error is logged if it is never awaited."""
    if not awaited.done():
        awaited.set_exception(error)
        awaited.exception()


Result = TypeVar("Result")


class BackgroundTasks:
    """The background tasks of one object."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """Iterate over the tasks that are not done."""
        return iter(tuple(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def freeze_modules() -> None:
    """Exclude all existing objects from garbage collection. Call it once, when the process has its modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, 20, 20)
