"""Tools that are heavy on the processor: many conversations at once, each with one call of 100 ms of pure Python."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from benchmarks.setting import MODEL, Ask, Round, Setting, bare_rounds, messages_of, team_rounds

if TYPE_CHECKING:
    from ensemble_ray import Ensemble

__all__ = ["burn", "loops_of_100_ms", "pool", "team", "threads"]

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "burn",
        "description": "Add up numbers.",
        "parameters": {"type": "object", "properties": {"loops": {"type": "integer"}}, "required": ["loops"]},
    },
}


def burn(loops: int) -> int:
    """Add up numbers."""
    total = 0
    for number in range(loops):
        total = (total + number * number) % 1_000_003
    return total


def loops_of_100_ms() -> int:
    """How many loops take 100 ms of this machine's processor, whatever else runs on it."""
    probe = 200_000
    burn(probe)
    best_s = 1.0
    for _ in range(5):
        began = time.thread_time()
        burn(probe)
        best_s = min(best_s, time.thread_time() - began)
    return int(probe * 0.1 / best_s)


def threads(setting: Setting) -> AbstractContextManager[Round]:
    """As a script does it: tools in threads, which share one interpreter."""
    return bare_rounds(setting, lambda ask: _all(ask, setting.size, lambda loops: asyncio.to_thread(burn, loops)))


@contextmanager
def pool(setting: Setting) -> Generator[Round]:
    """As a careful script does it: tools in a process pool that is warm."""
    with ProcessPoolExecutor() as workers:

        def work(loops: int) -> Awaitable[int]:
            return asyncio.get_running_loop().run_in_executor(workers, burn, loops)

        with bare_rounds(setting, lambda ask: _all(ask, setting.size, work)) as one_round:
            yield one_round


def team(setting: Setting) -> AbstractContextManager[Round]:
    """Tasks of one agent, whose tool says that it is heavy."""

    def make() -> Ensemble:
        from benchmarks.jobs import marked_tools
        from ensemble_ray import Agent, Ensemble, OpenAIChatModel, Task

        worker = Agent(
            role="Worker",
            goal="Work",
            tools=[marked_tools.burn],
            llm=OpenAIChatModel(MODEL, base_url=setting.url, api_key="benchmark"),
        )
        tasks = [
            Task(name=f"sum-{number}", description="Add up numbers", expected_output="A number", agent=worker)
            for number in range(setting.size)
        ]
        return Ensemble(tasks=tasks, workflow="parallel")

    return team_rounds(setting, make)


async def _all(ask: Ask, size: int, work: Callable[[int], Awaitable[int]]) -> list[str]:
    return await asyncio.gather(*(_converse(ask, work) for _ in range(size)))


async def _converse(ask: Ask, work: Callable[[int], Awaitable[int]]) -> str:
    messages = messages_of("Add up numbers.")
    while calls := (said := await ask(messages, [TOOL])).get("tool_calls"):
        messages.append(said)
        for call in calls:
            result = await work(json.loads(call["function"]["arguments"])["loops"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(result)})
    return str(said["content"])
