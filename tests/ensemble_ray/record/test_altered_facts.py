"""Records that somebody altered: every reader gives the record's error or goes on, and never a bare `TypeError` (S-DUR-90).

Each field of each fact, two levels deep, is left out or takes a value of another shape, one at a time, in the file of a
real run; then everything that reads it is called.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ensemble_ray import (
    Agent,
    Ensemble,
    EnsembleError,
    IllegalStateError,
    InlineRuntime,
    MapEnsemble,
    RecordError,
    RunState,
    Task,
    ToolCall,
    Workflow,
    resume,
    tool,
)
from ensemble_ray.facts.fact import Fact
from ensemble_ray.facts.reading import read_fact
from ensemble_ray.ports import Persistence
from ensemble_ray.process.concurrency import run_blocking
from ensemble_ray.process.config import home_directory
from ensemble_ray.record.progress import tasks_done
from ensemble_ray.record.sqlite.losses import RECORD
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.trace import fold_output, fold_trace
from ensemble_ray.record.view.map_reduce import VIEW_KINDS, MapReduceView
from ensemble_ray.record.view.tree import render_tree
from ensemble_ray.recovery.forking import offer_fork
from ensemble_ray.teamfile import Runnable
from ensemble_ray.testing import ScriptedCall, ScriptedModel, replay

#: What takes the place of a value; the first one leaves it out.
WRONG = ("<left out>", None, [], {}, "x", -1, True, [1], {"a": [None]}, 10**30)
#: So many alterations of each kind of run are tried, by lot; another seed tries others.
SAMPLE, SEED = 12, 1
Alteration = tuple[int, str]


@tool(effect="once")
def order(item: str) -> str:
    """Order an item."""
    return item


def _buys(asked: ScriptedCall) -> ToolCall | str:
    is_told = any(message.role == "tool" for message in asked.messages)
    return "done" if is_told else ToolCall("1", "order", '{"item": "tea"}')


def _manages(asked: ScriptedCall) -> ToolCall | str:
    is_told = any(message.role == "tool" for message in asked.messages)
    return (
        "all done" if is_told else ToolCall("1", "delegate_task", '{"agent_role": "Writer", "task_description": "x"}')
    )


def sequential() -> Ensemble:
    """Two tasks of an agent with a tool, and one of a handler."""
    buyer = Agent(role="Buyer", goal="Buy", tools=[order], llm=ScriptedModel(otherwise=_buys))
    two = Task(name="two", description="Second", expected_output="x", handler=_handled, effect="none")
    one, three = (Task(name=name, description=name, expected_output="x", agent=buyer) for name in ("one", "three"))
    return Ensemble(tasks=[one, two, three])


def _handled(_: object) -> str:
    return "handled"


def hierarchical() -> Ensemble:
    """A manager with a worker."""
    writer = Agent(role="Writer", goal="Write", llm=ScriptedModel(otherwise="written"))
    tasks = [Task(description="Write it", expected_output="x", agent=writer)]
    manager = ScriptedModel(otherwise=_manages)
    return Ensemble(agents=[writer], tasks=tasks, workflow=Workflow.HIERARCHICAL, manager_llm=manager)


def fed() -> MapEnsemble:
    """A map over items."""
    return MapEnsemble(items=["a", "b"], map_task=lambda item: Task.of(f"map {item}"), llm=ScriptedModel(otherwise="y"))


TEAMS: dict[str, tuple[Callable[[], Runnable], str]] = {
    "sequential": (sequential, "three"),
    "hierarchical": (hierarchical, "manager"),
    "fed": (fed, "map-1"),
}


def _paths(value: Any, path: tuple[Any, ...] = (), depth: int = 3) -> Iterator[tuple[Any, ...]]:
    yield path
    if depth:
        for key in value if isinstance(value, dict) else range(min(1, len(value))) if isinstance(value, list) else ():
            yield from _paths(value[key], (*path, key), depth - 1)


def _altered(data: Any, path: tuple[Any, ...], wrong: object) -> object:
    if not path:
        return None if wrong == WRONG[0] else wrong
    whole = at = copy.deepcopy(data)
    for key in path[:-1]:
        at = at[key]
    if wrong == WRONG[0]:
        del at[path[-1]]
    else:
        at[path[-1]] = wrong
    return whole


def _alterations(facts: Sequence[Fact]) -> list[Alteration]:
    """Positions of facts, and what their data becomes."""
    found = [
        (fact.seq, json.dumps(_altered(fact.data, path, wrong)))
        for fact in facts
        for path in _paths(fact.data)
        for wrong in WRONG
    ]
    return random.Random(SEED).sample(found, min(SAMPLE, len(found)))  # noqa: S311  repeatable, keeps no secret


async def _cut(facts: Sequence[Fact], run_id: str) -> None:
    """A run that was interrupted behind these facts."""
    owned = await SqliteStore(home_directory()).begin(run_id)
    copies = [
        read_fact(run=run_id, kind=fact.kind, name=fact.name, at=fact.at, data=fact.data.to_data()) for fact in facts
    ]
    await owned.journal.append(copies, until=Persistence.COMMITTED)
    await owned.close(RunState.INTERRUPTED)
    while (home_directory() / "runs" / run_id / f"{RECORD}-wal").exists():  # noqa: ASYNC110  closing goes on in the background
        await asyncio.sleep(0.01)


def _copy(record: Path, copy: Path) -> None:
    """Copy a record that may be closed meanwhile, which removes its log."""
    try:
        shutil.copytree(record, copy)
    except shutil.Error:
        shutil.rmtree(copy)
        shutil.copytree(record, copy)


def _readers(run_id: str, team: Callable[[], Runnable], last: str) -> dict[str, Callable[[], object]]:
    store = SqliteStore(home_directory())

    async def viewed() -> MapReduceView:
        view = MapReduceView(run_id)
        async for page in store.read(run_id, kinds=VIEW_KINDS):
            view.apply(page)
        return view

    def facts() -> list[Fact]:
        return run_blocking(store.facts(run_id))

    def shown() -> None:
        view = run_blocking(viewed())
        list(view.rows())
        json.dumps(view.data())

    return {
        "trace": lambda: render_tree(fold_trace(facts())),
        "output": lambda: fold_output(facts()),
        "view": shown,
        "progress": lambda: run_blocking(tasks_done(store, run_id)),
        "fork": lambda: run_blocking(offer_fork(run_id, last, team())),
        "replay": lambda: replay(run_id, team()),
        "resume": lambda: resume(run_id, team(), runtime=InlineRuntime(), allow_changes=True),
    }


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "fed" else pytest.mark.heavy) for kind in TEAMS]
)
def test_altered_record_is_read_or_refused_with_an_error_of_the_library(kind: str) -> None:
    """S-DUR-90: by each reader; what is refused for its shape names the file and the fact."""
    team, last = TEAMS[kind]
    team().run(run_id="whole", runtime=InlineRuntime())
    runs = home_directory() / "runs"
    facts = run_blocking(SqliteStore(home_directory()).facts("whole"))
    run_blocking(_cut(facts[:-2], "cut"))
    refused = 0
    for base, known in (("whole", facts), ("cut", facts[:-2])):
        for number, (seq, data) in enumerate(_alterations(known)):
            run_id = f"{base}-{number}"  # each of its own: what was read is closed in the background
            _copy(runs / base, runs / run_id)
            _write(runs / run_id / RECORD, seq, data)
            for name, read in _readers(run_id, team, last).items():
                try:
                    read()
                except RecordError as error:
                    refused += f"fact {seq} in {runs / run_id / RECORD}" in str(error)
                except (EnsembleError, IllegalStateError):
                    pass  # another one of the library's, such as that the run has no output
                except Exception as error:  # noqa: BLE001  which one is what is tested
                    pytest.fail(
                        f"{kind}, {base}: {name} with fact {seq} as {data[:200]}: {type(error).__name__}: {error}"
                    )
    assert refused > SAMPLE / 4


def _write(path: Path, seq: int, data: str) -> None:
    """As in a record of a format without checksums."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("UPDATE facts SET data = ?, crc = NULL WHERE seq = ?", (data, seq))
    connection.close()


