"""Several calls of one turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from ensemble_ray import AgentExecutionError, ExitEarlyError, IllegalStateError, ToolContext, tool
from ensemble_ray.tools.call import call_batch, call_tool
from ensemble_ray.tools.cpu import ToolOutcome
from ensemble_ray.tools.registry import resolve_tools
from tests.ensemble_ray.virtual_time import run_in_virtual_time


def after(delay_s: float, result: object, log: list[object] | None = None) -> Callable[[], Awaitable[object]]:
    """A call that takes that long and gives, or raises, that."""

    async def work() -> object:
        if log is not None:
            log.append(("start", result))
        await asyncio.sleep(delay_s)
        if log is not None:
            log.append(("end", result))
        if isinstance(result, BaseException):
            raise result
        return result

    return work


def test_calls_overlap_when_there_are_several() -> None:
    """S-TOOL-80, S-TOOL-81, S-TOOL-84: started in request order, done together, results in request order."""
    log: list[object] = []
    batch = call_batch([after(3, "a", log), after(1, "b", log), after(2, "c", log)], agent_role="Writer")
    assert run_in_virtual_time(batch) == (["a", "b", "c"], 3)
    assert log == [*(("start", name) for name in "abc"), ("end", "b"), ("end", "c"), ("end", "a")]


async def test_call_runs_directly_when_it_is_alone() -> None:
    """S-TOOL-80: no task of its own."""

    async def work() -> object:
        return asyncio.current_task()

    assert await call_batch([work], agent_role="Writer") == [asyncio.current_task()]


def test_others_go_on_when_one_tool_fails() -> None:
    """S-TOOL-82: a tool's failure is an outcome like any other."""

    @tool
    async def fails() -> str:
        msg = "broken"
        raise ValueError(msg)

    @tool
    async def works() -> str:
        await asyncio.sleep(1)
        return "fine"

    tools = resolve_tools([fails, works])
    calls = [lambda bound=bound: call_tool(bound, "", context=ToolContext(tool_name=bound.name)) for bound in tools]
    outcomes, _ = run_in_virtual_time(call_batch(calls, agent_role="Writer"))
    assert outcomes == [ToolOutcome("Tool error: ValueError: broken", "error"), ToolOutcome("fine")]


@pytest.mark.parametrize("error", [ExitEarlyError("enough"), IllegalStateError("bad")])
def test_error_passes_when_it_ends_the_run(error: Exception) -> None:
    """S-TOOL-85, S-TOOL-82: unchanged, the first in request order; the others ended before."""
    log: list[object] = []
    batch = call_batch(
        [after(3, "a", log), after(2, error, log), after(1, IllegalStateError("other"), log)], agent_role="Writer"
    )
    with pytest.raises(type(error)) as caught:
        run_in_virtual_time(batch)
    assert caught.value is error
    assert ("end", "a") in log


def test_batch_fails_when_it_takes_too_long() -> None:
    """S-TOOL-83: 5 minutes; what still runs is cancelled."""
    log: list[object] = []
    batch = call_batch([after(1, "a", log), after(900, "b", log)], agent_role="Writer", task_description="Write")
    with pytest.raises(AgentExecutionError) as caught:
        run_in_virtual_time(batch)
    assert str(caught.value) == "Parallel tool execution for agent 'Writer' timed out after 5 minutes"
    assert (caught.value.agent_role, caught.value.task_description) == ("Writer", "Write")
    assert ("end", "b") not in log
    with pytest.raises(AgentExecutionError, match=r"timed out after 90 seconds$"):
        run_in_virtual_time(call_batch([after(1, "a"), after(900, "b")], agent_role="Writer", limit_s=90))


def test_tools_own_limit_wins_when_both_end_together() -> None:
    """S-SET-34, S-TOOL-83: a hanging tool with the default limit is told to the model, it does not end the task."""

    @tool
    async def hang() -> None:
        await asyncio.Event().wait()

    (bound,) = resolve_tools([hang])
    calls = [lambda: call_tool(bound, "", context=ToolContext()), after(1, ToolOutcome("fine"))]
    outcomes, _ = run_in_virtual_time(call_batch(calls, agent_role="Writer"))
    assert outcomes == [ToolOutcome("Tool error: timed out after 300 s", "error"), ToolOutcome("fine")]


async def test_calls_are_cancelled_when_the_batch_is() -> None:
    """S-TOOL-80: nothing runs on behind the back of a cancelled task."""
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("x")

    batch = asyncio.ensure_future(call_batch([work, work], agent_role="Writer"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    batch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await batch
    await asyncio.sleep(0)
    assert ended == ["x", "x"]
