"""Many independent calls with a cap on how many run at once, then one that gets all their answers."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from benchmarks.setting import MODEL, Ask, Round, Setting, answer, bare_rounds, team_rounds

if TYPE_CHECKING:
    from ensemble_ray import Ensemble

__all__ = ["floor", "team", "team_of"]


def floor(setting: Setting) -> AbstractContextManager[Round]:
    """Run a semaphore and a gather."""

    async def job(ask: Ask) -> str:
        slots = asyncio.Semaphore(setting.extra["slots"])

        async def one(number: int) -> str:
            async with slots:
                return await answer(ask, f"Summarise part {number} in one sentence.")

        answers = await asyncio.gather(*(one(number) for number in range(setting.size)))
        return await answer(ask, "Join these into one text.\n\n" + "\n\n".join(answers))

    return bare_rounds(setting, job)


def team(setting: Setting) -> AbstractContextManager[Round]:
    """Run a reader for the parts, an editor for the whole."""
    return team_rounds(setting, lambda: team_of(setting))


def team_of(setting: Setting) -> Ensemble:
    """Declare the team anew."""
    from ensemble_ray import Agent, Ensemble, OpenAIChatModel, Task

    model = OpenAIChatModel(MODEL, base_url=setting.url, api_key="benchmark")
    reader = Agent(role="Reader", goal="Read", llm=model)
    editor = Agent(role="Editor", goal="Join", llm=model)
    parts = [
        Task(
            name=f"part-{number}",
            description=f"Summarise part {number}",
            expected_output="One sentence",
            agent=reader,
        )
        for number in range(setting.size)
    ]
    whole = Task(
        name="whole", description="Join these into one text", expected_output="Text", agent=editor, context=parts
    )
    return Ensemble(tasks=[*parts, whole], workflow="parallel", max_parallel_tasks=setting.extra["slots"])
