"""What a job is told, and what it gives back: a round that can be asked for again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from ensemble_ray import Ensemble, MapEnsemble, MapReduceEnsemble

__all__ = ["MODEL", "SYSTEM", "Round", "Setting", "bare_rounds", "team_rounds"]

MODEL = "benchmark"
#: As long as what a team's agents send, so that both sides move the same bytes.
SYSTEM = (
    "You are Reader.\n\nYour personal goal is: Read\n\nAnswer the task below with exactly what it asks for, in the form "
    "it asks for, as well as you can. Check your answer before you give it. Do not say what you are about to do or what "
    "you have done; give the answer and stop. If something is missing, say so plainly in one sentence instead of "
    "guessing."
)

#: Does the work once and gives the seconds it took.
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
def bare_rounds(setting: Setting, job: Callable[[AsyncOpenAI], Awaitable[object]]) -> Generator[Round]:
    """Run rounds of hand-written code: one client, made once, with its default transport."""
    from openai import AsyncOpenAI

    with asyncio.Runner() as runner:
        # By default a connection has 5 s: a thousand made at the same time by one busy process take longer.
        client = AsyncOpenAI(base_url=setting.url, api_key="benchmark", timeout=600.0)

        async def timed() -> float:
            began = time.perf_counter()
            await job(client)
            return time.perf_counter() - began

        yield lambda: runner.run(timed())
        runner.run(client.close())


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
