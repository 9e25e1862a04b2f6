"""One call for each of many items, which come one by one, with a cap on how many run at once. Nothing is reduced."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from benchmarks.setting import MODEL, Ask, Round, Setting, answer, bare_rounds, team_rounds

if TYPE_CHECKING:
    from ensemble_ray import Agent, MapEnsemble, Task

__all__ = ["floor", "reusing", "team", "team_of", "team_two"]


def floor(setting: Setting) -> AbstractContextManager[Round]:
    """Run a semaphore and a gather."""

    async def job(ask: Ask) -> None:
        slots = asyncio.Semaphore(setting.extra["slots"])

        async def one(number: int) -> str:
            async with slots:
                return await answer(ask, f"Summarise part {number} in one sentence.")

        await asyncio.gather(*(one(number) for number in range(setting.size)))

    return bare_rounds(setting, job)


def team(setting: Setting) -> AbstractContextManager[Round]:
    """Run a reader for every item."""
    return team_rounds(setting, lambda: team_of(setting))


def team_two(setting: Setting) -> AbstractContextManager[Round]:
    """Run the same in two processes."""
    return team_rounds(setting, lambda: team_of(setting, replicas=2))


@contextmanager
def reusing(setting: Setting) -> Generator[Round]:
    """Run the same when the record of an earlier run has all answers: the model is asked nothing."""
    with team_rounds(setting, lambda: team_of(setting, reuse="1d")) as one_round:
        one_round()
        yield one_round


def team_of(setting: Setting, *, replicas: int | None = None, reuse: str | None = None) -> MapEnsemble:
    """Declare the map anew; each item has an agent of its own."""
    from ensemble_ray import Agent, MapEnsemble, OpenAIChatModel, Task

    model = OpenAIChatModel(MODEL, base_url=setting.url, api_key="benchmark")

    def reader(number: int) -> Agent:
        return Agent(role="Reader", goal=f"Read part {number}", llm=model)

    def part(number: int, agent: Agent) -> Task:
        return Task(description=f"Summarise part {number}", expected_output="One sentence", agent=agent, reuse=reuse)

    return MapEnsemble(
        items=range(setting.size),
        map_agent=reader,
        map_task=part,
        max_parallel_tasks=setting.extra["slots"],
        replicas=replicas or 1,
    )
