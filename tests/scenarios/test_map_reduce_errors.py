"""Map-reduces in which something fails: items, reduces, factories, sources, files; and what is left of them then."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import (
    DeadLetters,
    ParallelExecutionError,
    RecordError,
    RetryPolicy,
    RunState,
    Runtime,
    Task,
    TaskExecutionError,
    TaskStartEvent,
    ValidationError,
    resume,
)
from ensemble_ray.errors import message_of
from ensemble_ray.facts.runs import RunEnded
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.record.opening import store_at
from ensemble_ray.record.runs import RunDirectory
from ensemble_ray.record.stores import StoreAddress
from ensemble_ray.record.view.map_reduce import MapReduceView
from ensemble_ray.testing import ScriptedModel
from tests.scenarios.mapping import (
    Calls,
    answer,
    asked_of,
    counts,
    failing,
    map_task,
    mapping,
    model,
    raising,
    raws,
    team,
    trace_of,
)
from tests.scenarios.teams import Watcher, task_of


def rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# Items.


def test_first_failed_map_ends_the_run() -> None:
    """S-MR-100, S-MR-150: no reduce runs; what was completed is there."""
    llm = failing("map 3 ")
    with pytest.raises(TaskExecutionError, match="Task 'map 3' failed: ") as caught:
        team(6, llm=llm, max_parallel_tasks=1).run(runtime="inline")
    assert asked_of(llm) == ["map 0", "map 1", "map 2", "map 3"]
    assert [each.raw for each in caught.value.completed_task_outputs] == ["0", "1", "2"]
    assert caught.value.trace is not None
    assert [each.task_description for each in caught.value.trace.task_traces][-1] == "map 3"


@pytest.mark.parametrize(
    ("fields", "collected"),
    [
        ({"parallel_error_strategy": "continue_on_error"}, True),
        ({"on_item_error": "collect"}, True),
        ({"on_item_error": "skip"}, False),
    ],
)
def test_survivors_go_on(fields: dict[str, Any], caplog: pytest.LogCaptureFixture, *, collected: bool) -> None:
    """S-MR-101, S-MR-105, S-MR-150: with a WARN, in item order; the failed one's trace stays in its place."""
    with caplog.at_level(logging.WARNING, "ensemble_ray"):
        output = team(6, llm=failing("map 3 "), **fields).run(runtime="inline")
    assert raws(output)[5:] == ["(0+1+2)", "(4+5)", "((0+1+2)+(4+5))"]
    assert sum("map-3 failed and is left out" in each.getMessage() for each in caplog.records) == 1
    trace = trace_of(output)
    assert [each.task_description for each in trace.task_traces][:6] == [f"map {n}" for n in range(6)]
    assert (counts(output), trace.task_traces[3].final_output) == ([6, 2, 1], "")
    within = trace.task_traces[:6]
    assert trace.map_reduce_levels[0].duration == max(each.completed_at for each in within) - min(
        each.started_at for each in within
    )
    found = [(each.index, each.item, each.error_type, each.attempts) for each in output.failed_items]
    assert found == ([(3, 3, "AgentExecutionError", 1)] if collected else [])


def test_failed_items_are_in_item_order() -> None:
    """S-MR-150, S-MR-152: whichever failed first; attempts are the requests of the last call."""
    retry = RetryPolicy(max_attempts=3, first_delay=timedelta(milliseconds=1))
    output = team(6, llm=failing("map 4 ", "map 1 ", error=ConnectionError), on_item_error="collect", retry=retry)
    failed = output.run(runtime="inline").failed_items
    assert [(each.index, each.attempts) for each in failed] == [(1, 3), (4, 3)]


@pytest.mark.parametrize("policy", ["skip", "collect"])
def test_run_fails_when_all_maps_do(policy: str) -> None:
    """S-MR-102, S-MR-150: no reduce runs; all causes are there."""
    llm = failing("map")
    with pytest.raises(ParallelExecutionError, match="6 of 6 tasks failed") as caught:
        team(6, llm=llm, on_item_error=policy).run(runtime="inline")
    assert sorted(caught.value.failed_task_causes) == [f"map {n}" for n in range(6)]
    assert len(llm.calls) == 6


def test_failed_map_in_static_mode_that_is_fed_is_left_out() -> None:
    """S-MR-114: no plan names its reduce."""
    output = team(items=iter(range(6)), chunk_size=3, llm=failing("map 3 "), on_item_error="skip").run(runtime="inline")
    assert raws(output)[5:] == ["(0+1+2)", "(4+5)", "((0+1+2)+(4+5))"]


