"""A dynamic run as people look at it."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from ensemble_ray import RunState
from ensemble_ray.facts.fact import Fact
from ensemble_ray.ports import Persistence
from ensemble_ray.record.progress import tasks_done
from ensemble_ray.record.sqlite.store import SqliteStore
from ensemble_ray.record.trace import fold_trace
from ensemble_ray.record.view.map_reduce import VIEW_KINDS, MapReduceView
from ensemble_ray.record.view.tree import render_rows, render_tree, tree_rows

from .facts_of_dynamic_runs import begun as dynamic
from .facts_of_dynamic_runs import group, items_fact, pulled
from .facts_of_runs import RUN, begun, ended, fact, failed, model, node, output, task_trace

GIVEN = output("Sum up", "short").model_dump(mode="json")


def done(instance: str) -> Fact:
    """Work that completed."""
    return fact("output", instance, 105.0, output=GIVEN)


def lost(key: str, number: int = 0) -> Fact:
    """Work that failed."""
    trace = task_trace("Sum up", "").model_dump(mode="json")
    told = {"error_type": "AgentExecutionError", "message": f"no answer for {key}", "trace": trace}
    return fact("task_failed", f"{key}#{number}", 105.0, **told)


def shown(facts: Sequence[Fact]) -> list[str]:
    """The lines of the tree."""
    view = MapReduceView(RUN)
    view.apply(facts)
    return render_rows(tuple(view.rows())).splitlines()


REDUCED = [
    dynamic("collect"), pulled(4), *(done(f"map-{n}#0") for n in range(3)), lost("map-3"),
    group("reduce-1-0", 1, 0, "map-0", "map-1"), done("reduce-1-0#0"),
    group("final-reduce", 2, 0, "reduce-1-0", "map-2"), done("final-reduce#0"), ended(110),
]  # fmt: skip


def test_tree_has_a_line_for_each_level() -> None:
    """S-MR-93, S-MR-161: with counts, tokens and times; failures below."""
    assert shown(REDUCED) == [
        "Run run-1: map_reduce_adaptive, completed  [10.00 s]  [4 items]  [6 model calls]  [600 + 120 tokens]",
        "├─ level 0: map  [3 of 4 tasks done]  [1 failed]  [4.00 s]  [4 model calls]  [400 + 80 tokens]  [4 tool calls]",
        "├─ level 1: reduce  [1 of 1 task done]  [4.00 s]  [1 model call]  [100 + 20 tokens]  [1 tool call]",
        "├─ level 2: final-reduce  [1 of 1 task done]  [4.00 s]  [1 model call]  [100 + 20 tokens]  [1 tool call]",
        "└─ map-3: AgentExecutionError: no answer for map-3",
    ]


def test_data_says_the_same() -> None:
    """S-MR-161: as JSON."""
    view = MapReduceView(RUN)
    view.apply(REDUCED)
    data = json.loads(json.dumps(view.data()))
    assert (data["state"], data["items"], data["failed"]) == ("completed", 4, 1)
    assert [(level["node_type"], level["tasks"], level["done"]) for level in data["levels"]] == [
        ("map", 4, 3), ("reduce", 1, 1), ("final-reduce", 1, 1),
    ]  # fmt: skip
    assert data["first_failures"] == {"map-3": "AgentExecutionError: no answer for map-3"}


def test_size_does_not_depend_on_the_number_of_items() -> None:
    """S-MR-161: of many failures the first ones are told."""
    count = 300
    items = items_fact(RUN, 101.0, indices=range(count), digests=[""] * count)
    lines = shown([dynamic("collect"), items, *(lost(f"map-{n}") for n in range(count))])
    assert len(lines) == 23
    assert "interrupted" in lines[0]
    assert lines[-1] == "└─ and 280 more failed"


def test_work_that_was_made_good_is_no_failure_any_more() -> None:
    """S-MR-163: the later execution counts; what the earlier one cost counts too."""
    again = [fact("resume", "run", 120.0, is_restart=False), done("map-0#1")]
    lines = shown([dynamic("fail"), pulled(1), lost("map-0"), ended(106, "failed"), *again])
    assert lines[1:] == [
        "└─ level 0: map  [1 of 1 task done]  [4.00 s]  [2 model calls]  [200 + 40 tokens]  [2 tool calls]"
    ]


def test_short_circuit_is_one_level() -> None:
    """S-MR-82: of one direct task."""
    assert shown([dynamic(), done("direct#0"), ended(110)])[1].startswith("└─ level 0: direct  [1 of 1 task done]")


async def test_tasks_are_counted_without_their_outputs(tmp_path: Path) -> None:
    """S-MR-161, S-LOOP-186: done, known of, and of items; names only are read; a planned run has as many tasks as its plan."""
    store = SqliteStore(tmp_path)
    handed = fact("output", "a#0/0/call-0/delegate#0", 1.0)
    facts = {
        "fed": [*REDUCED[:-2], handed],
        "direct": [dynamic(), done("direct#0")],
        "planned": [*begun(node("a", "A"), node("b", "B")), fact("output", "a#0", 2.0), handed],
        "looped": [
            *begun(node("a", "A"), node("b", "B"), node("c", "C")),
            *(fact("output", name, 2.0) for name in ("a#0", "loop:l#0/b#0", "loop:l#1/b#0")),
        ],
    }
    for name, told in facts.items():
        run = await store.begin(name)
        await run.journal.append(told, until=Persistence.COMMITTED)
        await run.close(RunState.INTERRUPTED)
    found = {name: await tasks_done(store, name) for name in (*facts, "unknown")}
    assert found == {
        "fed": (4, 6, 3, 4),
        "direct": (1, 1, 1, 1),
        "planned": (1, 2, 0, 1),
        "looped": (2, 3, 0, 3),
        "unknown": (0, 0, 0, 0),
    }


def test_only_what_is_shown_is_read() -> None:
    """S-MR-161: the tokens of an answer stand in its task's output."""
    assert "model" not in VIEW_KINDS


@pytest.mark.parametrize(("count", "has_tasks"), [(3, True), (200, False)])
def test_planned_map_reduce_is_shown_by_its_levels(count: int, *, has_tasks: bool) -> None:
    """S-MR-38, S-MR-165: with a line for each task where they are few; errors are told either way."""
    nodes = [node(f"task-{n}", f"Map {n}", node_type="map", level=0) for n in range(count)]
    facts = [*begun(*nodes, node("last", "All", node_type="final-reduce", level=1))]
    facts += [model(f"task-{n}#0", 0, 103) for n in range(count)]
    facts += [*failed("last", 106), ended(107, "failed", "error")]
    rows = tree_rows(fold_trace(facts))
    assert [row.title for row in rows if row.kind == "level"] == ["level 0: map", "level 1: final-reduce"]
    assert any(row.kind == "task" for row in rows) is has_tasks
    assert rows[-1].title.startswith("AgentExecutionError")
    assert render_tree(fold_trace(facts)).count("\n") == len(rows) - 1
