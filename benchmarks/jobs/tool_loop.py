"""One conversation with many tool calls, one per turn; the server asks for them."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from benchmarks.setting import MODEL, Ask, Round, Setting, bare_rounds, messages_of, team_rounds

if TYPE_CHECKING:
    from ensemble_ray import Ensemble

__all__ = ["converse", "floor", "look_up", "team", "team_once"]

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a number.",
        "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
    },
}


def look_up(number: int) -> str:
    """Look up a number."""
    return f"{number} is a number"


def floor(setting: Setting) -> AbstractContextManager[Round]:
    """Run the loop of the protocol's documentation: what the model said goes back into the conversation as it came."""

    return bare_rounds(setting, converse)


async def converse(ask: Ask) -> str:
    """Send the model's messages back as they came, with the results of its calls, until it calls no tool."""
    messages = messages_of("Look up numbers.")
    while calls := (said := await ask(messages, [TOOL])).get("tool_calls"):
        messages.append(said)
        for call in calls:
            result = look_up(**json.loads(call["function"]["arguments"]))
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    return str(said["content"])


def team(setting: Setting) -> AbstractContextManager[Round]:
    """One agent with one tool, which says that it only reads."""
    return _team(setting, "look_up")


def team_once(setting: Setting) -> AbstractContextManager[Round]:
    """Run the same; each call is recorded on the disk before it is made."""
    return _team(setting, "look_up_once")


def _team(setting: Setting, tool: str) -> AbstractContextManager[Round]:
    def make() -> Ensemble:
        from benchmarks.jobs import marked_tools
        from ensemble_ray import Agent, Ensemble, OpenAIChatModel, Task

        seeker = Agent(
            role="Seeker",
            goal="Look up",
            tools=[getattr(marked_tools, tool)],
            llm=OpenAIChatModel(MODEL, base_url=setting.url, api_key="benchmark"),
        )
        return Ensemble(tasks=[Task(name="seek", description="Look up numbers", expected_output="Text", agent=seeker)])

    return team_rounds(setting, make)
