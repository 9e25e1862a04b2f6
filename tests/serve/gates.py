"""Answers of models that tests hold back."""

from __future__ import annotations

import asyncio

from ensemble_ray.testing import ScriptedCall


class Gate:
    """Holds a model's answer until it is let go; says when the model was asked."""

    def __init__(self, answer: object) -> None:
        self.is_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_open = asyncio.Event()
        self._answer = answer

    def open(self) -> None:
        self._is_open.set()

    async def __call__(self, _asked: ScriptedCall) -> object:
        # The model is asked on the library's loop, the test waits on its own.
        self._loop.call_soon_threadsafe(self.is_asked.set)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._is_open.wait(), self._loop))
        return self._answer
