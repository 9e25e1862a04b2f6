"""A manager that hands ten tasks to a worker, one per turn; the server asks for them."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from benchmarks.setting import MODEL, SYSTEM, Round, Setting, bare_rounds, team_rounds

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from ensemble_ray import Ensemble

__all__ = ["floor", "team"]

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

    async def job(client: AsyncOpenAI) -> str:
        messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Have it done."}]
        while True:
            answer = await client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL])
            said = answer.choices[0].message
            if not said.tool_calls:
                return said.content or ""
            messages.append(said)
            for call in said.tool_calls:
                assert call.type == "function"
                asked = json.loads(call.function.arguments)["task_description"]
                done = await client.chat.completions.create(
                    model=MODEL, messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
                )
                result = done.choices[0].message.content or ""
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return bare_rounds(setting, job)


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
