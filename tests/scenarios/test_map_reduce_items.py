"""Where items come from and where results go: sources, streams, files, back-pressure, pipelined order, what is kept."""

from __future__ import annotations

import asyncio
import csv
import itertools
import json
import pickle
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest
from pydantic import BaseModel

from ensemble_ray import (
    Agent,
    ChatResponse,
    EnsembleOutput,
    GuardrailResult,
    ItemResult,
    MapReduceEnsemble,
    MapReduceRun,
    Task,
    TaskCompleteEvent,
    TokenEvent,
    TokenUsage,
    ToolResult,
    ValidationError,
)
from ensemble_ray.testing import ScriptedCall, ScriptedModel
from tests.scenarios.mapping import (
    TOKENS,
    Calls,
    answer,
    answered,
    counts,
    map_task,
    mapping,
    model,
    raws,
    team,
    trace_of,
)
from tests.scenarios.teams import PATIENCE_S, Watcher, task_of, wait_for


async def coming(count: int) -> AsyncIterator[int]:
    """Items that come one by one."""
    for number in range(count):
        await asyncio.sleep(0)
        yield number


class Rows:
    """Looks like a Ray Dataset."""

    def iter_rows(self) -> Iterator[dict[str, int]]:
        """Rows."""
        yield from ({"n": number} for number in range(3))


# Sources.


@pytest.mark.parametrize(
    "items", [range(3), iter(range(3)), (n for n in range(3)), {0: 1, 1: 2, 2: 3}.keys(), coming(3)]
)
def test_items_come_from_anything_that_gives_them(items: Any) -> None:
    """S-MR-120: sequences, iterables, iterators, async ones."""
    assert raws(mapping(items).run(runtime="inline")) == ["0", "1", "2"]


def test_items_come_from_files_and_datasets(tmp_path: Path) -> None:
    """S-MR-120: JSON values, rows by the header's names; blank lines are no items."""
    lines, table = tmp_path / "items.jsonl", tmp_path / "items.csv"
    lines.write_text('"a"\n\n{"b": 1}\n', encoding="utf-8")
    with table.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["name", "n"], ["x", "1"], ["y", "2"]])
    assert raws(mapping(lines).run(runtime="inline")) == ["a", "{'b': 1}"]
    assert raws(mapping(str(table)).run(runtime="inline")) == ["{'name': 'x', 'n': '1'}", "{'name': 'y', 'n': '2'}"]
    assert raws(mapping(Rows()).run(runtime="inline")) == ["{'n': 0}", "{'n': 1}", "{'n': 2}"]


def test_items_come_from_tables_of_other_libraries(tmp_path: Path) -> None:
    """S-MR-200, S-MR-201: rows, which results have as JSON, also in the short form."""
    frame = pd.DataFrame(
        {"name": ["Ada", None], "age": [1.5, float("nan")], "born": [pd.Timestamp("1815-12-10"), pd.NaT]}
    )
    rows = tmp_path / "rows.jsonl"
    output = mapping(frame, results=rows, map_task=lambda row: map_task(row["name"])).run(runtime="inline")
    assert raws(output) == ["Ada", "None"]
    found = {row["index"]: row["item"] for row in map(json.loads, rows.read_text(encoding="utf-8").splitlines())}
    none = {"name": None, "age": None, "born": None}
    assert found == {0: {"name": "Ada", "age": 1.5, "born": "1815-12-10T00:00:00"}, 1: none}
    llm = ScriptedModel(otherwise="ok")
    MapReduceEnsemble.of(llm, frame["name"], "Greet", "Join", runtime="inline")
    assert sorted(task_of(call) for call in llm.calls) == ["Greet: Ada", "Greet: None", "Join"]


def test_rows_below_a_quote_that_is_never_closed_are_mapped(tmp_path: Path) -> None:
    """S-MR-197: the row is a failed item."""
    table = tmp_path / "items.csv"
    table.write_text('id,text\n1,a\n2,"b\n3,c\n', encoding="utf-8")
    output = mapping(table, on_item_error="collect", map_task=lambda row: map_task(row["id"])).run(runtime="inline")
    assert raws(output) == ["1", "3"]
    assert [(each.index, each.item, each.attempts) for each in output.failed_items] == [(1, '2,"b', 0)]
    assert "line 3, column 'text': the quote" in output.failed_items[0].message


