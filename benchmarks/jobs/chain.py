"""Calls that need each other's answers: nothing runs beside anything else."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from benchmarks.setting import MODEL, Ask, Round, Setting, answer, bare_rounds, team_rounds

if TYPE_CHECKING:
    from ensemble_ray import Ensemble, Task

__all__ = ["fallback", "floor", "make_chain", "team"]


def floor(setting: Setting) -> AbstractContextManager[Round]:
    """Run a plain loop."""

    async def job(ask: Ask) -> str:
        text = ""
        for number in range(setting.size):
            asked = f"Earlier: {text}\n\nWrite part {number} in one sentence."
            text = await answer(ask, asked)
        return text

    return bare_rounds(setting, job)


def team(setting: Setting) -> AbstractContextManager[Round]:
    """One writer; every task has the one before as context."""

    def make() -> Ensemble:
        from ensemble_ray import Ensemble

        return Ensemble(tasks=make_chain(setting))

    return team_rounds(setting, make)


def fallback(setting: Setting) -> AbstractContextManager[Round]:
    """The same with two models: the second one is never asked."""

    def make() -> Ensemble:
        from ensemble_ray import Ensemble

        return Ensemble(tasks=make_chain(setting, models=(MODEL, f"{MODEL}-2")))

    return team_rounds(setting, make)


def make_chain(setting: Setting, *, memory_scopes: Sequence[str] = (), models: Sequence[str] = (MODEL,)) -> list[Task]:
    """Return the tasks of the chain."""
    from ensemble_ray import Agent, OpenAIChatModel, Task

    llm = [OpenAIChatModel(name, base_url=setting.url, api_key="benchmark") for name in models]
    writer = Agent(role="Writer", goal="Write", llm=llm)
    tasks: list[Task] = []
    for number in range(setting.size):
        tasks.append(
            Task(
                name=f"part-{number}",
                description=f"Write part {number}",
                expected_output="One sentence",
                agent=writer,
                context=tasks[-1:],
                memory_scopes=memory_scopes,
            )
        )
    return tasks