def test_flipped_bit_of_a_fact_is_told() -> None:
    """S-DUR-9: by its checksum, where the fact still looks like one."""
    sequential().run(run_id="flipped", runtime=InlineRuntime())
    path = home_directory() / "runs" / "flipped" / RECORD
    changes = (
        "name = name || 'x'", "instance = instance || 'x'", "at = at + 1", "epoch = epoch + 1", "crc = crc + 1",
        "data = replace(data, 'e', 'd')",
    )  # fmt: skip
    for number, change in enumerate(changes):
        altered = path.parent.with_name(f"flipped-{number}")
        _copy(path.parent, altered)
        with contextlib.closing(sqlite3.connect(altered / RECORD, isolation_level=None)) as connection:
            connection.execute(f"UPDATE facts SET {change} WHERE seq = 3")  # noqa: S608  our own names
        with pytest.raises(RecordError, match=r"fact 3 in .* was altered"):
            run_blocking(SqliteStore(home_directory()).facts(altered.name))


@pytest.mark.parametrize("column", ["data", "name"])
def test_flipped_bit_that_makes_no_text_is_told(column: str) -> None:
    """S-DUR-9: Python cannot decode the text, which is damage too, and the error does not repeat the text."""
    sequential().run(run_id="undecodable", runtime=InlineRuntime())
    path = home_directory() / "runs" / "undecodable" / RECORD
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        changed = f"UPDATE facts SET {column} = CAST(CAST({column} AS BLOB) || X'FF' AS TEXT) WHERE seq = 3"  # noqa: S608
        connection.execute(changed)
    with pytest.raises(RecordError, match=r"The record is damaged: .* \(Could not decode to UTF-8") as told:
        run_blocking(SqliteStore(home_directory()).facts("undecodable"))
    assert len(str(told.value)) < 400


