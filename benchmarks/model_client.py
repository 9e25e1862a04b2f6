"""What a model call costs, client against client, on one protocol server: the figures of decision 0002.

Two scenarios at no latency, where everything measured is the client's own work: a fan-out of 1,000 short calls over
200 slots, and a tool loop of 20 calls of tools whose conversation grows turn by turn. All clients run in this one
process, one after the other, and the ratios of one run are the result; absolute times drift with the machine.

    python benchmarks/model_client.py
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import aiohttp
from openai import AsyncOpenAI, DefaultAioHttpClient

from ensemble_ray import ChatMessage, OpenAIChatModel, ToolSpec

CALLS, SLOTS, TURNS = 1000, 200, 20
SYSTEM = "You are a careful writer. " * 20
RESULT = "A fact that a tool found. " * 20
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Looks it up", "parameters": SCHEMA}}]
SPECS = (ToolSpec("look", "Looks it up", SCHEMA),)

#: One call of a fan-out, given its number; one turn of a tool loop, given the conversation, which it extends.
FanOutCall = Callable[[int], Awaitable[object]]
LoopTurn = Callable[[list[Any]], Awaitable[bool]]


@contextlib.contextmanager
def model_server(*arguments: str) -> Generator[str]:
    """Start a protocol server in its own process and yield its base URL."""
    command = [sys.executable, "-m", "ensemble_ray.testing.model_server", "--until-stdin-closes", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  our own module
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()


async def fan_out_s(call: FanOutCall) -> float:
    """Seconds for all calls."""
    slots = asyncio.Semaphore(SLOTS)

    async def one(number: int) -> None:
        async with slots:
            await call(number)

    start = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(CALLS)))
    return time.perf_counter() - start


async def loop_s(turn: LoopTurn, conversation: list[Any]) -> float:
    """Seconds per model call of one tool loop."""
    start = time.perf_counter()
    calls = 1
    while await turn(conversation):
        calls += 1
    return (time.perf_counter() - start) / calls


def data(number: int | str) -> list[Any]:
    """Return a conversation in the form of the protocol."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"item {number}"}]


def extend(conversation: list[Any], calls: list[Any]) -> bool:
    """Add the request and the tools' results; False when the model asked for none."""
    if calls:
        conversation.append({"role": "assistant", "content": None, "tool_calls": calls})
        conversation += [{"role": "tool", "tool_call_id": call["id"], "content": RESULT} for call in calls]
    return bool(calls)


def bare(session: aiohttp.ClientSession, fan_url: str, loop_url: str) -> tuple[FanOutCall, LoopTurn, Any]:
    """Return the calls of the lower limit: JSON over aiohttp, nothing else."""

    async def post(url: str, body: object) -> Any:
        async with session.post(f"{url}/chat/completions", json=body, headers={"Authorization": "Bearer k"}) as answer:
            return (await answer.json())["choices"][0]["message"]

    async def call(number: int) -> object:
        return (await post(fan_url, {"model": "m", "messages": data(number)}))["content"]

    async def turn(conversation: list[Any]) -> bool:
        message = await post(loop_url, {"model": "m", "messages": conversation, "tools": TOOLS})
        return extend(conversation, message.get("tool_calls") or [])

    return call, turn, lambda: data("loop")


def sdk(opened: list[AsyncOpenAI], fan_url: str, loop_url: str, **options: Any) -> tuple[FanOutCall, LoopTurn, Any]:
    """Return the calls of the package, used as its documentation shows."""
    fan = AsyncOpenAI(api_key="k", base_url=fan_url, max_retries=0, **options)
    loop = AsyncOpenAI(api_key="k", base_url=loop_url, max_retries=0, **options)
    opened += [fan, loop]

    async def call(number: int) -> object:
        answer = await fan.chat.completions.create(model="m", messages=data(number))
        return answer.choices[0].message.content

    async def turn(conversation: list[Any]) -> bool:
        tools: list[Any] = [*TOOLS]  # plain dicts
        answer = await loop.chat.completions.create(model="m", messages=conversation, tools=tools)
        calls = [found.model_dump() for found in answer.choices[0].message.tool_calls or ()]
        return extend(conversation, calls)

    return call, turn, lambda: data("loop")


def ours(fan_url: str, loop_url: str, **options: Any) -> tuple[FanOutCall, LoopTurn, Any]:
    """`OpenAIChatModel`."""
    fan = OpenAIChatModel("m", base_url=fan_url, api_key="k", **options)
    loop = OpenAIChatModel("m", base_url=loop_url, api_key="k", **options)

    def opening(number: int | str) -> list[Any]:
        return [ChatMessage("system", SYSTEM), ChatMessage("user", f"item {number}")]

    async def call(number: int) -> object:
        return (await fan.chat(opening(number))).text

    async def turn(conversation: list[Any]) -> bool:
        answer = await loop.chat(conversation, SPECS)
        if answer.tool_calls:
            conversation.append(ChatMessage("assistant", None, answer.tool_calls))
            conversation += [ChatMessage("tool", RESULT, (), found.id, found.name) for found in answer.tool_calls]
        return bool(answer.tool_calls)

    return call, turn, lambda: opening("loop")


async def median_s(measure: Callable[[], Awaitable[float]], repetitions: int) -> float:
    """Return the median of several measurements, after one to warm up."""
    await measure()
    taken: list[float] = []
    for _ in range(repetitions):
        gc.collect()
        taken.append(await measure())
    return statistics.median(taken)


async def main() -> None:
    """Measure every client in both scenarios and print a table."""
    opened: list[AsyncOpenAI] = []
    with model_server("--text", "hello") as fan_url, model_server("--tool-turns", str(TURNS)) as loop_url:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            clients = {
                "aiohttp, bare": bare(session, fan_url, loop_url),
                "OpenAIChatModel": ours(fan_url, loop_url),
                "OpenAIChatModel(client_options={})": ours(fan_url, loop_url, client_options={}),
                "AsyncOpenAI, aiohttp": sdk(opened, fan_url, loop_url, http_client=DefaultAioHttpClient()),
                "AsyncOpenAI, default": sdk(opened, fan_url, loop_url),
            }
            taken: dict[str, tuple[float, float]] = {}
            for name, (call, turn, opening) in clients.items():

                async def fan(call: FanOutCall = call) -> float:
                    return await fan_out_s(call)

                async def loop(turn: LoopTurn = turn, opening: Callable[[], list[Any]] = opening) -> float:
                    return await loop_s(turn, opening())

                taken[name] = (await median_s(fan, 3), await median_s(loop, 7))
        for client in opened:
            await client.close()
    floor = taken["AsyncOpenAI, default"]
    print("| client | fan-out of 1,000 | ratio to floor | tool loop, per call | ratio to floor |")
    print("|---|---|---|---|---|")
    for name, (fan_s, turn_s) in taken.items():
        print(f"| {name} | {fan_s:.2f} s | {fan_s / floor[0]:.3f} | {turn_s * 1000:.2f} ms | {turn_s / floor[1]:.3f} |")


if __name__ == "__main__":
    asyncio.run(main())