def test_failed_reduce_ends_the_run() -> None:
    """S-MR-104: under fail_fast the first one."""
    with pytest.raises(TaskExecutionError, match=r"Task 'reduce 0\+1\+2' failed: "):
        team(6, llm=failing("reduce 0"), max_parallel_tasks=1).run(runtime="inline")


def test_reduces_that_are_left_go_on() -> None:
    """S-MR-104: like surviving maps, as long as there is one."""
    fields = {"parallel_error_strategy": "continue_on_error"}
    output = team(6, llm=failing("reduce 0+1+2 "), **fields).run(runtime="inline")
    assert raws(output)[6:] == ["(3+4+5)", "((3+4+5))"]
    with pytest.raises(ParallelExecutionError, match="2 of 2 tasks failed") as caught:
        team(6, llm=failing("reduce"), **fields).run(runtime="inline")
    assert sorted(caught.value.failed_task_causes) == ["reduce 0+1+2", "reduce 3+4+5"]


def test_error_of_a_reduce_is_told_after_many_failed_maps() -> None:
    """S-MR-104: however many maps were left out before."""

    async def entry(asked: Any) -> object:
        kind, _, rest = task_of(asked).partition(" ")
        return ValueError("no") if kind == "reduce" or int(rest) < 120 else answer(asked)

    ensemble = team(124, llm=ScriptedModel(otherwise=entry), parallel_error_strategy="continue_on_error")
    with pytest.raises(ParallelExecutionError, match="2 of 2 tasks failed") as caught:
        ensemble.run(runtime="inline")
    assert all(each.startswith("reduce") for each in caught.value.failed_task_causes)


def test_dead_letters_can_be_mapped_again(tmp_path: Path) -> None:
    """S-MR-126, S-MR-151, S-MR-153: one line each; only those items, under their keys; reduces see only them."""
    path = tmp_path / "dead.jsonl"
    team(6, llm=failing("map 3 ", "map 1 "), on_item_error="skip", dead_letters=path).run(runtime="inline", run_id="a")
    assert sorted((row["index"], row["item"], row["run_id"], row["attempts"]) for row in rows(path)) == [
        (1, 1, "a", 1), (3, 3, "a", 1),
    ]  # fmt: skip
    watcher = Watcher()
    again = team(items=DeadLetters(path), listeners=[watcher]).run(runtime="inline")
    assert sorted(raws(again)[:2]) == ["1", "3"]
    assert len(again.task_outputs) == 3
    assert {each.instance for each in watcher.of(TaskStartEvent)} == {"map-1#0", "map-3#0", "final-reduce#0"}


def test_dead_letters_are_written_by_a_run_that_fails(tmp_path: Path) -> None:
    """S-MR-151: with `fail` too; items that JSON cannot carry as their text, and no item twice after a resume."""
    path = tmp_path / "dead.jsonl"
    items = [1, threading.Lock(), 2]
    ensemble = team(
        items=items,
        map_task=lambda item: Task.of("map lock" if not isinstance(item, int) else f"map {item}"),
        llm=failing("map lock "),
        on_item_error="fail",
        dead_letters=path,
    )
    with pytest.raises(TaskExecutionError):
        ensemble.run(runtime="inline", run_id="locked")
    with pytest.raises(TaskExecutionError):
        resume("locked", ensemble, runtime="inline")
    (row,) = rows(path)
    assert (row["index"], row["is_text"]) == (1, True)
    assert "lock" in row["item"]


def test_failed_item_that_cannot_be_pickled_is_told_as_text() -> None:
    """S-MR-150: nothing is lost with it."""
    output = team(items=[threading.Lock(), 1], map_task=_named, llm=failing("map lock "), on_item_error="collect")
    (failed,) = output.run(runtime="inline").failed_items
    assert "lock" in str(failed.item)


def _named(item: object) -> Task:
    return Task.of(f"map {item}" if isinstance(item, int) else "map lock")


def test_bad_line_is_a_failed_item_without_attempts(tmp_path: Path) -> None:
    """S-MR-125, S-MR-152: the file and the line are named; it is dealt with as every failed item."""
    path = tmp_path / "items.jsonl"
    path.write_text('1\n{"broken\n2\n', encoding="utf-8")
    output = mapping(str(path), on_item_error="collect").run(runtime="inline")
    (failed,) = output.failed_items
    assert (failed.index, failed.error_type, failed.attempts) == (1, "ValidationError", 0)
    assert f"{path}', line 2" in failed.message
    with pytest.raises(TaskExecutionError) as caught:
        mapping(str(path)).run(runtime="inline")
    assert isinstance(caught.value.__cause__, ValidationError)


# Factories and estimators.


async def _async_error(*_: object) -> object:
    await asyncio.sleep(0)
    raise KeyError("async")


async def _async_cancelled(*_: object) -> object:
    raise asyncio.CancelledError