def test_source_is_pulled_no_further_than_the_window() -> None:
    """S-MR-121, S-MR-140, S-SET-21: never two steps at the same time, in a thread of ours."""
    pulled: list[int] = []
    threads: set[str] = set()
    ahead: list[int] = []

    def source() -> Iterator[int]:
        for number in range(40):
            pulled.append(number)
            threads.add(threading.current_thread().name)
            yield number

    async def entry(asked: ScriptedCall) -> object:
        ahead.append(len(pulled) - len(ahead))
        await asyncio.sleep(0)
        return answer(asked)

    made = Calls(map_task)
    output = mapping(source(), llm=ScriptedModel(otherwise=entry), max_parallel_tasks=4, map_task=made)
    assert len(output.run(runtime="inline").task_outputs) == 40
    assert max(ahead) <= 4
    assert len(threads) == 1
    assert "loop" not in f"{threads}{made.threads}"


def test_async_factories_work_like_others() -> None:
    """S-MR-143: they are awaited."""

    async def making(item: object) -> Task:
        await asyncio.sleep(0)
        return map_task(item)

    assert counts(team(6, map_task=making).run(runtime="inline")) == [6, 2, 1]


@pytest.mark.parametrize("has_agents", [True, False])
def test_limits_of_processes_are_those_of_the_ensemble(*, has_agents: bool) -> None:
    """S-MR-141, S-MR-140: `max_concurrency` overrides the agents' own, and is that of agents that are made for tasks."""
    at_once: list[int] = []
    running = 0

    async def entry(asked: ScriptedCall) -> object:
        nonlocal running
        running += 1
        at_once.append(running)
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return answer(asked)

    llm = ScriptedModel(otherwise=entry)
    mapper = Agent(role="Mapper", goal="g", llm=llm, max_concurrency=9)
    given: dict[str, Any] = {"llm": llm}
    if has_agents:
        given = {"llm": None, "map_agent": lambda _: mapper, "map_task": lambda item, _: map_task(item)}
    mapping(range(20), **given, max_concurrency=2).run(runtime="inline")
    assert max(at_once) == 2


# Results.


def test_results_are_written_as_rows(tmp_path: Path) -> None:
    """S-MR-130: one per map; a value that JSON cannot carry is its text."""
    path = tmp_path / "results.jsonl"
    llm = ScriptedModel(otherwise=answered)
    items = ["a", {"b": 1}, _Opaque()]
    team(items=items, llm=llm, results=path).run(runtime="inline")
    rows = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda row: row["index"])
    assert [(row["index"], row["item"], row["raw"]) for row in rows] == [
        (0, "a", "a"), (1, {"b": 1}, "{'b': 1}"), (2, "opaque", "opaque"),
    ]  # fmt: skip
    assert {(row["agent_role"], row["input_tokens"], row["output_tokens"], row["parsed"]) for row in rows} == {
        ("Agent", 3, TOKENS, None)
    }
    assert all(row["duration"] >= 0 for row in rows)
    with pytest.raises(ValidationError, match="exists and has 3 rows"):
        team(items=items, llm=llm, results=path).run(runtime="inline")


class _Opaque:
    """JSON cannot carry it."""

    def __str__(self) -> str:
        return "opaque"


def test_short_circuit_has_no_rows(tmp_path: Path) -> None:
    """S-MR-82: its task is no item's."""
    path = tmp_path / "results.jsonl"
    run = team(results=path, direct_task=lambda items: map_task(len(items))).start(runtime="inline")
    assert isinstance(run, MapReduceRun)
    assert list(run.items()) == []
    assert run.result(PATIENCE_S).raw == "6"
    assert not path.exists() or not path.read_text()


async def test_stream_gives_results_then_the_output() -> None:
    """S-MR-131: each item's result with its index; the output is the last."""
    ensemble = mapping(iter(range(20)), llm=ScriptedModel(otherwise=_fails_at_7), on_item_error="skip")
    told = [each async for each in ensemble.stream(runtime="inline")]
    output = told.pop()
    assert isinstance(output, EnsembleOutput)
    results = sorted((each for each in told if isinstance(each, ItemResult)), key=lambda each: each.index)
    assert [(each.index, each.item) for each in results] == [(number, number) for number in range(20)]
    assert [each.index for each in results if each.error is not None] == [7]
    assert [each.output.raw for each in results if each.output is not None] == raws(output)


