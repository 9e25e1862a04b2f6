"""The conductor of a map-reduce run: every path between its machine, its factories, its items and its executor."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Sequence

import pytest

from ensemble_ray import Task
from ensemble_ray.coordinator.map_reduce.ports import FedEnded
from ensemble_ray.coordinator.map_reduce.ready_tasks import TaskMaker
from ensemble_ray.errors import BudgetExhaustedError, RecordError, StaleEpochError, ValidationError
from ensemble_ray.ids import instance_of
from ensemble_ray.items.pulling import Pulled, RefusedItem
from ensemble_ray.messages import Fact
from ensemble_ray.outputs import ExitReason, RunState
from ensemble_ray.record.map_reduce_data import group_fact, item_digest, items_fact
from tests.ensemble_ray.fed.conducting import Conducting, RefusingJournal, map_task, team, until
from tests.ensemble_ray.fed.outputs import output


def ending(ended: FedEnded) -> tuple[RunState, ExitReason, str]:
    """Return how it ended, in three words."""
    return ended.ending.state, ended.ending.exit_reason, ended.ending.failure


class Provider:
    """Errors as the package of a provider raises them."""

    refused = type("AuthenticationError", (Exception,), {"__module__": "openai"})


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
    groups = [fact.data["inputs"] for fact in run.journal.facts() if fact.kind == "group"]
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
    assert run.bodies.has(0, 0)


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


# Ends.


async def test_cancelled_run_ends_when_its_tasks_have_stopped() -> None:
    """S-SET-27: nothing starts any more."""
    run = Conducting(team(5), count=5, window=2)
    await run.started("map-0", "map-1")
    run.coordinator.cancel()
    await until(lambda: run.executor.stopped)
    assert run.executor.stopped == ["map-0#0", "map-1#0"]
    assert not run.end.done()
    run.complete("map-0")
    run.stopped("map-1")
    ended = await run.ended()
    assert ending(ended) == (RunState.CANCELLED, ExitReason.CANCELLED, "")
    assert run.executor.keys == ["map-0", "map-1"]
    assert run.bodies.has(0, 0)


async def test_run_never_begins_when_it_is_cancelled_before() -> None:
    """S-SET-27."""
    run = Conducting(team())
    run.coordinator.cancel()
    assert (await run.ended()).ending.state is RunState.CANCELLED
    assert run.executor.keys == []


async def test_task_that_is_being_made_counts_as_stopped() -> None:
    """S-SET-27: a run that ends waits for no factory."""
    is_asked, go_on = threading.Event(), threading.Event()

    def slow(item: object) -> Task:
        is_asked.set()
        assert go_on.wait(60)
        return map_task(item)

    run = Conducting(team(2, map_task=slow), count=2)
    await until(is_asked.is_set)
    run.coordinator.cancel()
    try:
        assert (await run.ended()).ending.state is RunState.CANCELLED
    finally:
        go_on.set()
    assert run.executor.keys == []


async def test_first_failure_stops_what_runs() -> None:
    """S-MR-100: where no item may fail; a task whose output comes all the same keeps it."""
    run = Conducting(team(3), count=3)
    await run.started("map-0", "map-1", "map-2")
    run.fail("map-1", RuntimeError("no"), attempts=3)
    await until(lambda: len(run.executor.stopped) == 2)
    assert run.executor.stopped == ["map-0#0", "map-2#0"]
    run.stopped("map-2")
    run.complete("map-0")
    ended = await run.ended()
    assert ending(ended) == (RunState.FAILED, ExitReason.ERROR, "first")
    assert [(each.task_description, each.attempts, str(each.error)) for each in ended.failures] == [("map 1", 3, "no")]
    assert run.watch.failed_items == [(1, 1, "no", 3)]


async def test_run_fails_when_all_maps_failed() -> None:
    """S-MR-101: each is told of."""
    run = Conducting(team(2, on_item_error="collect"), count=2)
    await run.started("map-0", "map-1")
    run.fail("map-0", RuntimeError("no"))
    run.fail("map-1", RuntimeError("no"))
    ended = await run.ended()
    assert (ended.ending.failure, ended.failed_maps) == ("all_maps", 2)


async def test_early_exit_lets_what_runs_finish() -> None:
    """S-PAR-30: nothing more starts, nothing is stopped."""
    run = Conducting(team(5), count=5, window=2)
    await run.started("map-0", "map-1")
    run.exit("map-0", ExitReason.USER_EXIT_EARLY)
    run.complete("map-1")
    ended = await run.ended()
    assert ending(ended) == (RunState.COMPLETED, ExitReason.USER_EXIT_EARLY, "")
    assert (run.executor.keys, run.executor.stopped) == (["map-0", "map-1"], [])


async def test_spent_budget_ends_the_run_early() -> None:
    """S-BUD-4, S-BUD-6: with what was spent."""
    run = Conducting(team(2), count=2)
    await run.started("map-0", "map-1")
    run.exit("map-0", ExitReason.BUDGET_EXHAUSTED, BudgetExhaustedError("9 of 10 tokens are spent"))
    run.complete("map-1")
    ended = await run.ended()
    assert ending(ended) == (RunState.BUDGET_EXHAUSTED, ExitReason.BUDGET_EXHAUSTED, "")
    assert ended.warning == "9 of 10 tokens are spent"


async def test_refusal_ends_the_run_though_items_may_fail() -> None:
    """S-MR-155: every other call of that model would be refused too."""
    run = Conducting(team(2, on_item_error="collect"), count=2)
    await run.started("map-0", "map-1")
    run.fail("map-0", Provider.refused("wrong key"))
    await until(lambda: run.executor.stopped)
    run.stopped("map-1")
    ended = await run.ended()
    assert ended.ending.failure == "source"
    assert ended.refusal is not None
    assert (ended.refusal.task_description, str(ended.refusal.error)) == ("map 0", "wrong key")
    assert run.watch.failed_items == []


async def test_late_result_changes_nothing() -> None:
    """S-PAR-12: the first one counts."""
    run = Conducting(team(2), count=2)
    await run.started("map-0", "map-1")
    run.complete("map-0")
    run.fail("map-0", RuntimeError("late"))
    run.complete("map-1")
    assert (await run.play()).ending.state is RunState.COMPLETED
    assert run.watch.failed_items == []


# What breaks around a run.


@pytest.mark.parametrize("error", [RecordError("The disk is full"), StaleEpochError("run", "map-0", 0, 10)])
async def test_run_breaks_off_when_a_task_could_not_write_its_facts(error: Exception) -> None:
    """S-DUR-8, S-DUR-17: it has not failed, and can be gone on with."""
    run = Conducting(team(2, on_item_error="collect"), count=2)
    await run.started("map-0", "map-1")
    run.fail("map-0", error)
    with pytest.raises(type(error)):
        await run.ended()
    assert run.watch.failed_items == []


@pytest.mark.parametrize("kind", ["items", "group", "agents"])
async def test_run_breaks_off_when_its_own_facts_cannot_be_written(kind: str) -> None:
    """S-DUR-8: nothing starts that is not on record."""
    journal = RefusingJournal(kind, RecordError("The disk is full"))
    run = Conducting(team(2), count=2, journal=journal)
    if kind == "group":
        await run.started("map-0", "map-1")
        run.complete("map-0", "map-1")
    with pytest.raises(RecordError, match="The disk is full"):
        await run.ended()
    assert run.executor.keys == (["map-0", "map-1"] if kind == "group" else [])


async def test_run_breaks_off_when_its_executor_is_gone() -> None:
    """S-DUR-32: such as a cluster."""
    run = Conducting(team(2), count=2)
    await run.started("map-0")
    run.executor.failed.set_exception(ConnectionError("the cluster is gone"))
    with pytest.raises(ConnectionError):
        await run.ended()


async def test_run_breaks_off_when_a_result_cannot_be_kept() -> None:
    """S-MR-132: nobody else would tell of a full disk."""
    run = Conducting(team(2), count=2)
    await run.started("map-0", "map-1")
    run.watch.error = OSError("no space left")
    run.complete("map-0")
    with pytest.raises(OSError, match="no space left"):
        await run.ended()


# Runs that go on.


def _recorded_output(key: str) -> Fact:
    data = output(f"recorded {key}").model_dump(mode="json")
    return Fact(run="run", kind="output", name=instance_of(key), at=1.0, data={"output": data})


def _recorded_failure(key: str) -> Fact:
    data = {"error_type": "RuntimeError", "message": "no", "error": {"type": "RuntimeError", "text": "no"}}
    return Fact(run="run", kind="task_failed", name=instance_of(key), at=1.0, data={**data, "attempts": 2})


def _recorded_items(count: int) -> Fact:
    digests = [item_digest(number) for number in range(count)]
    return items_fact("run", 1.0, indices=range(count), digests=digests, are_all=True)


async def test_recorded_outputs_are_not_made_again() -> None:
    """S-MR-161: nor are the facts of their items and groups; the rest is done."""
    group = group_fact("run", 1.0, key="reduce-1-0", level=1, number=0, inputs=["map-1", "map-0"])
    facts = [_recorded_items(4), *map(_recorded_output, ("map-0", "map-1")), group]
    run = Conducting(team(4), count=4, facts=facts)
    await run.started("map-2", "map-3")
    assert run.executor.keys == ["map-2", "map-3"]
    assert run.watch.completed_items == [(0, 0, "recorded map-0"), (1, 1, "recorded map-1")]
    assert "items run" not in run.facts
    run.complete("map-2", "map-3")
    await run.started("reduce-1-0")
    assert [each.raw for each in run.order("reduce-1-0").context] == ["recorded map-1", "recorded map-0"]
    assert (await run.play()).ending.state is RunState.COMPLETED


async def test_recorded_reduce_is_not_made_again() -> None:
    """S-MR-161."""
    group = group_fact("run", 1.0, key="reduce-1-0", level=1, number=0, inputs=["map-0", "map-1"])
    outputs = map(_recorded_output, ("map-0", "map-1", "map-2", "map-3", "reduce-1-0"))
    run = Conducting(team(4), count=4, facts=[_recorded_items(4), group, *outputs])
    await run.started("reduce-1-1")
    run.complete("reduce-1-1")
    await run.started("final-reduce")
    assert run.executor.keys == ["reduce-1-1", "final-reduce"]
    assert [each.raw for each in run.order("final-reduce").context] == ["recorded reduce-1-0", "output of reduce-1-1"]


async def test_recorded_failures_are_not_done_again(caplog: pytest.LogCaptureFixture) -> None:
    """S-MR-162: they are told of again, with their attempts."""
    facts = [_recorded_items(2), _recorded_failure("map-0")]
    run = Conducting(team(2, on_item_error="collect"), count=2, facts=facts)
    with caplog.at_level(logging.WARNING):
        await run.started("map-1")
    assert run.watch.failed_items == [(0, 0, "no", 2)]
    ended = await run.play()
    assert (ended.ending.state, ended.failed_maps) == (RunState.COMPLETED, 1)
    assert run.executor.keys == ["map-1", "final-reduce"]


async def test_other_items_than_the_recorded_ones_end_the_run() -> None:
    """S-MR-162: nothing starts."""
    run = Conducting(team(3), count=3, facts=[_recorded_items(2)])
    ended = await run.ended()
    assert isinstance(ended.cause, ValidationError)
    assert run.executor.keys == []


async def test_many_tasks_are_started_in_one_batch() -> None:
    """S-MR-143: factories are called for 64 items at a time, and what comes of them is handed out together."""
    run = Conducting(team(64), count=64, window=64)
    await until(lambda: len(run.executor.started) == 64)
    assert run.executor.batches == [64]
    run.end.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run.end
