"""Package tools: the calls of one turn. In: what to do for each request. Out: what came of each, in request order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NoReturn, TypeVar

from ensemble_ray.errors import AgentExecutionError

__all__ = ["BATCH_LIMIT_S", "call_batch"]

T = TypeVar("T")

#: Longest time for all tool calls of one turn (S-TOOL-83).
BATCH_LIMIT_S = 300.0
#: A tool whose own time ends together with the batch's still gives its text to the model (S-SET-34).
_GRACE_S = 0.25


async def call_batch(
    calls: Sequence[Callable[[], Awaitable[T]]],
    *,
    agent_role: str,
    task_description: str = "",
    limit_s: float | None = BATCH_LIMIT_S,
) -> list[T]:
    """Do several calls at the same time; a single one runs directly and without the limit (S-TOOL-80).

    A call that raises does not disturb the others: all are waited for, then the first error in request order is raised.

    Args:
        calls: Starts one call each; they are started in this order.
        agent_role: Whose turn it is, for the error.
        task_description: Of the task, for the error.
        limit_s: Longest time for all of them together; None: as long as they like.

    Raises:
        AgentExecutionError: they took too long (S-TOOL-83); what still runs is cancelled.
        BaseException: a call raised it, unchanged (S-TOOL-85).
    """
    if len(calls) == 1:
        return [await calls[0]()]
    tasks = [asyncio.ensure_future(_start(call)) for call in calls]
    try:
        late = await _wait(tasks, limit_s)
        if late:
            late = await _wait(late, _GRACE_S)
        if late and limit_s is not None:
            msg = f"Parallel tool execution for agent '{agent_role}' timed out after {_in_words(limit_s)}"
            raise AgentExecutionError(msg, agent_role, task_description)
    finally:
        for task in tasks:
            task.cancel()
    return [task.result().unwrap() for task in tasks]


@dataclass(frozen=True, slots=True)
class _Returned(Generic[T]):
    value: T

    def unwrap(self) -> T:
        return self.value


@dataclass(frozen=True, slots=True)
class _Stopped:
    stop: BaseException

    def unwrap(self) -> NoReturn:
        raise self.stop


async def _start(call: Callable[[], Awaitable[T]]) -> _Returned[T] | _Stopped:
    try:
        return _Returned(await call())
    except (SystemExit, KeyboardInterrupt) as stop:  # raised by a task, it would end the loop for everybody
        return _Stopped(stop)


async def _wait(tasks: Sequence[asyncio.Future[T]], timeout_s: float | None) -> list[asyncio.Future[T]]:
    """Wait for them; gives those that are not done."""
    if not tasks:
        return []
    _, late = await asyncio.wait(tasks, timeout=timeout_s)
    return [task for task in tasks if task in late]


def _in_words(seconds: float) -> str:
    minutes = seconds / 60
    return f"{minutes:g} minutes" if minutes.is_integer() else f"{seconds:g} seconds"
