"""The port through which a tool's server asks the model of the agent that calls it. Package: tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ensemble_ray.values.messages import ChatMessage, ChatResponse

__all__ = ["AsksModel"]


class AsksModel(Protocol):
    """Answers for one call of a tool; the task's budget and the model's rate limit hold."""

    async def sample(self, messages: Sequence[ChatMessage]) -> ChatResponse:
        """Ask the model, on the loop of the call.

        Raises:
            BudgetExhaustedError: the run may spend no more.
        """
        ...
