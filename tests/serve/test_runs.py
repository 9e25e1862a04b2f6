"""Runs that outlive whoever asked for them."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest

from ensemble_ray import EnsembleError, InlineRuntime, PromptTemplateError, RunState
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.serve.run_schemas import NewRun
from ensemble_ray.serve.runs import Runs
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.serve.teams import INPUTS, pair


class Gate:
    """Holds a model's answer until it is let go; says when the model was asked."""

    def __init__(self, answer: object) -> None:
        self.is_asked = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_open = asyncio.Event()
        self._answer = answer

    def open(self) -> None:
        self._is_open.set()

    async def __call__(self, _asked: ScriptedCall) -> object:
        # The model is asked on the library's loop, the test waits on its own.
        self._loop.call_soon_threadsafe(self.is_asked.set)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._is_open.wait(), self._loop))
        return self._answer


async def test_a_run_goes_on_when_its_client_has_gone(records: Path) -> None:
    """S-SET-39: it is recorded, and its id finds the answer without another model call."""
    gate = Gate("a draft")
    model = ScriptedModel(gate, "a line")
    async with InlineRuntime() as runtime:
        runs = Runs(pair(model), runtime)
        asking = asyncio.create_task(runs.run(NewRun(inputs=INPUTS, run_id="left")))
        await gate.is_asked.wait()
        (running,) = runs._waiting
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        gate.open()
        assert (await running).raw == "a line"
        assert not runs._waiting
        found = await runs.run(NewRun(inputs=INPUTS, run_id="left"))
    assert [each.text for each in found.tasks] == ["a draft", "a line"]
    assert len(model.calls) == 2
    assert (records / "runs" / "left").is_dir()


async def test_a_failure_that_nobody_waits_for_is_not_reported_as_forgotten(records: Path) -> None:
    """The run has logged it; the loop has nothing to complain of."""
    gate = Gate(ValueError("boom"))
    complaints: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    async with InlineRuntime() as runtime:
        runs = Runs(pair(ScriptedModel(gate)), runtime)
        asking = asyncio.create_task(runs.run(NewRun(inputs=INPUTS, run_id="failed")))
        await gate.is_asked.wait()
        (running,) = runs._waiting
        asking.cancel()
        gate.open()
        await asyncio.wait([running, asking])
    assert RunDirectory(records, "failed").state() is RunState.FAILED
    del running, asking
    gc.collect()
    assert not complaints


async def test_failed_run_is_one_bounded_warning(records: Path, caplog: pytest.LogCaptureFixture) -> None:
    """S-SET-53: its id, its reason and the class of the error; what others wrote is cut and escaped."""
    async with InlineRuntime() as runtime:
        runs = Runs(pair(ScriptedModel(ValueError("boom\x1b[2J\n" * 1000))), runtime)
        with pytest.raises(EnsembleError):
            await runs.run(NewRun(inputs=INPUTS, run_id="failed"))
        (told,) = [each for each in caplog.records if each.name == "ensemble_ray.serve.runs"]
        assert told.levelname == "WARNING"
        assert told.getMessage().startswith("Run failed failed: Task '")
        assert "boom" in told.getMessage()
        assert len(told.getMessage()) < 1600
        assert told.getMessage().isprintable()
        caplog.clear()
        with pytest.raises(PromptTemplateError):
            await runs.run(NewRun(inputs={}, run_id="refused"))
    assert not [each for each in caplog.records if each.name == "ensemble_ray.serve.runs"]