async def _fails_at_7(asked: ScriptedCall) -> object:
    return ValueError("no") if task_of(asked) == "map 7" else answer(asked)


@pytest.mark.parametrize("has_readers", [True, False])
def test_no_event_is_made_where_results_alone_are_read(has_readers: bool) -> None:  # noqa: FBT001  the parameter
    """S-MR-131: `stream` gives no events, so that no process builds or sends one."""
    run = mapping(range(3)).begin(runtime="inline", has_event_readers=has_readers)
    assert sorted(each.index for each in run.items()) == [0, 1, 2]
    run.result(PATIENCE_S)
    assert bool(list(run.events())) is has_readers


def test_readers_may_come_late_and_more_than_one() -> None:
    """S-MR-131: the past ones first; in order of completion."""
    run = mapping(range(5)).start(runtime="inline")
    run.result(PATIENCE_S)
    first, second = ([each.index for each in run.items()] for _ in range(2))
    assert first == second
    assert sorted(first) == list(range(5))


def test_slow_reader_holds_the_pull_back() -> None:
    """S-MR-131: no more results wait for it than the window is wide; a reader that left is waited for no more."""
    pulled = itertools.count()
    run = mapping((next(pulled) for _ in range(100)), max_parallel_tasks=4).start(runtime="inline")
    results = cast("Generator[ItemResult]", iter(run.items()))
    for read in range(1, 20):
        next(results)
        assert int(repr(pulled)[6:-1]) <= read + 4 + 1
    results.close()
    assert len(run.result(PATIENCE_S).task_outputs) == 100


async def test_stream_that_is_left_early_cancels_the_run() -> None:
    """S-MR-131, S-SET-27: an endless source ends, too, and is closed."""
    closed = threading.Event()

    def endless() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.set()

    stream = cast("AsyncGenerator[object]", mapping(endless()).stream(runtime="inline"))
    async for _ in stream:
        break
    await stream.aclose()
    await asyncio.to_thread(wait_for, closed)


def test_outputs_are_read_when_asked_and_travel() -> None:
    """S-MR-132, S-MR-133: item order; they compare with lists, can be sliced and pickled."""
    output = mapping(range(9), max_parallel_tasks=2).run(runtime="inline")
    assert output.raw == "8"
    assert [each.raw for each in output.task_outputs[2:4]] == ["2", "3"]
    assert output.task_outputs == list(output.task_outputs)
    again = pickle.loads(pickle.dumps(output))  # noqa: S301  our own bytes
    assert again.task_outputs == output.task_outputs
    assert trace_of(again).task_traces == trace_of(output).task_traces
    assert trace_of(output).workflow == "map"


# What tasks may be.


class Fruit(BaseModel):
    """A typed answer."""

    name: str
    count: int


def test_maps_may_have_types_guardrails_handlers_and_streams(tmp_path: Path) -> None:
    """S-MR-130, S-MR-41: whatever a task can have; a stand-in's place is taken by the parsed output's text."""
    path = tmp_path / "results.jsonl"
    checked = Calls(lambda _: GuardrailResult.success())

    def making(item: int) -> Task:
        return Task(
            description=f"map {item}", expected_output="e", output_type=Fruit, input_guardrails=[checked],
            output_guardrails=[checked], stream=True,
        )  # fmt: skip

    llm = ScriptedModel(otherwise='{"name": "fig", "count": 2}')
    watcher = Watcher()
    output = mapping(range(3), map_task=making, llm=llm, results=path, listeners=[watcher]).run(runtime="inline")
    assert [each.parsed_output for each in output.task_outputs] == [Fruit(name="fig", count=2)] * 3
    assert {json.loads(line)["parsed"]["name"] for line in path.read_text().splitlines()} == {"fig"}
    assert len(checked) == 6
    assert watcher.of(TokenEvent)


def test_outputs_that_cannot_be_pickled_stay_as_they_are() -> None:
    """S-MR-132: inline anything may be an output, of a class without a name in its module for example."""

    class Local(BaseModel):
        n: int

    def making(item: int) -> Task:
        handler = lambda _: ToolResult.success(f"{item}", Local(n=item))  # noqa: E731  as users write them
        return Task(description=f"map {item}", expected_output="e", output_type=Local, handler=handler)

    output = mapping(range(2), map_task=making).run(runtime="inline")
    assert [each.parsed_output for each in output.task_outputs] == [Local(n=0), Local(n=1)]