@pytest.mark.parametrize("factory", ["map_task", "reduce_task", "direct_task", "input_estimator", "token_estimator"])
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (KeyError("mine"), KeyError),
        (SystemExit(3), SystemExit),
        (StopIteration(), RuntimeError),
        (asyncio.CancelledError(), RuntimeError),
        (GeneratorExit(), RuntimeError),
    ],
)
def test_what_user_code_raises_ends_the_run(factory: str, raised: BaseException, expected: type[BaseException]) -> None:
    """S-MR-106: unchanged, but for what would cancel the caller; and never a run that waits for ever."""
    fields: dict[str, Any] = {factory: raising(raised), "llm": ScriptedModel(otherwise="text")}
    if factory == "input_estimator":
        fields["direct_task"] = map_task
    with pytest.raises(expected) as caught:
        team(6, **fields).run(runtime="inline")
    assert caught.value is raised or expected is RuntimeError


@pytest.mark.parametrize("factory", ["map_task", "reduce_task"])
@pytest.mark.parametrize(("made", "expected"), [(_async_error, KeyError), (_async_cancelled, RuntimeError)])
def test_what_async_factories_raise_ends_the_run(factory: str, made: Any, expected: type[BaseException]) -> None:
    """S-MR-106, S-MR-143: as what others raise."""
    with pytest.raises(expected):
        team(6, **{factory: made}).run(runtime="inline")


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"map_task": lambda _: None}, "map_task must return a Task, got: None"),
        ({"reduce_task": lambda _: None}, "reduce_task must return a Task, got: None"),
        ({"map_agent": lambda _: None, "map_task": lambda *_: None}, "map_agent must return an Agent, got: None"),
        ({"llm": None}, "Task 'map 0' has no LLM available"),
        ({"llm": ScriptedModel(otherwise="x"), "token_estimator": lambda _: "many"}, "token_estimator must return"),
        ({"direct_task": map_task, "input_estimator": lambda _: None}, "input_estimator must return a str"),
    ],
)
def test_what_user_code_gives_is_checked(fields: dict[str, Any], told: str) -> None:
    """S-MR-106, S-SET-38: as it is made; the factory or the task is named."""
    with pytest.raises(ValidationError, match=told):
        team(6, **fields).run(runtime="inline")


def test_nothing_more_is_made_after_a_factory_failed() -> None:
    """S-MR-106, S-MR-143: also not by a thread that is left to itself."""
    made = Calls(lambda item: map_task(item) if item < 3 else 1 / 0)
    with pytest.raises(ZeroDivisionError):
        team(60, map_task=made).run(runtime="inline")
    assert [item for (item,) in made.arguments] == [0, 1, 2, 3]


async def _async_map(item: int) -> Task:
    return _map_but_three(item)


def _map_but_three(item: int) -> Task:
    return map_task(item) if item != 3 else Task.of({}["three"])


@pytest.mark.parametrize("factory", [_map_but_three, _async_map])
@pytest.mark.parametrize("policy", ["collect", "skip"])
def test_factory_that_raises_fails_its_item_alone(runtime: Runtime, factory: Any, policy: Any, tmp_path: Path) -> None:
    """S-MR-154: with its index, in the output under "collect" and in the dead letters; the others are asked."""
    llm, dead = model(), tmp_path / "dead.jsonl"
    ensemble = team(6, map_task=factory, llm=llm, on_item_error=policy, dead_letters=dead)
    output = ensemble.run(runtime=runtime)
    assert counts(output)[0] == 5
    told = [(each.index, each.error_type, each.message, each.attempts) for each in output.failed_items]
    assert told == ([(3, "KeyError", "'three'", 0)] if policy == "collect" else [])
    assert [(row["index"], row["error_type"]) for row in rows(dead)] == [(3, "KeyError")]


def test_factory_that_raises_for_every_item_fails_the_run() -> None:
    """S-MR-154, S-MR-102: every cause is named by the item's index."""
    with pytest.raises(ParallelExecutionError) as caught:
        mapping(iter(range(3)), map_task=raising(KeyError("mine")), on_item_error="collect").run(runtime="inline")
    assert set(caught.value.failed_task_causes) == {"Item 0", "Item 1", "Item 2"}
    assert all(isinstance(cause, KeyError) for cause in caught.value.failed_task_causes.values())


