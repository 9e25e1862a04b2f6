"""Calls to actors that may be restarting, batches of messages to them, and the cluster's living nodes."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

import ray
import ray.exceptions

from ensemble_ray.errors import EnsembleError, IllegalStateError, message_of
from ensemble_ray.record.stores import resume_advice

#: Pauses before each try to reach a restarting actor, s.
RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 4.0, 8.0)
_PATIENT_PAUSES_S = (0.1, 0.5, 1.0)
Reply = TypeVar("Reply")
Result = TypeVar("Result")
Entry = TypeVar("Entry")


async def reach(
    call: Callable[[], Awaitable[Reply]],
    pauses: Iterable[float],
    *,
    retry_on: type[ray.exceptions.RayError] = ray.exceptions.ActorUnavailableError,
    before_retry: Callable[[], Awaitable[None]] | None = None,
) -> Reply:
    """Call an actor until it answers. The actor may receive the call twice.

    Args:
        pauses: Pauses before further tries, s. After the last one, the call's error is raised.
        before_retry: Awaited after each pause; an error that it raises ends the tries.
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
    return itertools.chain(_PATIENT_PAUSES_S, itertools.repeat(_PATIENT_PAUSES_S[-1]))


def ours(error: BaseException, run_id: str, origin: str) -> BaseException:
    """Return the error that `run()` raises for a failed call to an actor."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, EnsembleError | IllegalStateError):
        return cause
    if not isinstance(error, ray.exceptions.RayError):
        return error
    first_line = next(iter(message_of(error).strip().splitlines()), type(error).__name__)
    advice = resume_advice(run_id, origin)
    if isinstance(error, ray.exceptions.RayActorError):
        text = f"the scheduler's process died ({first_line}). What was recorded is kept; continue the run: {advice}"
    else:
        reason = message_of(cause) if isinstance(cause, BaseException) else first_line
        text = f"the cluster failed: {reason}. What was recorded is kept: {advice}"
    return run_error(run_id, text)


def run_error(run_id: str, text: str) -> EnsembleError:
    error = EnsembleError(f"Run {run_id}: {text}")
    error.run_id = run_id
    return error


def last_line(error: BaseException) -> str:
    """Return Ray's last line about an error; its own stack comes before that."""
    lines = [line.strip() for line in message_of(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def refuse(awaited: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a future. No error is logged if it is never awaited."""
    if not awaited.done():
        awaited.set_exception(error)
        awaited.exception()


class BackgroundTasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __iter__(self) -> Iterator[asyncio.Task[Any]]:
        return iter(tuple(self._tasks))

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class BatchSender(Generic[Entry]):
    """Sends entries in order and in batches. Only one batch is in flight; later entries go with the next.

    Ray starts calls of an asynchronous actor out of order if one of them is large (400 kB beside 10 bytes: 52 of 60 rounds).
    """

    def __init__(self, send: Callable[[list[Entry]], Awaitable[object]]) -> None:
        self._send = send
        self.waiting: list[Entry] = []
        self._sending: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return self._sending is None and not self.waiting

    def add(self, *entries: Entry, within_s: float = 0.0) -> None:
        """Send entries with the next batch. They may wait this long for others."""
        has_due = self._timer is None and bool(self.waiting)
        self.waiting.extend(entries)
        if within_s == 0.0 or has_due:
            self._start()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(within_s, self._start)

    async def flush(self) -> None:
        self._start()
        if self._sending is not None:
            await asyncio.wait([self._sending])

    def _start(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._sending is None and self.waiting:
            self._sending = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        try:
            while self.waiting and self._timer is None:
                batch, self.waiting = self.waiting, []
                await self._send(batch)
        finally:
            self._sending = None


def living_nodes() -> list[dict[str, Any]]:
    """Return the living nodes as Ray describes them. It blocks."""
    return [node for node in cast("list[dict[str, Any]]", cast("Any", ray.nodes)()) if node["Alive"]]