# Order of work.


def test_pipelined_reduce_begins_while_maps_run() -> None:
    """S-MR-111, S-MR-116: a group is full before the last item has come; its trace says what it was."""
    reduced = threading.Event()

    async def entry(asked: ScriptedCall) -> object:
        if task_of(asked).startswith("reduce"):
            reduced.set()
        return answer(asked)

    def source() -> Iterator[int]:
        yield from range(4)
        wait_for(reduced)
        yield from range(4, 6)

    output = team(items=source(), mode="pipelined", llm=ScriptedModel(otherwise=entry)).run(runtime="inline")
    assert sorted(raws(output)[:6]) == [f"{number}" for number in range(6)]
    assert len(output.task_outputs) > 7
    assert trace_of(output).workflow == "map_reduce_adaptive"
    first, second = trace_of(output).map_reduce_levels[:2]
    assert (first.level, second.level) == (0, 1)


@pytest.mark.parametrize("count", [1, 3, 4, 7, 10, 28])
def test_static_and_ordered_has_the_shapes_of_static_mode(count: int) -> None:
    """S-MR-113, S-MR-32, S-MR-33: whichever was done first."""

    async def entry(asked: ScriptedCall) -> object:
        for _ in range((count * 7 - len(task_of(asked)) * 3) % 11):
            await asyncio.sleep(0)
        return answer(asked)

    fed = team(count, chunk_size=3, mode="pipelined", ordered=True, llm=ScriptedModel(otherwise=entry))
    output = fed.run(runtime="inline")
    assert counts(output) == counts(team(count, chunk_size=3).run(runtime="inline"))
    assert output.raw.replace("(", "").replace(")", "") == "+".join(str(number) for number in range(count))
    assert trace_of(output).workflow == "map_reduce_static"


def test_static_and_fed_groups_by_level() -> None:
    """S-MR-114, S-MR-115: as static mode over a list; reduce factories get stand-ins with the outputs' texts."""
    seen = Calls(lambda chunk: Task(description=f"reduce {len(chunk)}", expected_output="e", context=chunk))
    output = team(items=iter(range(7)), chunk_size=3, reduce_task=seen).run(runtime="inline")
    assert counts(output) == [7, 3, 1]
    assert [[each.description for each in chunk] for (chunk,) in seen.arguments] == [
        ["0", "1", "2"], ["3", "4", "5"], ["6"], ["(3)", "(3)", "(1)"],
    ]  # fmt: skip


def test_pipelined_reducer_that_inflates_ends() -> None:
    """S-MR-112: outputs of the last level wait for the final reduce."""

    async def entry(asked: ScriptedCall) -> ChatResponse:
        weight = 9 if task_of(asked).startswith("map") else 100
        return ChatResponse("x", usage=TokenUsage(1, weight))

    output = team(20, mode="pipelined", llm=ScriptedModel(otherwise=entry), max_reduce_levels=2).run(runtime="inline")
    assert len(trace_of(output).map_reduce_levels) == 4
    assert trace_of(output).task_traces[-1].node_type == "final-reduce"


@pytest.mark.parametrize("durability", ["off", "run", "effects"])
@pytest.mark.parametrize("capture", ["off", "standard", "full"])
def test_output_is_the_same_however_it_is_kept(
    durability: str, capture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-MR-90: durability and capture decide what is recorded, not what is done."""
    monkeypatch.chdir(tmp_path)  # where the traces of mode full go
    output = team(6, durability=durability, capture_mode=capture, llm=model()).run(runtime="inline")
    assert counts(output) == [6, 2, 1]
    assert output.raw == "((0+1+2)+(3+4+5))"


def test_task_events_are_those_of_maps_without_a_total_where_none_is_known() -> None:
    """S-MR-95: an iterator tells nobody how many there will be."""
    watcher = Watcher()
    mapping(iter(range(3)), listeners=[watcher]).run(runtime="inline")
    assert sorted((each.task_index, each.total_tasks) for each in watcher.of(TaskCompleteEvent)) == [
        (1, 0),
        (2, 0),
        (3, 0),
    ]
