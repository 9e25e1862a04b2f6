"""Calls of unknown outcome in runs of many tasks."""

from __future__ import annotations

from ensemble_ray import LlmInteraction
from ensemble_ray.record.unknown_outcomes import UnknownOutcomes
from ensemble_ray.record.view.map_reduce import MapReduceView
from ensemble_ray.record.view.tree import render_rows, render_tree

from .facts_of_dynamic_runs import begun as dynamic
from .facts_of_dynamic_runs import failed, group, pulled, resumed
from .facts_of_runs import RUN, intent, result, task_trace
from .test_tree import _finished


def _view(*facts: object, is_running: bool = False) -> MapReduceView:
    view = MapReduceView(RUN, is_running=is_running)
    view.apply([dynamic("collect"), pulled(3), *facts])  # type: ignore[list-item]  facts, as the fixtures give them
    return view


def _lines(view: MapReduceView) -> list[str]:
    return render_rows(tuple(view.rows())).splitlines()


def test_calls_without_a_known_outcome_are_counted_and_told() -> None:
    """S-DUR-26: without a result, or with one that says so; also of work that a map handed on."""
    lines = _lines(
        _view(
            intent("map-0#0", 0, 0, 102.0), result("map-0#0", 0, 0, 103.0),
            intent("map-1#0", 0, 0, 102.0),
            intent("map-2#0/0/call-0/delegate#0", 1, 0, 102.0), result("map-2#0/0/call-0/delegate#0", 1, 0, 103.0, "unknown"),
        )
    )  # fmt: skip
    assert "[2 unknown outcomes]" in lines[1]
    assert sorted(lines[2:]) == [
        '└─ map-1: search({"q": 1}) -> No result was recorded: the run ended during this call  [unknown]',
        '├─ map-2: search({"q": 1}) -> 3 hits  [unknown]',
    ]


def test_a_call_that_was_repeated_has_a_known_outcome() -> None:
    """S-DUR-23: the newest counts."""
    view = _view(
        intent("map-0#0", 0, 0, 102.0), resumed(), intent("map-0#0", 0, 0, 111.0), result("map-0#0", 0, 0, 112.0)
    )
    assert view.data()["unknown_outcomes"] == 0


def test_a_call_that_is_on_its_way_has_no_outcome_yet() -> None:
    """S-DUR-26: of a run that is running, calls of tasks that have ended count."""
    facts = (intent("map-0#0", 0, 0, 102.0), intent("map-1#0", 0, 0, 102.0), failed("map-1#0"))
    assert _view(*facts, is_running=True).data()["unknown_outcomes"] == 1
    assert _view(*facts).data()["unknown_outcomes"] == 2


def test_reduces_have_them_too() -> None:
    """S-DUR-26: in their own level."""
    view = _view(group("final-reduce", 1, 0, "map-0", "map-1"), intent("final-reduce#0", 0, 0, 105.0))
    assert [tally.unknown for tally in view.levels] == [0, 1]


def test_many_are_counted_and_the_first_are_told() -> None:
    """S-DUR-26: a view does not grow with its run."""
    found = UnknownOutcomes()
    for number in range(1000):
        found.apply(intent(f"map-{number}#0", 0, 0, 102.0))
        found.apply(result(f"map-{number}#0", 0, 0, 103.0, "unknown"))
    assert found.counts(lambda _: True).total() == 1000
    rows = list(found.rows(lambda _: True))
    assert len(rows) == 21
    assert rows[-1].title == "and 980 more of unknown outcome"


def test_a_large_planned_map_reduce_tells_them_without_its_tasks() -> None:
    """S-DUR-26: where tasks have no rows of their own."""
    trace = _finished()
    task = task_trace("Sum up", "short")
    (model, *_) = task.llm_interactions
    call = model.tool_calls[0].replace(outcome="unknown", tool_name="pay")
    lost = task.replace(llm_interactions=[LlmInteraction(**{**dict(model), "tool_calls": (call,)})])
    tasks = [each.replace(map_reduce_level=0, node_type="map") for each in [lost, *([task] * 200)]]
    levels = [{"level": 0, "task_count": 201, "duration": 1, "workflow": "parallel"}]
    text = render_tree(trace.replace(task_traces=tasks, map_reduce_levels=levels))
    assert "[1 unknown outcome]" in text
    assert text.count("pay(") == 1
