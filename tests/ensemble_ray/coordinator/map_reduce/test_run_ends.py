"""The coordinator of a map-reduce: ends, what breaks around a run, and runs that go on from a record."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from ensemble_ray import ExitReason, RecordError, RunState, StaleEpochError, Task, ValidationError
from ensemble_ray.errors import BudgetExhaustedError
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.facts.runs import GroupRecorded
from ensemble_ray.record.identity.definition import item_digest
from ensemble_ray.values.ids import instance_of
from tests.ensemble_ray.coordinator.map_reduce.outputs import output
from tests.ensemble_ray.coordinator.map_reduce.running import Conducting, RefusingJournal, ending, map_task, team, until
from tests.ensemble_ray.record.facts_of_dynamic_runs import items_fact


class Provider:
    """Errors as the package of a provider raises them."""

    refused = type("AuthenticationError", (Exception,), {"__module__": "openai"})


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
    assert run.store.has(0, 0)


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
    return read_fact(run="run", kind="output", name=instance_of(key), at=1.0, data={"output": data})


def _recorded_failure(key: str) -> Fact:
    data = {"error_type": "RuntimeError", "message": "no", "error": {"type": "RuntimeError", "text": "no"}}
    return read_fact(run="run", kind="task_failed", name=instance_of(key), at=1.0, data={**data, "attempts": 2})


def _recorded_items(count: int) -> Fact:
    digests = [item_digest(number) for number in range(count)]
    return items_fact("run", 1.0, indices=range(count), digests=digests, are_all=True)


def _recorded_group(*inputs: str) -> Fact:
    data = GroupRecorded(level=1, number=0, inputs=inputs, is_final=False)
    return Fact(run="run", name=instance_of("reduce-1-0"), at=1.0, data=data)


async def test_recorded_outputs_are_not_made_again() -> None:
    """S-MR-161: nor are the facts of their items and groups; the rest is done."""
    group = _recorded_group("map-1", "map-0")
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
    group = _recorded_group("map-0", "map-1")
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
