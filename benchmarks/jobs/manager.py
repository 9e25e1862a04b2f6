"""A manager that hands ten tasks to a worker, one per turn; the server asks for them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from benchmarks.setting import MODEL, Ask, Round, Setting, bare_rounds, messages_of, team_rounds

if TYPE_CHECKING:
    from ensemble_ray import Ensemble

__all__ = ["floor", "manage", "team"]

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "delegate_task",
        "description": "Give a task to a worker.",
        "parameters": {
            "type": "object",
            "properties": {"agent_role": {"type": "string"}, "task_description": {"type": "string"}},
            "required": ["agent_role", "task_description"],
        },
    },
}


def floor(setting: Setting) -> AbstractContextManager[Round]:
    """Run the loop of the protocol's documentation, with a call of the same model as its tool."""

    return bare_rounds(setting, lambda ask: manage(ask, lambda text: ask(messages_of(text))))


async def manage(ask: Ask, delegate: Callable[[str], Awaitable[dict[str, Any]]]) -> str:
    """Delegate what the model asks for, until it calls no tool."""
    messages = messages_of("Have it done.")
    while calls := (said := await ask(messages, [TOOL])).get("tool_calls"):
        messages.append(said)
        for call in calls:
            done = await delegate(json.loads(call["function"]["arguments"])["task_description"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": done["content"]})
    return str(said["content"])


def team(setting: Setting) -> AbstractContextManager[Round]:
    """Run a manager and one worker."""

    def make() -> Ensemble:
        from ensemble_ray import Agent, Ensemble, OpenAIChatModel, Task

        worker = Agent(
            role="Worker", goal="Work", llm=OpenAIChatModel(MODEL, base_url=setting.url, api_key="benchmark")
        )
        return Ensemble(
            tasks=[Task(description="Have it done", expected_output="Text", agent=worker)],
            workflow="hierarchical",
            manager_stall_turns=0,  # the server always asks for the same
        )

    return team_rounds(setting, make)
