"""User code that raises what would end a process or a task: it ends its own work, never ours and never hangs a run."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from ensemble_ray import AgentExecutionError, Ensemble, TaskExecutionError, tool
from ensemble_ray.process.concurrency import library_loop, run_blocking
from tests.builders import agent, answer, call, task
from tests.scenarios.teams import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from ensemble_ray import Runtime
    from ensemble_ray.testing import ScriptedModel


@tool
def interrupted() -> str:
    """Behaves as if somebody had pressed Ctrl-C."""
    raise KeyboardInterrupt("in a tool")


@tool
async def cancels_its_task() -> str:
    """Cancels whoever called it."""
    current = asyncio.current_task()
    assert current is not None
    current.cancel()
    await asyncio.sleep(0)
    return "never"


def test_turn_goes_on_when_two_of_its_tools_raise_keyboard_interrupt(
    runtime: Runtime, scripted: Callable[..., ScriptedModel]
) -> None:
    """S-SET-48, S-TOOL-23: several calls of one turn run as tasks of the loop; none of them may end it."""
    model = scripted(answer("", calls=[call("interrupted", number=1), call("interrupted", number=2)]), "done")
    team = Ensemble(tasks=[task("writing", agent(model, tools=[interrupted]))])
    assert team.start(runtime=runtime).result(PATIENCE_S).raw == "done"


def test_task_fails_when_a_tool_cancels_it(runtime: Runtime, scripted: Callable[..., ScriptedModel]) -> None:
    """S-PAR-12: a task that nobody asked to stop resolves as failed, so the run ends."""
    model = scripted(call("cancels_its_task"), "never asked")
    writer = agent(model, tools=[cancels_its_task])
    team = Ensemble(tasks=[task("writing", writer), task("reading", writer)])
    with pytest.raises(TaskExecutionError, match="writing") as caught:
        team.start(runtime=runtime).result(PATIENCE_S)
    assert isinstance(caught.value.__cause__, AgentExecutionError)


def test_run_fails_when_its_synthesizer_exits(runtime: Runtime, scripted: Callable[..., ScriptedModel]) -> None:
    """S-DET-25: `sys.exit` in a synthesizer ends the run with an error; our loop goes on."""

    class Exiting:
        async def synthesize(self, *_: object) -> object:
            raise SystemExit(3)

    team = Ensemble(tasks=[task("writing"), task("reading")], llm=scripted("never asked"), agent_synthesizer=Exiting())
    with pytest.raises(AgentExecutionError, match="synthesizer"):
        team.start(runtime=runtime).result(PATIENCE_S)


async def _raises(stop: type[BaseException]) -> None:
    raise stop


@pytest.mark.parametrize("stop", [SystemExit, KeyboardInterrupt])
def test_loop_lives_on_when_one_of_its_tasks_would_end_it(stop: type[BaseException]) -> None:
    """S-CONV-37: other runs are on the same loop."""

    async def spawn() -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(_raises(stop))

    async def outcome(of: asyncio.Task[None]) -> BaseException | None:
        await asyncio.wait([of])
        return of.exception()

    assert isinstance(run_blocking(outcome(run_blocking(spawn()))), stop)
    assert library_loop().is_running()
