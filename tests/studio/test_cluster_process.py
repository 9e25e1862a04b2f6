"""The process that asks a cluster: when it begins, when it ends, and what those are told who wait for it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from typing import Any

import pytest
import pytest_asyncio

from ensemble_ray import EnsembleError
from ensemble_ray.studio import processes as cluster_process
from ensemble_ray.studio.processes import ClusterProcess

pytestmark = pytest.mark.program

_PATIENCE_S = 60.0


class Spawned:
    """The processes that were started; a start ends when the test lets it."""

    def __init__(self) -> None:
        self.made: list[asyncio.subprocess.Process] = []
        self.is_made, self.goes_on = asyncio.Event(), asyncio.Event()
        self.goes_on.set()

    async def start(self, *command: Any, **options: Any) -> asyncio.subprocess.Process:
        """Start one, and keep it."""
        made = await asyncio.create_subprocess_exec(*command, **options)
        self.made.append(made)
        self.is_made.set()
        await self.goes_on.wait()
        return made


@pytest_asyncio.fixture
async def spawned(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Spawned]:
    """What the test starts; all of it is ended, whatever became of the test."""
    found = Spawned()
    monkeypatch.setattr(cluster_process, "_MODULE", "tests.studio.probe_double")
    monkeypatch.setattr(cluster_process, "_start_process", found.start)
    yield found
    for each in found.made:
        if each.returncode is None:
            each.kill()
            await each.wait()


async def test_a_process_that_is_just_started_is_ended_too(spawned: Spawned) -> None:
    """S-STU-34: whoever closes it leaves no process behind; who waited for an answer is told."""
    asked = ClusterProcess("a")
    spawned.goes_on.clear()
    asking = asyncio.create_task(asked.describe())
    await asyncio.wait_for(spawned.is_made.wait(), _PATIENCE_S)
    closing = asyncio.create_task(asked.close())
    await asyncio.sleep(0)
    spawned.goes_on.set()
    await asyncio.wait_for(closing, _PATIENCE_S)
    (made,) = spawned.made
    assert made.returncode is not None
    with pytest.raises(EnsembleError, match="is not asked any more"):
        await asyncio.wait_for(asking, _PATIENCE_S)


async def test_a_question_that_comes_when_the_process_is_about_to_end_is_answered(
    spawned: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-STU-34: the end for want of questions ends no question; without one the process ends, and the next question starts another."""
    asked = ClusterProcess("a")
    await asyncio.wait_for(asked.describe(), _PATIENCE_S)
    timer = asked._idle
    assert timer is not None
    asking = asyncio.create_task(asked.describe())
    asyncio.get_running_loop().call_soon(timer._run)  # in the same turn of the loop, behind the question
    assert (await asyncio.wait_for(asking, _PATIENCE_S)).address == str(spawned.made[0].pid)

    monkeypatch.setattr(cluster_process, "_IDLE_S", 0.0)
    await asyncio.wait_for(asked.describe(), _PATIENCE_S)
    for made in spawned.made:
        await asyncio.wait_for(made.wait(), _PATIENCE_S)
    monkeypatch.setattr(cluster_process, "_IDLE_S", 60.0)
    described = await asyncio.wait_for(asked.describe(), _PATIENCE_S)
    assert described.address == str(spawned.made[-1].pid)
    assert spawned.made[-1].returncode is None
    assert (await asked.describe()).address == described.address
    await asked.close()
    assert spawned.made[-1].returncode is not None


async def test_a_process_that_was_killed_is_replaced(spawned: Spawned) -> None:
    """S-STU-34: at once where it died between two questions; in a question it is said, and for a while nobody asks again."""
    asked = ClusterProcess("a")
    await asyncio.wait_for(asked.describe(), _PATIENCE_S)
    os.kill(spawned.made[0].pid, signal.SIGKILL)
    await asyncio.wait_for(spawned.made[0].wait(), _PATIENCE_S)
    assert (await asyncio.wait_for(asked.describe(), _PATIENCE_S)).address == str(spawned.made[1].pid)
    await asked.close()

    silent = ClusterProcess("silent")
    spawned.is_made.clear()
    asking = asyncio.create_task(silent.describe())
    await asyncio.wait_for(spawned.is_made.wait(), _PATIENCE_S)
    os.kill(spawned.made[2].pid, signal.SIGKILL)
    with pytest.raises(EnsembleError, match=r"at silent (is gone|cannot be asked)"):
        await asyncio.wait_for(asking, _PATIENCE_S)
    with pytest.raises(EnsembleError, match=r"at silent (is gone|cannot be asked)"):
        await silent.describe()
    assert len(spawned.made) == 3
