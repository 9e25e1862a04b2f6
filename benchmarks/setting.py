"""What a job is told, and what it gives back: a round that can be asked for again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ensemble_ray import Ensemble, MapEnsemble, MapReduceEnsemble

__all__ = [
    "MODEL",
    "SYSTEM",
    "Ask",
    "Round",
    "Setting",
    "answer",
    "asking",
    "bare_rounds",
    "messages_of",
    "team_rounds",
]

MODEL = "benchmark"
#: As long as what a team's agents send, so that both sides move the same bytes.
SYSTEM = (
    "You are Reader.\n\nYour personal goal is: Read\n\nAnswer the task below with exactly what it asks for, in the form "
    "it asks for, as well as you can. Check your answer before you give it. Do not say what you are about to do or what "
    "you have done; give the answer and stop. If something is missing, say so plainly in one sentence instead of "
    "guessing."
)

#: Sends messages, and perhaps tools, in the form of the protocol; returns the message of the answer.
Ask = Callable[..., Awaitable[dict[str, Any]]]
#: Does the work once and returns the seconds it took.
Round = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One variant of one scenario."""

    url: str
    #: `inline` or `ray`; the floor does not look at it
    runtime: str
    size: int
    #: how safe the record of the team's runs is: `off`, `run` or `effects`; the floor does not look at it
    durability: str
    extra: Mapping[str, int]


@contextmanager
def bare_rounds(setting: Setting, job: Callable[[Ask], Awaitable[object]]) -> Generator[Round]:
    """Run rounds of hand-written code: one aiohttp session, made once, and JSON. Nothing is recorded or repeated."""
    with asyncio.Runner() as runner:

        async def timed() -> float:
            began = time.perf_counter()
            await job(ask)
            return time.perf_counter() - began

        ask, close = runner.run(asking(setting.url))
        yield lambda: runner.run(timed())
        runner.run(close())


async def asking(url: str) -> tuple[Ask, Callable[[], Coroutine[Any, Any, None]]]:
    """Return a function that asks the model, and one that closes its connections."""
    import aiohttp

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers={"Authorization": "Bearer benchmark"},
        # By default an answer has 300 s: ten thousand at the same time by one busy process may take longer.
        timeout=aiohttp.ClientTimeout(total=600),
    )

    async def ask(messages: Sequence[Any], tools: Sequence[Any] = ()) -> dict[str, Any]:
        body = {"model": MODEL, "messages": messages} | ({"tools": tools} if tools else {})
        async with session.post(f"{url}/chat/completions", json=body) as answer:
            answer.raise_for_status()
            message: dict[str, Any] = (await answer.json())["choices"][0]["message"]
            return message

    return ask, session.close


async def answer(ask: Ask, text: str) -> str:
    """Return the model's answer to one text."""
    return str((await ask(messages_of(text)))["content"])


def messages_of(text: str) -> list[Any]:
    """Return a conversation that begins with a text of the user."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


@contextmanager
def team_rounds(setting: Setting, make: Callable[[], Ensemble | MapEnsemble | MapReduceEnsemble]) -> Generator[Round]:
    """Run rounds of a team on a runtime that stays warm; declaring the team is part of the round."""
    from ensemble_ray import InlineRuntime, RayRuntime, RunOptions

    options = RunOptions(durability=setting.durability)
    with RayRuntime("local") if setting.runtime == "ray" else InlineRuntime() as runtime:

        def timed() -> float:
            began = time.perf_counter()
            make().run(runtime=runtime, options=options)
            return time.perf_counter() - began

        yield timed
