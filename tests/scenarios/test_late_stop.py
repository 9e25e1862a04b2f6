"""An interrupt or a cancellation that comes while a failure is told: it wins, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING

import pytest

from ensemble_ray import Ensemble, RunState
from tests.builders import agent, task
from tests.scenarios.teams import PATIENCE_S, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from ensemble_ray import Runtime
    from ensemble_ray.testing import ScriptedModel


def failing(scripted: Callable[..., ScriptedModel], told: Callable[[object], None]) -> Ensemble:
    """A team whose only task fails, and a listener that is told."""
    return Ensemble(tasks=[task("writing", agent(scripted(ValueError("no"))))], on_task_failed=told)


def test_interrupt_goes_on_when_it_comes_while_a_failure_is_told(
    runtime: Runtime, scripted: Callable[..., ScriptedModel]
) -> None:
    """S-SET-27, S-EVT-4: the run has failed already; the caller hears the interrupt all the same."""
    failed = threading.Event()

    def interrupt(_: object) -> None:
        wait_for(failed)
        raise KeyboardInterrupt

    begun = failing(scripted, interrupt).start(runtime=runtime)
    while begun.state is not RunState.FAILED:
        assert not begun.join(0.01)
    failed.set()
    with pytest.raises(KeyboardInterrupt):
        begun.result(PATIENCE_S)


async def test_nothing_is_left_when_a_failing_run_is_cancelled(
    runtime: Runtime, scripted: Callable[..., ScriptedModel], caplog: pytest.LogCaptureFixture
) -> None:
    """S-PAR-33: the cancellation is raised after the run's end, and its failure is no complaint of asyncio's."""
    gc.collect()  # what earlier tests left is complained of before this one begins
    caplog.clear()
    is_told, may_go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def told(_: object) -> None:
        loop.call_soon_threadsafe(is_told.set)
        wait_for(may_go)

    calling = asyncio.ensure_future(failing(scripted, told).arun(runtime=runtime))
    await is_told.wait()
    calling.cancel()
    await asyncio.sleep(0)
    may_go.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    del calling
    gc.collect()
    assert "never retrieved" not in caplog.text