@pytest.mark.parametrize("has_checksum", [True, False])
@pytest.mark.parametrize(
    ("column", "value"),
    [("kind", b"\xff"), ("name", b"x"), ("at", "soon"), ("at", 1e300), ("epoch", "x"), ("data", b"1")],
)
def test_altered_column_is_told(column: str, value: object, *, has_checksum: bool) -> None:
    """S-DUR-90: what is not data of the fact itself, too."""
    sequential().run(run_id="altered", runtime=InlineRuntime())
    path = home_directory() / "runs" / "altered" / RECORD
    connection = sqlite3.connect(path, isolation_level=None)
    forgotten = "" if has_checksum else ", crc = NULL"
    connection.execute(f"UPDATE facts SET {column} = ?{forgotten} WHERE seq = 3", (value,))  # noqa: S608  our own names
    connection.close()
    for name, read in _readers("altered", sequential, "three").items():
        if name in {"view", "progress"}:  # which pass over that fact
            continue
        with pytest.raises(RecordError, match="fact 3"):
            read()


def test_altered_list_entry_of_a_run_is_no_crash() -> None:
    """S-DUR-90: lists show the run all the same, as one whose state is not known."""
    sequential().run(run_id="altered", runtime=InlineRuntime())
    meta = home_directory() / "runs" / "altered" / "meta.json"
    good = json.loads(meta.read_text())
    dates = ("9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59", "x", 7)
    for wrong in ([], 7, *({**good, "created_at": date} for date in dates), {**good, "state": []}):
        meta.write_text(json.dumps(wrong))
        (run,) = run_blocking(SqliteStore(home_directory()).runs())
        assert run.run_id == "altered"
