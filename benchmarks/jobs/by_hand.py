"""The same work by hand on Ray: two actors with an aiohttp session each. The floor of the teams on Ray."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import ray

from benchmarks.jobs import manager as managing
from benchmarks.jobs import tool_loop as looping
from benchmarks.setting import Ask, Round, Setting, answer, asking, messages_of

__all__ = ["chain", "fan_out", "manager", "mapping", "tool_loop"]


class Writer:
    """An actor that asks the model."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._ask: Ask | None = None

    async def answer(self, text: str) -> dict[str, Any]:
        """Return the model's answer to one text."""
        return await (await self._asking())(messages_of(text))

    async def fan_out(self, first: int, step: int, size: int, slots: int) -> list[str]:
        """Ask for every `step`-th part, at most `slots` at a time."""
        ask, free = await self._asking(), asyncio.Semaphore(slots)

        async def one(number: int) -> str:
            async with free:
                return await answer(ask, f"Summarise part {number} in one sentence.")

        return await asyncio.gather(*map(one, range(first, size, step)))

    async def tool_loop(self) -> str:
        """Hold a conversation with tool calls."""
        return await looping.converse(await self._asking())

    async def manage(self, worker: Any) -> str:
        """Delegate to another actor what the model asks for."""
        return await managing.manage(await self._asking(), worker.answer.remote)

    async def _asking(self) -> Ask:
        if self._ask is None:
            self._ask, _ = await asking(self._url)
        return self._ask


def fan_out(setting: Setting) -> AbstractContextManager[Round]:
    """Give each actor half of the parts, and one of them all answers."""

    def work(first: Any, second: Any) -> None:
        answers = _halves(setting, first, second)
        _get(first.answer.remote("Join these into one text.\n\n" + "\n\n".join(answers)))

    return _rounds(setting, work)


def mapping(setting: Setting) -> AbstractContextManager[Round]:
    """Give each actor half of the items."""
    return _rounds(setting, lambda first, second: _halves(setting, first, second))


def chain(setting: Setting) -> AbstractContextManager[Round]:
    """Ask both actors in turn; each gets the answer of the other."""

    def work(*writers: Any) -> None:
        text = ""
        for number in range(setting.size):
            asked = f"Earlier: {text}\n\nWrite part {number} in one sentence."
            text = _get(writers[number % 2].answer.remote(asked))["content"]

    return _rounds(setting, work)


def tool_loop(setting: Setting) -> AbstractContextManager[Round]:
    """Let one actor converse and call the tools."""
    return _rounds(setting, lambda first, _: _get(first.tool_loop.remote()))


def manager(setting: Setting) -> AbstractContextManager[Round]:
    """Let one actor manage and the other work."""
    return _rounds(setting, lambda first, second: _get(first.manage.remote(second)))


@contextmanager
def _rounds(setting: Setting, work: Callable[[Any, Any], object]) -> Generator[Round]:
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    made: Any = ray.remote(Writer).options(num_cpus=0, max_concurrency=1000)  # noqa: TID251  bare Ray is measured here
    first, second = made.remote(setting.url), made.remote(setting.url)

    def timed() -> float:
        began = time.perf_counter()
        work(first, second)
        return time.perf_counter() - began

    yield timed
    ray.shutdown()


def _halves(setting: Setting, first: Any, second: Any) -> list[str]:
    slots = setting.extra["slots"] // 2
    halves = [each.fan_out.remote(at, 2, setting.size, slots) for at, each in enumerate((first, second))]
    return [answer for half in _get(halves) for answer in half]


def _get(answers: Any) -> Any:
    return ray.get(answers)  # noqa: TID251  as above
