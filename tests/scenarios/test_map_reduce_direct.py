"""The short-circuit of an adaptive map-reduce: a small input is one direct task."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from ensemble_ray import (
    Agent,
    Task,
)
from tests.scenarios.mapping import (
    Calls,
    counts,
    failing,
    map_task,
    model,
    raws,
    team,
    trace_of,
)
from tests.scenarios.teams import wait_for


def test_small_input_is_one_direct_task() -> None:
    """S-MR-81, S-MR-82, S-MR-160: all items at once; no other factory is called."""
    unasked = Calls(map_task)
    direct = Calls(lambda items: Task.of(f"map {items}"))
    output = team(6, direct_task=direct, map_task=unasked, reduce_task=unasked).run(runtime="inline")
    assert direct.arguments == [([0, 1, 2, 3, 4, 5],)]
    assert (len(unasked), raws(output)) == (0, ["[0, 1, 2, 3, 4, 5]"])
    (trace,) = trace_of(output).task_traces
    assert (trace.node_type, trace.map_reduce_level) == ("direct", 0)
    (level,) = trace_of(output).map_reduce_levels
    assert (level.level, level.task_count) == (0, 1)


@pytest.mark.parametrize(("length", "is_direct"), [(43, True), (44, False)])
def test_input_is_measured_item_by_item(length: int, *, is_direct: bool) -> None:
    """S-MR-80, S-MR-81, S-MR-83, S-MR-84: floors per item, inclusive; the token estimator plays no part."""
    direct = Calls(lambda items: Task.of(f"map {len(items)}"))
    output = team(
        3,
        direct_task=direct,
        input_estimator=lambda _: "x" * length,
        token_estimator=lambda _: 1,
        target_token_budget=30,
    ).run(runtime="inline")
    assert len(direct) == is_direct
    assert len(output.task_outputs) == (1 if is_direct else 4)


def test_direct_agent_does_the_direct_task() -> None:
    """S-MR-2, S-MR-81: it is made first."""
    solo = Agent(role="Solo", goal="do all", llm=model())
    output = team(
        direct_agent=lambda: solo, direct_task=lambda items, agent: Task.of(f"map {agent.role}{len(items)}")
    ).run(runtime="inline")
    assert [(each.agent_role, each.raw) for each in output.task_outputs] == [("Solo", "Solo6")]


def test_source_is_read_no_further_than_the_budget_tells() -> None:
    """S-MR-80, S-MR-83: what was read is mapped all the same."""
    read = itertools.count()
    items = (f"{next(read):040}" for _ in range(300))
    output = team(items=items, direct_task=Calls(map_task), target_token_budget=1000).run(runtime="inline")
    assert counts(output) == [300, 3, 1]


def test_direct_task_that_fails_fails_the_run() -> None:
    """S-MR-82: there is nothing to go on with, whatever failed items mean; it is no item's failure."""
    with pytest.raises(Exception, match="Task 'map all' failed: "):
        team(direct_task=lambda _: Task.of("map all"), llm=failing("map"), on_item_error="collect").run(
            runtime="inline"
        )


def test_source_is_let_go_when_an_estimator_raises() -> None:
    """S-MR-80, S-MR-106: what it raises reaches the caller, and the generator is closed."""
    closed = threading.Event()

    def items() -> Iterator[str]:
        try:
            yield from ["a", "b"] * 1000
        finally:
            closed.set()

    def fail(_item: object) -> str:
        raise LookupError("no text")

    with pytest.raises(LookupError, match="no text"):
        team(items=items(), direct_task=lambda every: Task.of(f"all {every}"), input_estimator=fail).run(
            runtime="inline"
        )
    wait_for(closed)
