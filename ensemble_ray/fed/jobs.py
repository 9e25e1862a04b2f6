"""Jobs: what a fed run does beside its machine, such as pulls and calls of factories. Room: fed.

In: coroutines. Out: their errors, to whoever minds them. Rule: whatever user code raises ends its run, also what is meant
to end a task or a generator; it never ends a task of ours, and nobody waits for what will not come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from ensemble_ray.errors import RecordError, StaleEpochError
from ensemble_ray.process.threads import USER_ERRORS

__all__ = ["Jobs", "as_error"]


class Jobs:
    """The jobs of one run."""

    def __init__(self, fail: Callable[[BaseException], None], break_off: Callable[[BaseException], None]) -> None:
        """Make none yet.

        Args:
            fail: Told of an error of the user's.
            break_off: Told that the record cannot be written.
        """
        self._fail = fail
        self._break_off = break_off
        self._jobs: set[asyncio.Task[None]] = set()
        #: the run has ended, and waits for none of them
        self.is_left = False

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        """Begin a job."""
        job = asyncio.get_running_loop().create_task(self._done(work))
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)

    def leave(self) -> None:
        """The run has ended: stop what can be stopped."""
        self.is_left = True
        for job in self._jobs:
            job.cancel()

    async def _done(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (RecordError, StaleEpochError) as error:
            self._break_off(error)
        except BaseException as error:  # not ours to raise while the run lasts: nobody cancels a job of it
            if self.is_left:
                raise
            self._fail(as_error(error))


def as_error(raised: BaseException) -> BaseException:
    """What user code raised, as something that a caller can be given: a cancellation would cancel the caller."""
    if isinstance(raised, USER_ERRORS):
        return raised
    error = RuntimeError(f"{type(raised).__name__}: {raised}")
    error.__cause__ = raised
    return error
