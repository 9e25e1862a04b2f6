"""Handlers and guardrails of dynamic runs on a real cluster: one copy of each, in one process, there before it is asked."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from ensemble_ray import GuardrailResult, RayRuntime, RunState
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.stores import StoreAddress
from tests.actors.feeding import Driver, Placed, at_work
from tests.builders import agent
from tests.scenarios.teams import Marks


@pytest.fixture
def runtime(ray_runtime: RayRuntime) -> RayRuntime:
    """The shared one; its processes stay warm from test to test."""
    return ray_runtime


class Counting:
    """Counts its calls, also those of several threads at the same time: each takes a number, in one step."""

    def __init__(self) -> None:
        self._free = list(range(100, 0, -1))

    @property
    def count(self) -> int:
        """Calls so far."""
        return 100 - len(self._free)


class Handling(Counting):
    """A handler that tells its process and its call's number."""

    def __call__(self, given: object) -> object:
        del given
        return f"{os.getpid()}/{self._free.pop()}"


class Limiting(Counting):
    """A guardrail that lets two answers pass."""

    def __call__(self, given: object) -> GuardrailResult:
        del given
        return GuardrailResult.success() if self._free.pop() <= 2 else GuardrailResult.failure("that is enough")


async def test_callables_that_tasks_share_are_one_copy(runtime: RayRuntime) -> None:
    """S-SET-31, S-MR-142: in the one process of the run's callables; the caller's own copy is untouched."""
    handler, guardrail = Handling(), Limiting()
    async with Driver(runtime) as driver:
        driver.executor.start([driver.order("plain", agent(Placed()))])
        driver.executor.start([driver.order(f"map-{n}", handler=handler) for n in range(8)])
        await driver.until(9)
        driver.executor.start(
            [driver.order(f"guarded-{n}", agent(Placed()), output_guardrails=[guardrail]) for n in range(3)]
        )
        await driver.until(12)
        held = await driver.in_run(lambda session: len(session._callables._tasks))
    assert held == 0
    texts = [result.output.raw for key, result in driver.results.items() if key.startswith("map") and result.output]
    assert sorted(int(text.partition("/")[2]) for text in texts) == list(range(1, 9))
    assert len({text.partition("/")[0] for text in texts}) == 1
    assert (handler.count, guardrail.count) == (0, 0)
    guarded = [driver.results[f"guarded-{n}"] for n in range(3)]
    assert sorted(result.status for result in guarded) == ["completed", "completed", "failed"]
    assert "that is enough" in str(next(result.error for result in guarded if result.error))


async def test_callables_are_hosted_again_when_their_process_died(runtime: RayRuntime, tmp_path: Path) -> None:
    """S-DUR-31, S-SET-31: a handler that was at work goes on in the next one; later tasks find theirs there."""
    marks, address = Marks(tmp_path / "marks"), StoreAddress(home=str(tmp_path))

    def hold(given: object) -> str:
        del given
        marks.add(os.getpid())
        marks.wait("over")
        return "held"

    driver = Driver(runtime, store=address)
    owned = await store_at(address).begin(driver.run_id)
    async with driver:
        driver.executor.start([driver.order("first", handler=hold, effect="none")])
        os.kill((await at_work(marks, 1))[0], signal.SIGKILL)
        await at_work(marks, 2)
        marks.add("over")
        driver.executor.start([driver.order("second", handler=hold, effect="none")])
        await driver.until(2)
    await owned.close(RunState.COMPLETED)
    assert set(driver.texts().values()) == {"held"}
