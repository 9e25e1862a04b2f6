"""The run's callables, asked from the process of a task: they live in one process, which may be replaced."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import ray.exceptions

from ensemble_ray.actors.link.failures import last_line
from ensemble_ray.process.pickling import dumps

__all__ = ["RemoteCallables"]

#: How long a lost host of callables may take to be replaced, s.
_MOVE_S = 30.0
#: A callable whose process died so often while it was asked is not asked again: it may well be what kills them.
_MOST_LOST = 3


class RemoteCallables:
    """Asks the run's callables in the process that hosts them; None: in one that is started when somebody needs it."""

    def __init__(self, host: Any, run_id: str) -> None:
        self._host: Any = host
        self._run_id = run_id
        self._moved = asyncio.Event()

    def move(self, host: Any) -> None:
        """Ask another process from now on; what the lost one was asked is asked again there."""
        self._host = host
        self._moved.set()
        self._moved = asyncio.Event()

    async def evaluate(self, path: str, argument: object) -> object:
        """Call it there; what it raises is raised here."""
        asked = dumps(argument)
        lost = ""
        if self._host is None:
            await self._until_moved(self._moved, "it has not been started")
        for count in range(_MOST_LOST):
            host: Any = self._host
            moved = self._moved
            try:
                return _load_reply(await host.evaluate.remote(self._run_id, path, asked))
            except ray.exceptions.RayError as error:  # S-CONV-32: no class of Ray's, not as a cause either
                lost = last_line(error)
            if count + 1 < _MOST_LOST:
                await self._until_moved(moved, lost)
        raise RuntimeError(f"the process of the run's callables died {_MOST_LOST} times when it was asked: {lost}")

    @staticmethod
    async def _until_moved(moved: asyncio.Event, why: str) -> None:
        try:
            await asyncio.wait_for(moved.wait(), _MOVE_S)
        except TimeoutError:
            raise RuntimeError(f"the process of the run's callables cannot be reached: {why}") from None


def _load_reply(body: bytes) -> object:
    """Return the value that came as bytes, or raise the error: `(value, None)` or `(None, error)`."""
    value, error = pickle.loads(body)  # noqa: S301  bytes of our own cluster
    if error is not None:
        raise error
    return value
