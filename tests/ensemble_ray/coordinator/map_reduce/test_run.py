"""The coordinator of a map-reduce run: every path between its machine, its factories, its items and its executor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest

from ensemble_ray import ExitReason, RunState, Task, ValidationError
from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.facts.runs import GroupRecorded
from ensemble_ray.items.pulling import Pulled, RefusedItem
from ensemble_ray.runs.map_reduce.orders import TaskMaker
from tests.ensemble_ray.coordinator.map_reduce.running import Conducting, ending, map_task, team, until

# Items and tasks.


async def test_tasks_are_started_as_items_come() -> None:
    """S-MR-121, S-MR-160: as many as the window has places for; the items are on record before their maps start."""
    run = Conducting(team(5), count=5, window=3)
    await run.started("map-0", "map-1", "map-2")
    assert run.executor.keys == ["map-0", "map-1", "map-2"]
    assert run.executor.recorded["map-0"] == ["items run", "agents run"]
    order = run.order("map-1")
    assert (order.instance, order.index, order.task.description, order.agent_role) == ("map-1#0", 2, "map 1", "Worker")
    run.complete("map-0")
    await run.started("map-3")
    assert run.watch.completed_items == [(0, 0, "output of map-0")]
    ended = await run.play()
    assert ending(ended) == (RunState.COMPLETED, ExitReason.COMPLETED, "")
    assert [item for item, *_ in run.watch.completed_items] == [0, 1, 2, 3, 4]


async def test_run_of_an_empty_source_fails() -> None:
    """S-MR-122: nothing starts."""
    run = Conducting(team(0), count=0)
    assert ending(await run.ended()) == (RunState.FAILED, ExitReason.ERROR, "empty")
    assert run.executor.keys == []


class _Lines:
    """A reader whose second entry is no item."""

    async def next(self, count: int) -> Pulled:
        """Give all three at once."""
        del count
        refused = RefusedItem(1, "?!", ValidationError("line 2 is no JSON"))
        return Pulled([(0, "a"), refused, (2, "c")], is_exhausted=True)

    async def close(self) -> None:
        """Let nothing go."""


async def test_refused_item_is_a_failed_item(caplog: pytest.LogCaptureFixture) -> None:
    """S-MR-125: without a task; the others go on without it."""
    run = Conducting(team(on_item_error="collect"), reader=_Lines())
    await run.started("map-0", "map-2")
    assert run.watch.failed_items == [(1, "?!", "line 2 is no JSON", 0)]
    assert "map-1 failed and is left out" in caplog.text
    ended = await run.play()
    assert ended.ending.state is RunState.COMPLETED
    assert (ended.failed_maps, [failure.task_description for failure in ended.failures]) == (1, ["?!"])
    assert run.executor.keys == ["map-0", "map-2", "final-reduce"]


async def test_refused_item_ends_the_run_when_no_item_may_fail() -> None:
    """S-MR-150: nothing of it starts."""
    run = Conducting(team(on_item_error="fail"), reader=_Lines())
    assert ending(await run.ended()) == (RunState.FAILED, ExitReason.ERROR, "first")
    assert run.executor.keys == []


class _Broken:
    """A reader that breaks after its first item, when it is told to."""

    def __init__(self) -> None:
        self._items = [(0, "a")]
        self.breaks = asyncio.Event()

    async def next(self, count: int) -> Pulled:
        """Give the item, then raise."""
        del count
        if not self._items:
            await self.breaks.wait()
            raise OSError("the disk is gone")
        return Pulled([self._items.pop()], is_exhausted=False)

    async def close(self) -> None:
        """Let nothing go."""


async def test_error_of_the_source_ends_the_run() -> None:
    """S-MR-123: what runs is stopped; the caller gets the error as it is."""
    reader = _Broken()
    run = Conducting(team(), reader=reader)
    await run.started("map-0")
    reader.breaks.set()
    await until(lambda: run.executor.stopped)
    assert run.executor.stopped == ["map-0#0"]
    run.stopped("map-0")
    ended = await run.ended()
    assert ending(ended) == (RunState.FAILED, ExitReason.ERROR, "source")
    assert isinstance(ended.cause, OSError)
    assert run.watch.failed_items == []


# Factories.


def _odd(item: object) -> Task:
    """Make tasks of all items but the one with number 1."""
    if item == 1:
        raise LookupError("no such thing")
    return map_task(item)


async def test_factory_that_raises_fails_its_item(caplog: pytest.LogCaptureFixture) -> None:
    """S-MR-154: where items may fail."""
    run = Conducting(team(3, map_task=_odd, on_item_error="skip"), count=3)
    await run.started("map-0", "map-2")
    ended = await run.play()
    assert ended.ending.state is RunState.COMPLETED
    assert run.watch.failed_items == [(1, 1, "no such thing", 0)]
    assert [failure.task_description for failure in ended.failures] == ["Item 1"]
    assert "map-1 failed and is left out: no such thing" in caplog.text


async def test_factory_that_raises_ends_the_run() -> None:
    """S-MR-106: nothing of its batch starts; the caller gets the error as it is."""
    run = Conducting(team(3, map_task=_odd), count=3)
    ended = await run.ended()
    assert ending(ended) == (RunState.FAILED, ExitReason.ERROR, "source")
    assert isinstance(ended.cause, LookupError)
    assert run.executor.keys == []


async def test_reduce_factory_that_raises_ends_the_run() -> None:
    """S-MR-106: what runs beside it is stopped."""

    def reduce_task(chunk: Sequence[Task]) -> Task:
        raise LookupError(f"{len(chunk)} are too many")

    run = Conducting(team(4, reduce_task=reduce_task, mode="pipelined"), count=4)
    await run.started("map-0", "map-1", "map-2", "map-3")
    run.complete("map-0", "map-1", "map-2")
    await until(lambda: run.executor.stopped)
    run.stopped("map-3")
    ended = await run.ended()
    assert ended.ending.failure == "source"
    assert str(ended.cause) == "2 are too many"


async def test_task_that_cannot_be_done_ends_the_run() -> None:
    """S-SET-38: an executor says so when it has the order; it is no failure of the item."""
    run = Conducting(team(2), count=2)
    await run.started("map-0", "map-1")
    wrong = ValidationError("Tool 'x' cannot be pickled")
    run.fail("map-0", wrong)
    await until(lambda: run.executor.stopped)
    run.stopped("map-1")
    ended = await run.ended()
    assert (ended.cause, ended.ending.failure) == (wrong, "source")


async def test_agents_that_nobody_can_pay_for_end_the_run_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """S-BUD-4: who makes agents asks a model, too."""

    async def spent(*_: object) -> list[Task]:
        raise BudgetExhaustedError("9 of 10 tokens are spent")

    monkeypatch.setattr(TaskMaker, "ready", spent)
    run = Conducting(team(2), count=2)
    ended = await run.ended()
    assert ending(ended) == (RunState.BUDGET_EXHAUSTED, ExitReason.BUDGET_EXHAUSTED, "")
    assert ended.warning == "9 of 10 tokens are spent"


# Groups.


async def test_group_is_on_record_before_its_reduce() -> None:
    """S-MR-161, S-MR-113: with the keys of its inputs in their order."""
    run = Conducting(team(4), count=4)
    await run.started("map-0", "map-1", "map-2", "map-3")
    run.complete("map-3", "map-2", "map-1", "map-0")
    await run.started("reduce-1-0", "reduce-1-1")
    assert run.executor.recorded["reduce-1-0"][-1].startswith("group reduce-1-")
    assert "group reduce-1-0#0" in run.executor.recorded["reduce-1-0"]
    run.complete("reduce-1-0", "reduce-1-1")
    await run.started("final-reduce")
    order = run.order("final-reduce")
    assert [each.raw for each in order.context] == ["output of reduce-1-0", "output of reduce-1-1"]
    groups = [fact.data.inputs for fact in run.journal.facts() if isinstance(fact.data, GroupRecorded)]
    assert sorted(map(str, groups)) == [
        "['map-0', 'map-1']",
        "['map-2', 'map-3']",
        "['reduce-1-0', 'reduce-1-1']",
    ]
    ended = await run.play()
    assert ended.ending.state is RunState.COMPLETED


async def test_failed_reduce_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """S-MR-104: where the run goes on after failures."""
    run = Conducting(team(4, parallel_error_strategy="continue_on_error"), count=4)
    await run.started("map-0", "map-1", "map-2", "map-3")
    run.complete("map-0", "map-1", "map-2", "map-3")
    await run.started("reduce-1-0", "reduce-1-1")
    run.fail("reduce-1-0", RuntimeError("no"))
    run.complete("reduce-1-1")
    await run.started("final-reduce")
    assert [each.raw for each in run.order("final-reduce").context] == ["output of reduce-1-1"]
    assert "reduce-1-0 failed and is left out: no" in caplog.text
    assert (await run.play()).failed_maps == 0


async def test_output_that_is_too_large_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """S-MR-71: it has a group of its own."""
    run = Conducting(team(3, target_token_budget=10), count=3)
    await run.started("map-0", "map-1", "map-2")
    run.complete("map-0", tokens=11)
    run.complete("map-1", "map-2", tokens=5)
    await run.play(tokens=1)
    assert "An output of 'Worker' (map-0) has 11 tokens, more than the budget of 10" in caplog.text


# Token counts.


async def test_estimator_is_asked_where_the_provider_counted_nothing() -> None:
    """S-MR-60: in a thread, one call at a time; groups follow what it says."""
    asked: list[str] = []

    def tokens(text: str) -> int:
        assert threading.current_thread() is not threading.main_thread()
        asked.append(text)
        return 6

    run = Conducting(team(2, target_token_budget=10, token_estimator=tokens), count=2)
    await run.started("map-0", "map-1")
    run.complete("map-0", "map-1")
    await run.started("reduce-1-0", "reduce-1-1")
    assert sorted(asked) == ["output of map-0", "output of map-1"]


async def test_estimator_that_raises_ends_the_run() -> None:
    """S-MR-106: the output stays, whatever becomes of the run."""

    def tokens(text: str) -> int:
        raise LookupError(text)

    run = Conducting(team(2, target_token_budget=10, token_estimator=tokens), count=2)
    await run.started("map-0", "map-1")
    run.complete("map-0")
    await until(lambda: run.executor.stopped)
    run.stopped("map-1")
    ended = await run.ended()
    assert (ended.ending.failure, str(ended.cause)) == ("source", "output of map-0")
    assert run.store.has(0, 0)


async def test_run_that_is_cancelled_waits_for_no_estimator() -> None:
    """S-SET-27: a work whose tokens are being counted is done."""
    is_asked, go_on = threading.Event(), threading.Event()

    def tokens(text: str) -> int:
        is_asked.set()
        assert go_on.wait(60)
        return len(text)

    run = Conducting(team(1, target_token_budget=10, token_estimator=tokens), count=1)
    await run.started("map-0")
    run.complete("map-0")
    await until(is_asked.is_set)
    run.coordinator.cancel()
    try:
        assert (await run.ended()).ending.state is RunState.CANCELLED
    finally:
        go_on.set()
    assert run.executor.stopped == []
