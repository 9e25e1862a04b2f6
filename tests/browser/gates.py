"""A model that answers when the test lets it."""

from __future__ import annotations

import asyncio
import threading

from ensemble_ray.testing import ScriptedCall
from tests.builders import answer

__all__ = ["Gate"]


class Gate:
    """Holds an answer back until the test opens it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.is_reached = threading.Event()

    async def __call__(self, _: ScriptedCall) -> object:
        """Return the answer, late."""
        self.is_reached.set()
        await asyncio.to_thread(self.open.wait, 180)
        return answer("It may go on.", 30, 7)
