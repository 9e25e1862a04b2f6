"""Stands for the model of an agent that names none: that of its ensemble. Package: definition.

It is a default, so that `ensemble.replace(llm=...)` still decides; `team_model` puts a model in its place at the start of
a run or a plan. It is never asked.
"""

from __future__ import annotations

from collections.abc import Sequence

from ensemble_ray.errors import IllegalStateError
from ensemble_ray.values.messages import ChatMessage, ChatResponse, ToolSpec

__all__ = ["TEAM_MODEL", "TeamModel"]


class TeamModel:
    """Stands for the model of the ensemble that an agent runs in (S-DOM-72)."""

    async def chat(self, messages: Sequence[ChatMessage], tools: Sequence[ToolSpec] = ()) -> ChatResponse:
        """Refuse to answer.

        Raises:
            IllegalStateError: always.
        """
        del messages, tools
        raise IllegalStateError("This agent uses its team's llm, which it has only in a run")

    def __repr__(self) -> str:
        return "team's llm"

    def __reduce__(self) -> str:
        return "TEAM_MODEL"  # there is one in each process


#: The only one.
TEAM_MODEL = TeamModel()
