"""Map and reduce where some calls take many times as long as others: level by level, and pipelined."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal

from benchmarks.setting import MODEL, Ask, Round, Setting, answer, bare_rounds, team_rounds

if TYPE_CHECKING:
    from ensemble_ray import MapReduceEnsemble

__all__ = ["floor", "levels", "pipelined"]


def floor(setting: Setting) -> AbstractContextManager[Round]:
    """Level by level with a semaphore and gathers, as one writes it by hand."""

    async def job(ask: Ask) -> None:
        slots = asyncio.Semaphore(setting.extra["slots"])

        async def one(text: str) -> str:
            async with slots:
                return await answer(ask, text)

        level = [f"Summarise part {number} in one sentence." for number in range(setting.size)]
        answers = await asyncio.gather(*map(one, level))
        number = 0
        while len(answers) > 1:
            number += 1
            size = setting.extra["group"]
            groups = [answers[first : first + size] for first in range(0, len(answers), size)]
            texts = ["\n\n".join(group) for group in groups]
            answers = await asyncio.gather(
                *(one(f"Join group {place} of level {number}.\n\n{text}") for place, text in enumerate(texts))
            )

    return bare_rounds(setting, job)


def levels(setting: Setting) -> AbstractContextManager[Round]:
    """Begin a level when the one before has ended."""
    return team_rounds(setting, lambda: _team(setting, "levels"))


def pipelined(setting: Setting) -> AbstractContextManager[Round]:
    """Begin a reduce as soon as there is enough for it."""
    return team_rounds(setting, lambda: _team(setting, "pipelined"))


def _team(setting: Setting, mode: Literal["levels", "pipelined"]) -> MapReduceEnsemble:
    from ensemble_ray import MapReduceEnsemble, OpenAIChatModel, Task

    return MapReduceEnsemble(
        items=iter(range(setting.size)),
        map_task=lambda number: Task(description=f"Summarise part {number}", expected_output="One sentence"),
        reduce_task=lambda group: Task(description="Join these", expected_output="One text", context=group),
        llm=OpenAIChatModel(MODEL, base_url=setting.url, api_key="benchmark"),
        chunk_size=setting.extra["group"],
        mode=mode,
        max_parallel_tasks=setting.extra["slots"],
    )