def test_resumed_run_calls_a_factory_that_failed_again() -> None:
    """S-MR-154: only the item that is missing is asked for."""
    llm = model()
    fields: dict[str, Any] = {"llm": llm, "on_item_error": "collect", "max_parallel_tasks": 1}
    first = team(items=broken(5), map_task=_map_but_three, **fields)
    with pytest.raises(KeyError, match="source"):
        first.run(runtime="inline", run_id="made")
    output = resume("made", team(items=iter(range(6)), **fields), runtime="inline", allow_changes=True)
    assert counts(output)[0] == 6
    assert not output.failed_items
    assert sorted(filter(lambda asked: asked.startswith("map"), asked_of(llm))) == [f"map {item}" for item in range(6)]


def test_same_task_may_stand_for_all_items() -> None:
    """S-MR-41: a factory need not make a new one each time."""
    same = map_task("same")
    assert raws(team(4, map_task=lambda _: same).run(runtime="inline"))[:4] == ["same"] * 4


# Sources and files.


def broken(count: int) -> Iterator[int]:
    """Some items, then an error."""
    yield from range(count)
    raise KeyError("source")


def test_error_of_the_source_ends_the_run_which_can_go_on(home: str) -> None:
    """S-MR-123, S-MR-163: unchanged; what was done is recorded and not asked again."""
    llm = model()
    with pytest.raises(KeyError, match="source") as caught:
        team(items=broken(3), llm=llm, max_parallel_tasks=1).run(runtime="inline", run_id="source")
    assert vars(caught.value)["run_id"] == "source"
    assert recorded_errors(home, "source") == [("KeyError", "'source'")]
    assert RunDirectory(Path(home), "source").state() is RunState.FAILED
    output = resume("source", team(items=iter(range(6)), llm=llm), runtime="inline")
    assert counts(output) == [6, 2, 1]
    assert len(llm.calls) == 9


def recorded_errors(home: str, run_id: str) -> list[tuple[str, str]]:
    """The errors of a run's recorded end."""
    facts = run_blocking(store_at(StoreAddress.of(Path(home))).facts(run_id))
    return [
        (each.error_type, each.message)
        for fact in facts
        if isinstance(fact.data, RunEnded)
        for each in fact.data.errors
    ]


@pytest.mark.parametrize("raised", [KeyError("mine"), SystemExit(3)])
@pytest.mark.parametrize("factory", ["map_task", "reduce_task", "direct_task", "input_estimator", "token_estimator"])
def test_what_user_code_raises_is_on_record_and_names_the_run(factory: str, raised: BaseException, home: str) -> None:
    """S-ERR-49, S-ERR-50: also where no task had begun; `trace` shows it."""
    fields: dict[str, Any] = {factory: raising(raised), "llm": ScriptedModel(otherwise="text")}
    if factory == "input_estimator":
        fields["direct_task"] = map_task
    with pytest.raises(type(raised)) as caught:
        team(6, **fields).run(runtime="inline", run_id="raised")
    assert vars(caught.value)["run_id"] == "raised"
    told = (type(raised).__name__, message_of(raised))
    assert recorded_errors(home, "raised") == [told]
    view = MapReduceView("raised")
    view.apply(run_blocking(store_at(StoreAddress.of(Path(home))).facts("raised")))
    assert [row.title for row in view.rows() if row.kind == "error"] == [": ".join(told)]
    assert view.data()["error"] == ": ".join(told)


@pytest.mark.parametrize("items", [iter(()), range(0), []])
def test_source_that_is_empty_is_refused(items: Any) -> None:
    """S-MR-122, S-MR-10: before any model call; a list at construction."""
    llm = model()
    with pytest.raises(ValidationError, match="items must not be None or empty"):
        team(items=items, llm=llm).run(runtime="inline")
    assert not llm.calls


def test_iterator_is_run_over_once() -> None:
    """S-MR-124: the second run says why."""
    ensemble = mapping(iter(range(3)))
    ensemble.run(runtime="inline")
    with pytest.raises(ValidationError, match=r"^items is an iterator that an earlier run has consumed"):
        ensemble.run(runtime="inline")


@pytest.mark.parametrize("file", ["results", "dead_letters"])
def test_file_that_cannot_be_written_ends_the_run(file: str, tmp_path: Path, home: str) -> None:
    """S-MR-130, S-MR-151: the file is named; the run can be resumed with another one."""
    full = tmp_path / "full.jsonl"
    full.symlink_to("/dev/full")
    llm = failing("map 3 ")
    with pytest.raises(RecordError, match=f"'{full}' cannot be written") as caught:
        team(6, llm=llm, on_item_error="skip", **{file: full}).run(runtime="inline", run_id="full")
    assert caught.value.run_id == "full"
    assert RunDirectory(Path(home), "full").state() is RunState.INTERRUPTED
    output = resume("full", team(6, llm=llm, on_item_error="skip", **{file: tmp_path / "free.jsonl"}), runtime="inline")
    assert counts(output) == [6, 2, 1]
    assert len(llm.calls) == 9
