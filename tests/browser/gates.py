"""Models that answer when the test lets them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

from ensemble_ray import ChatMessage, ChatResponse, Reasoning, ToolSpec
from ensemble_ray.testing import ScriptedCall
from tests.builders import answer, call

__all__ = ["Gate", "Thinker"]


class Gate:
    """Holds an answer back until the test opens it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.is_reached = threading.Event()

    async def passed(self) -> None:
        """Wait until it is open."""
        self.is_reached.set()
        await asyncio.to_thread(self.open.wait, 180)

    async def __call__(self, _: ScriptedCall) -> object:
        """Return the answer, late."""
        await self.passed()
        return answer("It may go on.", 30, 7)


class Thinker:
    """A model that streams its reasoning, then its answer, and asks for a tool in the first of two turns.

    After each of the four pieces it waits until the test opens that piece's gate.
    """

    def __init__(self, *turns: tuple[str, str]) -> None:
        self._turns = iter(enumerate(turns))
        self.gates = [Gate() for _ in range(2 * len(turns))]

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Answer."""
        raise NotImplementedError

    async def stream(
        self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()
    ) -> AsyncIterator[str | ChatResponse]:
        """Think, then answer."""
        number, (thoughts, text) = next(self._turns)
        for gate, said in zip(self.gates[2 * number :], (Reasoning(thoughts), text), strict=False):
            if said is text or thoughts:
                yield said
            await gate.passed()
        asks = number + 1 < len(self.gates) / 2
        yield ChatResponse(text=text, reasoning=thoughts, tool_calls=[call("look")] if asks else ())
