"""Background tasks: what a run does beside its source, such as pulls and calls of factories.

In: coroutines. Out: their errors, to the run. Rule: whatever they raise ends the run, also what is meant to end a task or
a generator; it never ends a task of ours, and nobody waits for what will not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ensemble_ray.process.forks import USER_ERRORS


class RunBackgroundTasks:
    """The background tasks of one run."""

    def __init__(self, break_off: Callable[[BaseException], None]) -> None:
        """Begin with none; `break_off` is called with what one raises."""
        self._break_off = break_off
        self._tasks: set[asyncio.Task[None]] = set()
        #: the run has ended, and waits for none of them
        self.is_left = False

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin one."""
        task = asyncio.get_running_loop().create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def leave(self) -> None:
        """Stop what can be stopped, since the run has ended."""
        self.is_left = True
        for task in self._tasks:
            task.cancel()

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BaseException as error:  # not ours to raise while the run lasts: nobody cancels a task of it
            if self.is_left:
                raise
            self._break_off(as_error(error))


def as_error(raised: BaseException) -> BaseException:
    """Return what user code raised as something that a caller can be given: a cancellation would cancel the caller."""
    if isinstance(raised, USER_ERRORS):
        return raised
    error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error
