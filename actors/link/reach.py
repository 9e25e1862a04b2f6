"""`reach`: one call to an actor that may just be started again, tried until it arrives.

In: a call, and the pauses between tries. Out: its reply. Only calls that may arrive twice are made so: whether a call
whose process died was carried out is not known.
"""

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


def ours(error: BaseException, run_id: str, origin: str) -> BaseException:
    """Return the error that a caller of `run()` should see for an error of a call to an actor; `origin`: of `resume_advice`."""
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
    """Return what Ray says in the end; what stands before it is its own stack."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def _first_line(error: BaseException) -> str:
    return next(iter(message_of(error).strip().splitlines()), type(error).__name__)


def refuse(awaited: asyncio.Future[Any], error: BaseException) -> None:
    """Raise that error for everybody who waits for it, now and later; that nobody does is no defect."""
    if not awaited.done():  # else nobody waits for it any more
        awaited.set_exception(error)
        awaited.exception()


Result = TypeVar("Result")


class BackgroundTasks:
    """The background tasks of one object."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        """Those that are not done."""
        return iter(tuple(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Run it in the background."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


#: Allocations before the youngest generation is looked at; Python's own default is 700.
_YOUNGEST = 20_000


def freeze_modules() -> None:
    """Leave everything that exists now out of collections; call it once, when the process has its modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNGEST, 20, 20)
